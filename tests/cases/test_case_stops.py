"""When a request ends, and with which word: stop ids, stop strings, lengths, min_tokens. Scripted tokens where control and
text decide, the real sampler where it masks. Cases B096, B097, B099, B100, B102 and B105."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from engine.compute.sampling_row import RowState
from engine.control.scheduler import Scheduler
from engine.engine import Engine, Rejected
from engine.request import SamplingParams
from engine.text.stream import TextStream
from tests.cases.oracle import (
    Answer,
    Ask,
    dense_logits,
    differences,
    engine,
    faults,
    greedy,
    held,
    model,
    play,
    solo,
    text,
)
from tests.server.stub import StubRunner, stub_engine

EOS, OTHER_EOS, USER_STOP = 2, 5, 7
A = 50  # a token of plain text


def ids(words: str) -> list[int]:
    tokenizer = model().tokenizer
    assert tokenizer is not None
    return tokenizer.encode(words, add_special_tokens=False)


def saying(tokens: Sequence[int], eos: frozenset[int] = frozenset({EOS, OTHER_EOS}), **limits: Any) -> Engine:
    """An engine whose answer to everything is ``tokens``, then noise without stop tokens."""
    sizes: dict[str, Any] = {"max_model_len": 64, "captures": ((4, 16),)}
    shared = stub_engine(StubRunner(lambda prompt: tokens), **sizes | limits)
    shared._eos = eos
    return shared


def ask(
    shared: Engine, params: SamplingParams, prompt: Sequence[int] = (11, 12, 13), abort: int | None = None
) -> tuple[Answer, str]:
    """The answer to one request, and its text as far as the stream has it."""
    answer = Answer()
    stream = TextStream(model().tokenizer, prompt, stop=params.stop)
    shared.submit(prompt, params, texts=[stream] if params.stop else [])
    iteration = 0
    while shared.has_work:
        if iteration == abort:
            shared.abort(shared.scheduler.counters.submitted - 1)
        record = shared.step()
        assert faults(shared, record) == []
        answer.sampled += [token for _, token in record.sampled]
        answer.ends += [*record.aborted, *record.finished]
        iteration += 1
    assert held(shared) == []
    if params.stop:
        stream.finish()
    return answer, stream.text


ENDS: dict[str, tuple[list[int], dict[str, Any], tuple[int, str, int | str | None]]] = {
    # what the model says, the parameters -> tokens generated, finish reason, what stopped it
    "eos": ([A, A, EOS], {"max_tokens": 9}, (3, "stop", EOS)),
    "second eos": ([A, OTHER_EOS], {"max_tokens": 9}, (2, "stop", OTHER_EOS)),
    "stop id": ([A, USER_STOP], {"max_tokens": 9, "stop_token_ids": (USER_STOP,)}, (2, "stop", USER_STOP)),
    "stop string": (ids("so END it"), {"max_tokens": 20, "stop": ("END",)}, (len(ids("so END")), "stop", "END")),
    "max_tokens": ([A] * 9, {"max_tokens": 5}, (5, "length", None)),
    "context full": ([A] * 99, {}, (61, "length", None)),
    "eos at max_tokens": ([A, A, EOS], {"max_tokens": 3}, (3, "stop", EOS)),
    "stop string at max_tokens": (
        ids("END"), {"max_tokens": len(ids("END")), "stop": ("END",)}, (len(ids("END")), "stop", "END")
    ),
    "half a stop string at max_tokens": (
        ids("EN"), {"max_tokens": len(ids("EN")), "stop": ("END",)}, (len(ids("EN")), "length", None)
    ),
    "eos before the stop string": (
        [*ids("EN"), EOS], {"max_tokens": 9, "stop": ("END",)}, (len(ids("EN")) + 1, "stop", EOS)
    ),
    "one token": ([A], {"max_tokens": 1}, (1, "length", None)),
    "eos at once": ([EOS], {"max_tokens": 1}, (1, "stop", EOS)),
    "ignored eos": ([A, EOS, OTHER_EOS, A, EOS], {"max_tokens": 5, "ignore_eos": True}, (5, "length", None)),
    "user stop id under ignore_eos": (
        [EOS, OTHER_EOS, USER_STOP, A], {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (USER_STOP,)},
        (3, "stop", USER_STOP),
    ),
    "eos named by the user under ignore_eos": (
        [A, EOS], {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (EOS,)}, (2, "stop", EOS)
    ),
    "stop string under ignore_eos": (
        [EOS, *ids("END")], {"max_tokens": 9, "ignore_eos": True, "stop": ("END",)}, (len(ids("END")) + 1, "stop", "END")
    ),
    "stop id before min_tokens": (
        [USER_STOP, EOS, A, USER_STOP], {"max_tokens": 9, "min_tokens": 4, "stop_token_ids": (USER_STOP,)}, (4, "stop", USER_STOP)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_b099_b105_how_a_request_ends(name: str) -> None:
    tokens, params, (count, reason, stop) = ENDS[name]
    answer, _ = ask(saying(tokens), SamplingParams(temperature=0.0, **params))
    (end,) = answer.ends
    assert (len(answer.tokens), end.reason, end.stop) == (count, reason, stop)
    assert end.facts is not None
    assert end.facts.generated_tokens == count


@pytest.mark.parametrize("when", [0, 1, 4])
def test_b099_an_abort_has_no_normal_reason(when: int) -> None:
    answer, _ = ask(saying([A] * 30), SamplingParams(max_tokens=20), abort=when)
    assert answer.reason == "abort"
    assert len(answer.tokens) == when


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("my dog pleas", "assistant", "my dog pleas"),
        ("so EN", "END", "so EN"),
        ("EN", "END", "EN"),
        ("a b", "b c", "a b"),
    ],
)
@pytest.mark.parametrize("end", ["eos", "length"])
def test_b093_the_held_tail_is_delivered(said: str, stop: str, shown: str, end: str) -> None:
    """Text that might have become a stop string belongs to the answer once the answer has ended."""
    tokens = ids(said)
    params = SamplingParams(max_tokens=len(tokens) + (end == "eos"), stop=(stop,), temperature=0.0)
    answer, seen = ask(saying([*tokens, EOS]), params)
    assert seen == shown
    assert answer.reason == ("stop" if end == "eos" else "length")


# On the real sampler -----------------------------------------------------------------------------------------------

BOTH = frozenset({EOS, OTHER_EOS})


def biased(token: int, **params: Any) -> SamplingParams:
    """The model says ``token`` wherever it may."""
    return SamplingParams(temperature=0.0, logit_bias={token: 100.0}, **params)


def answer_of(params: SamplingParams, prompt: int = 5, eos: frozenset[int] = BOTH) -> Answer:
    (answer,) = play(engine(eos=eos, num_kv_blocks=16), [Ask(text(1, prompt), params)])
    return answer


@pytest.mark.parametrize("token", [EOS, OTHER_EOS, USER_STOP])
@pytest.mark.parametrize("least", [0, 1, 4])
def test_b096_min_tokens_holds_back_every_stop_token(token: int, least: int) -> None:
    """The model wants to stop at once with any of the three ids: it stops right after ``min_tokens``, not before."""
    answer = answer_of(biased(token, max_tokens=12, min_tokens=least, stop_token_ids=(USER_STOP,)))
    assert answer.tokens[-1] == token
    assert not set(answer.tokens[:-1]) & {EOS, OTHER_EOS, USER_STOP}
    assert (len(answer.tokens), answer.reason) == (least + 1, "stop")


def test_b096_without_an_end_of_sequence() -> None:
    answer = answer_of(biased(EOS, max_tokens=6, min_tokens=4), eos=frozenset())
    assert (answer.tokens, answer.reason) == ([EOS] * 6, "length")
    answer = answer_of(biased(USER_STOP, max_tokens=9, min_tokens=4, stop_token_ids=(USER_STOP,)), eos=frozenset())
    assert (len(answer.tokens), answer.reason) == (5, "stop")


@pytest.mark.parametrize("ignore", [False, True])
def test_b097_the_last_entry_of_the_vocabulary_is_nobodys_mask(ignore: bool) -> None:
    """Twenty prompt tokens do not count towards min_tokens, and logits of id V-1 are what the model says."""
    prompt = text(1, 20)
    answer = answer_of(biased(511, max_tokens=8, min_tokens=5, ignore_eos=ignore), prompt=20)
    assert answer.tokens == [511] * 8
    shown = SamplingParams(
        max_tokens=3, min_tokens=2, ignore_eos=ignore, temperature=0.0, logprobs=20, logit_bias={511: 100.0}
    )
    for at, sampled in enumerate(answer_of(shown, prompt=20).sampled):
        raw = dense_logits(model(), [*prompt, *[511] * at])[-1].log_softmax(-1)
        assert sampled.logprobs is not None
        assert abs(sampled.logprobs.chosen - raw[511]) < 1e-4
    answer = answer_of(biased(EOS, max_tokens=8, min_tokens=5, ignore_eos=ignore), prompt=20)
    assert (answer.tokens.count(EOS), len(answer.tokens)) == ((8, 8) if ignore else (1, 6))


def test_b105_ignore_eos_on_the_real_sampler_runs_to_max_tokens() -> None:
    for token in BOTH:
        answer = answer_of(biased(token, max_tokens=9, ignore_eos=True))
        assert (answer.tokens, answer.reason) == ([token] * 9, "length")


@pytest.mark.parametrize("prompt", [62, 63, 64, 65])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_b102_a_prompt_as_long_as_the_model(prompt: int, limit: int | None) -> None:
    """What leaves room for a token is served to the last one; the rest is refused before it is queued."""
    shared = engine(num_kv_blocks=17)
    fits = prompt + (limit or 1) <= 64
    params = SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True, logits_digest=True)
    asked = Ask(text(3, prompt), params)
    if not fits:
        with pytest.raises(Rejected, match=f"{prompt} tokens"):
            shared.submit(asked.prompt, asked.params)
        assert held(shared) == []
        (answer,) = play(shared, [Ask(text(1, 4), greedy(3))])
        assert answer.sampled == solo(Ask(text(1, 4), greedy(3))).sampled
        return
    (answer,) = play(shared, [asked])
    assert (len(answer.tokens), answer.reason) == (limit or 64 - prompt, "length")
    bounded = attrs.evolve(params, max_tokens=len(answer.tokens))
    assert answer.sampled == solo(Ask(asked.prompt, bounded)).sampled


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_b102_to_the_last_position_of_a_block_and_of_the_pool(blocks: int) -> None:
    """The last sampled token needs no K/V, so one more than the pool holds can be said, and not two."""
    for prompt in range(max(1, 4 * blocks - 6), 4 * blocks + 1):
        most = 4 * blocks + 1 - prompt
        for limit in range(max(1, most - 2), most + 1):
            shared = engine(num_kv_blocks=blocks)
            asks = [Ask(text(prompt, prompt), greedy(limit))]
            assert differences(asks, play(shared, asks)) == []
        with pytest.raises(Rejected) as caught:
            engine(num_kv_blocks=blocks).submit(text(prompt, prompt), greedy(most + 1))
        assert caught.value.reason == "pool"


def test_b100_no_tokens_is_a_refusal_and_not_the_end() -> None:
    shared = engine()
    for _ in range(3):
        with pytest.raises(Rejected, match="at least 1 is needed"):
            shared.submit((), greedy(3))
    assert held(shared) == []
    asks = [Ask(text(1, 4), greedy(3))]
    assert shared.counters.refused["empty_prompt"] == 3
    ids_before = shared.scheduler.counters.submitted
    (request,) = shared.submit(asks[0].prompt, asks[0].params).requests
    assert request == ids_before
    while shared.has_work:
        assert faults(shared, shared.step()) == []
    assert held(shared) == []


# That these checks can fail ----------------------------------------------------------------------------------------


def test_counting_the_prompt_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """min_tokens that counts prompt tokens (B097)."""
    make = RowState.__init__

    def counts_all(self: RowState, seat: Any, vocab_size: int) -> None:
        make(self, seat, vocab_size)
        self._min_len -= seat.prompt_len

    monkeypatch.setattr(RowState, "__init__", counts_all)
    with pytest.raises(AssertionError):
        test_b096_min_tokens_holds_back_every_stop_token(EOS, 4)


def test_masking_the_first_end_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    make = RowState.__init__

    def first_only(self: RowState, seat: Any, vocab_size: int) -> None:
        make(self, seat, vocab_size)
        self._masked = self._masked[:1]

    monkeypatch.setattr(RowState, "__init__", first_only)
    with pytest.raises(AssertionError):
        test_b096_min_tokens_holds_back_every_stop_token(OTHER_EOS, 4)


def test_length_before_stop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Scheduler._append

    def length_first(self: Scheduler, request: Any, token: int) -> Any:
        if request.generated + 1 >= request.max_tokens:
            request.stop_ids = frozenset()
        return append(self, request, token)

    monkeypatch.setattr(Scheduler, "_append", length_first)
    test_b099_b105_how_a_request_ends("eos")
    with pytest.raises(AssertionError):
        test_b099_b105_how_a_request_ends("eos at max_tokens")
