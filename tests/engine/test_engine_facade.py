"""The facade: events in, records out. Seeds, refusals, what ``min_tokens`` holds back, and what a failed step costs.

Most tests play a runner made of arithmetic, so that a token is a function of seed and tokens; the last ones the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.build import assemble
from engine.config import EngineConfig
from engine.control.plan import Plan
from engine.control.record import Finished
from engine.engine import Engine, Rejected, choice_seed
from engine.loading.synthetic import synthetic_model
from engine.request import SEED_RANGE, InvalidRequest, SamplingParams, SamplingSpec
from engine.text.stream import TextStream
from tests.server.stub import StubRunner, stub_engine
from tests.text.toy_tokenizers import toy

PROMPT = (5, 6, 7)
SAMPLED = SamplingParams(max_tokens=6, seed=11)
Outcome = tuple[tuple[int, ...], str]


def drain(engine: Engine) -> dict[int, Outcome]:
    """Steps until nothing is left: (tokens, finish reason) by request."""
    tokens: dict[int, list[int]] = {}
    outcomes: dict[int, Outcome] = {}
    while engine.has_work:
        record = engine.step()
        assert engine.audit() == []
        for request, sampled in record.sampled:
            tokens.setdefault(request, []).append(sampled.token)
        for end in (*record.aborted, *record.finished):
            assert end.request not in outcomes
            outcomes[end.request] = (tuple(tokens.get(end.request, ())), end.reason)
    ledger = engine.ledger()
    assert (ledger.waiting, ledger.running) == ((), ())
    assert not any(ledger.references)
    return outcomes


def answers(engine: Engine, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[tuple[int, ...]]:
    submitted = engine.submit(prompt, params)
    outcomes = drain(engine)
    return [outcomes[request][0] for request in submitted.requests]


# Seeds -----------------------------------------------------------------------------------------------------------------


def test_the_first_of_several_is_the_only_one_of_one() -> None:
    engine = stub_engine()
    (single,) = answers(engine, SamplingParams(max_tokens=6, seed=11))
    three = answers(engine, SamplingParams(max_tokens=6, seed=11, n=3))
    assert three[0] == single
    assert len(set(three)) == 3
    assert answers(stub_engine(), SamplingParams(max_tokens=6, seed=11, n=3)) == three


def test_each_choice_is_repeatable_by_the_seed_that_was_reported() -> None:
    engine = stub_engine()
    submitted = engine.submit(PROMPT, SamplingParams(max_tokens=6, n=4))
    outcomes = drain(engine)
    assert len(set(submitted.seeds)) == 4
    for request, seed in zip(submitted.requests, submitted.seeds, strict=True):
        assert answers(engine, SamplingParams(max_tokens=6, seed=seed)) == [outcomes[request][0]]


def test_unseeded_requests_differ_and_a_configured_seed_repeats_them() -> None:
    unseeded = SamplingParams(max_tokens=6)
    engine = stub_engine()
    assert len({answers(engine, unseeded)[0] for _ in range(4)}) == 4

    def seeds(seed: int | None) -> list[int]:
        runner = StubRunner()
        limits = stub_engine(runner).limits
        engine = Engine(limits, runner, seed=seed)
        return [engine.submit(PROMPT, unseeded).seeds[0] for _ in range(4)]

    assert seeds(3) == seeds(3)
    assert len(set(seeds(3) + seeds(4) + seeds(0))) == 12
    assert seeds(None) != seeds(None)


def test_greedy_needs_no_seed() -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0)
    assert answers(stub_engine(), greedy) == answers(stub_engine(), greedy)


@pytest.mark.parametrize("seed", [0, 1, -1, *SEED_RANGE])
def test_choice_seeds_are_seeds(seed: int) -> None:
    """Far apart, and each can be sent back as a seed."""
    derived = [choice_seed(seed, choice) for choice in range(64)]
    assert derived[0] == seed
    assert len(set(derived)) == 64
    assert set(derived[1:]).isdisjoint(choice_seed(seed ^ 1, choice) for choice in range(64))
    for one in derived:
        assert SamplingParams(seed=one).seed == one


def test_seeds_that_are_equal_modulo_a_power_of_two_are_different() -> None:
    """-1 and 2**63 - 1 share 63 bits, 0 and -2**63 too."""
    runner = StubRunner()
    engine = stub_engine(runner)
    specs: list[int] = []
    for seed in (0, SEED_RANGE[0], -1, SEED_RANGE[1]):
        engine.submit(PROMPT, SamplingParams(max_tokens=1, seed=seed))
        drain(engine)
        specs.extend(seat.sampling.seed for plan in runner.plans for seat in plan.seated)  # type: ignore[attr-defined]
        runner.plans.clear()
    assert specs == [0, SEED_RANGE[0], -1, SEED_RANGE[1]]


# What travels with a request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "masked"),
    [
        ({}, ()),
        ({"min_tokens": 2}, (2,)),  # the synthetic model's end-of-sequence
        ({"min_tokens": 2, "stop_token_ids": (9, 4)}, (2, 4, 9)),
        ({"min_tokens": 2, "ignore_eos": True}, ()),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": (9,)}, (9,)),
        ({"stop_token_ids": (9,)}, ()),
    ],
)
def test_what_min_tokens_holds_back(params: dict[str, Any], masked: tuple[int, ...]) -> None:
    runner = StubRunner()
    engine = stub_engine(runner)
    engine.submit(PROMPT, SamplingParams(max_tokens=3, seed=8, **params))
    engine.step()
    (seat,) = runner.plans[0].seated
    assert isinstance(seat.sampling, SamplingSpec)
    assert seat.sampling.masked == masked
    assert seat.sampling.seed == 8


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({}, (9, 2), "stop"),
        ({"ignore_eos": True}, (9, 2, 9, 4), "length"),
        ({"stop_token_ids": (9,)}, (9,), "stop"),
        ({"stop_token_ids": (4,), "ignore_eos": True, "min_tokens": 4}, (9, 2, 9, 4), "stop"),
        ({"stop_token_ids": (9,), "ignore_eos": True, "min_tokens": 2}, (9, 2, 9), "stop"),
    ],
)
def test_how_an_answer_ends(params: dict[str, Any], tokens: tuple[int, ...], reason: str) -> None:
    engine = stub_engine(StubRunner(lambda prompt: (9, 2, 9, 4)))
    submitted = engine.submit(PROMPT, SamplingParams(max_tokens=4, **params))
    assert drain(engine)[submitted.requests[0]] == (tokens, reason)


def test_half_a_character_at_the_end_is_a_stop_string_like_any_other() -> None:
    """U+FFFD as stop string, and the answer ends inside a character: text and reason say the same, alone and before more."""
    tokenizer = toy("byte_level")
    a, half, rest = (tokenizer.backend.token_to_id(piece) for piece in ("a", "\u00c3", "\u00a9"))
    for limit, reason, text in ((2, ("stop", "\ufffd"), "a"), (3, ("length", None), "a\u00e9")):
        engine = stub_engine(StubRunner(lambda prompt: (a, half, rest)))
        stream = TextStream(tokenizer, PROMPT, stop=["\ufffd"])
        engine.submit(PROMPT, SamplingParams(max_tokens=limit, stop=("\ufffd",)), texts=[stream])
        ends = []
        while engine.has_work:
            ends += engine.step().finished
        assert [(end.reason, end.stop) for end in ends] == [reason]
        stream.finish()
        assert stream.text == text


# Refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code", "words"),
    [
        ((), {}, "prompt", "empty_prompt", "no tokens"),
        ((5, 512), {}, "prompt", "token_out_of_range", "512"),
        ((5, -1), {}, "prompt", "token_out_of_range", "-1"),
        (range(40), {"max_tokens": 9}, "max_tokens", "max_model_len", "together 49"),
        (range(48), {}, "max_tokens", "max_model_len", "48"),
        ((5,), {"logit_bias": {512: 1.0}}, "logit_bias", "invalid_value", "512"),
        ((5,), {"stop_token_ids": (600,)}, "stop_token_ids", "invalid_value", "600"),
    ],
)
def test_what_can_never_be_served(
    prompt: Sequence[int], params: dict[str, Any], param: str, code: str, words: str
) -> None:
    """``check`` and ``submit`` say the same, and nothing is queued."""
    engine = stub_engine()
    messages = set()
    for call in (engine.check, engine.submit):
        with pytest.raises(InvalidRequest, match=words) as refused:
            call(prompt, SamplingParams(**params))
        assert (refused.value.param, refused.value.code) == (param, code)
        assert isinstance(refused.value, Rejected) == (code != "invalid_value")
        messages.add(str(refused.value))
    assert len(messages) == 1
    assert not engine.has_work


def test_a_pool_too_small_for_the_request() -> None:
    engine = stub_engine(num_blocks=4)
    assert engine.submit(range(10), SamplingParams(max_tokens=7)).requests == (0,)  # the last token needs no K/V
    with pytest.raises(Rejected, match="5 KV blocks of 4, but the pool has 4") as refused:
        engine.submit(range(10), SamplingParams(max_tokens=8))
    assert (refused.value.reason, refused.value.code, refused.value.param) == ("pool", "pool", "max_tokens")


def test_a_full_queue_refuses_all_choices_or_none() -> None:
    engine = stub_engine(max_waiting=3)
    engine.submit(PROMPT, SamplingParams(max_tokens=2, n=2))
    with pytest.raises(Rejected, match="2 requests are waiting, and the queue holds 3") as refused:
        engine.submit(PROMPT, SamplingParams(max_tokens=2, n=2))
    assert (refused.value.reason, refused.value.param) == ("queue_full", "")
    assert len(engine.scheduler.waiting) == 2
    assert len(drain(engine)) == 2
    assert engine.counters.refused["queue_full"] == 2


def test_stop_strings_need_a_text_for_each_choice() -> None:
    engine = stub_engine()
    params = SamplingParams(max_tokens=2, n=2, stop=("x",))
    text = TextStream(engine.model.tokenizer, PROMPT, stop=("x",))
    for texts in ((), (text,)):
        with pytest.raises(InvalidRequest, match=f"2 choices .* need 2 texts, got {len(texts)}") as refused:
            engine.submit(PROMPT, params, texts=texts)
        assert refused.value.param == "stop"
    assert not engine.has_work


def test_an_engine_without_a_model() -> None:
    bare = Engine(stub_engine().limits, StubRunner())
    with pytest.raises(RuntimeError, match="without a model"):
        _ = bare.model
    assert answers(bare, SAMPLED) == answers(stub_engine(), SAMPLED)


# Failures and aborts ---------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_own_plan_only() -> None:
    alone = answers(stub_engine(), SAMPLED)
    runner = StubRunner()
    engine = stub_engine(runner, max_num_seqs=2)
    first = engine.submit(PROMPT, SamplingParams(max_tokens=9, seed=1, n=2)).requests
    waiting = engine.submit(PROMPT, SAMPLED).requests[0]
    runner.fail_at = {3}
    records = [engine.step() for _ in range(4)]
    assert records[3].error == "RuntimeError: secret detail of the failure"
    assert [(end.request, end.reason) for end in records[3].finished] == [(request, "error") for request in first]
    assert records[3].sampled == ()
    assert engine.counters.failed_steps == 1
    assert drain(engine)[waiting] == (alone[0], "length")
    assert answers(engine, SAMPLED) == alone


def test_a_runner_that_returns_too_few_tokens_is_not_a_failed_step() -> None:
    """That is a broken contract, not a failed computation: it must not pass as one."""

    class Short(StubRunner):
        def execute(self, plan: Plan) -> Any:
            return super().execute(plan)[:-1]

    engine = stub_engine(Short())
    engine.submit(PROMPT, SAMPLED)
    with pytest.raises(ValueError, match="0 tokens came back, but 1 rows sample"):
        engine.step()


def test_abort_in_between() -> None:
    engine = stub_engine(max_num_seqs=2)
    alone = answers(stub_engine(), SAMPLED)[0]
    going, keeping = engine.submit(PROMPT, SAMPLED), engine.submit(PROMPT, SAMPLED)
    queued = engine.submit(PROMPT, SAMPLED)
    engine.step()
    engine.step()
    engine.abort(going.requests[0])
    engine.abort(going.requests[0])
    engine.abort(queued.requests[0])
    engine.abort(12345)
    record = engine.step()
    assert [(end.request, end.reason) for end in record.aborted] == [(0, "abort"), (2, "abort")]
    assert record.reaped == (0,)  # the other one held nothing
    ends = drain(engine)
    assert ends == {keeping.requests[0]: (alone[3:], "length")}
    engine.abort(keeping.requests[0])
    assert not engine.has_work


def test_abort_after_the_end_changes_nothing() -> None:
    engine = stub_engine()
    engine.submit(PROMPT, SamplingParams(max_tokens=1))
    record = engine.step()
    assert isinstance(record.finished[0], Finished)
    engine.abort(0)
    last = engine.step()
    assert (last.aborted, last.reaped) == ((), (0,))
    assert engine.counters.finished == {"length": 1}


# The real runner -------------------------------------------------------------------------------------------------------


def real_engine(**settings: Any) -> Engine:
    sizes: dict[str, Any] = {"num_kv_blocks": 24, "block_size": 4, "max_num_seqs": 4, "max_model_len": 64}
    return assemble(EngineConfig(device="cpu", **sizes | settings), synthetic_model())


def test_the_real_runner_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are given back and taken again: what follows a failure answers as if nothing had happened."""
    params = SamplingParams(max_tokens=8, seed=5, n=2, ignore_eos=True)
    expected = answers(real_engine(), params)
    engine = real_engine()
    bystander = engine.submit(range(3, 40), SamplingParams(max_tokens=20, temperature=0))
    engine.step()
    with monkeypatch.context() as broken:

        def fail(*_: Any) -> Any:
            raise MemoryError("no more")

        broken.setattr(engine.runner, "_prefill", fail)
        engine.submit(PROMPT, params)
        record = engine.step()
    assert record.error == "MemoryError: no more"
    assert {end.request for end in record.finished} == {bystander.requests[0], 1, 2}
    assert answers(engine, params) == expected


def test_min_tokens_on_the_real_runner() -> None:
    """An answer that would stop at once goes on for min_tokens, and never with what was held back."""
    engine = real_engine()
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    (free,) = answers(engine, SamplingParams(**greedy))
    (stopped,) = answers(engine, SamplingParams(**greedy, stop_token_ids=(free[1],)))
    assert stopped == free[: free.index(free[1]) + 1]
    (held,) = answers(engine, SamplingParams(**greedy, stop_token_ids=free[:2], min_tokens=6))
    assert len(held) >= 6
    assert set(held[:5]).isdisjoint(free[:2])
