"""Request mixes times knobs: in a crowd, in chunks, preempted, aborted, replayed, on poisoned memory: what a request
says, to the byte of its logits, is what it says alone. Cases B007, B009, B018, B019, B025, B037, B039, B048, B051."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest

from engine.compute.inputs import StaticInputs
from engine.control.record import StepRecord
from tests.cases.oracle import (
    Ask,
    Watched,
    dense_logits,
    differences,
    engine,
    greedy,
    model,
    play,
    seeded,
    solo,
    text,
)

MIXES: dict[str, list[Ask]] = {
    "equal": [Ask(text(1, 8), greedy(10)) for _ in range(4)],
    "lengths": [Ask(text(k, n), greedy(6)) for k, n in enumerate((1, 3, 4, 5, 8, 9, 17, 23))],
    "late": [Ask(text(k, 5 + k), greedy(9), at=2 * k) for k in range(7)],
    "sampled": [Ask(text(k, 6 + k), seeded(8, k, top_p=0.9, frequency_penalty=0.5), at=k) for k in range(6)],
    "priorities": [Ask(text(k, 7), greedy(12), at=k, priority=-k) for k in range(5)],
    "aborts": [Ask(text(k, 4 + 3 * k), greedy(9), at=k, abort=None if k % 2 else 3 + 2 * k) for k in range(6)],
}
KNOBS: dict[str, dict[str, Any]] = {
    "T0": {},
    "block 1": {"block_size": 1, "num_kv_blocks": 32},
    "block 16": {"block_size": 16, "num_kv_blocks": 2},
    "budget 6": {"max_num_batched_tokens": 6},
    "budget 4": {"max_num_batched_tokens": 4, "num_kv_blocks": 9},
    "odd captures": {"max_num_seqs": 5, "capture_rows": (3, 5, 8), "capture_widths": (2, 5, 16)},
    "narrow captures": {"capture_rows": (2,), "capture_widths": (1, 3)},
    "eager": {"enforce_eager": True, "capture_rows": None},
    "scattered": {"persistent_batch": False, "num_kv_blocks": 11},
    "one row": {"max_num_seqs": 1},
    "watermark": {"watermark": 2},
    "roomy": {"num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 9},
}


def sane(ask: Ask, capacity: int) -> bool:
    return ask.params.max_tokens is not None and len(ask.prompt) + ask.params.max_tokens - 1 <= capacity


def happenings(seen: list[StepRecord]) -> list[str]:
    """What a play went through, in words."""
    words = []
    for record in seen:
        words += ["preempt"] * len(record.preempted)
        words += ["swap" if move.swap else "move" for move in record.plan.moves]
        words += [type(record.plan.launch).__name__] * bool(record.plan.decodes)
        words += ["part"] * sum(not chunk.samples for chunk in record.plan.chunks)
        words += ["padded"] * bool(getattr(record.plan.launch, "padding", 0))
    return words


@pytest.mark.parametrize("compute", ["torch", "native"])
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("mix", MIXES)
def test_b007_b039_b051_mixes_times_knobs(mix: str, knob: str, compute: str) -> None:
    """Every mix under every knob, on memory that is NaN wherever nobody may read, with every written cell checked."""
    shared = engine(watched=True, compute=compute, **KNOBS[knob])
    capacity = shared.limits.num_blocks * shared.limits.block_size
    asks = [ask for ask in MIXES[mix] if sane(ask, capacity)]
    assert len(asks) >= 4
    answers = play(shared, asks)
    assert isinstance(shared.runner, Watched)
    assert shared.runner.complaints == []
    assert differences(asks, answers, compute) == []


@pytest.mark.parametrize(
    ("knob", "expected"),
    [
        ("T0", {"preempt", "Replay", "padded", "part"}),
        ("scattered", {"Eager", "Replay"}),
        ("narrow captures", {"Eager", "Replay", "padded"}),
        ("roomy", {"move", "swap", "Replay", "part"}),
    ],
)
def test_the_table_goes_through(knob: str, expected: set[str]) -> None:
    """What the plays above are meant to meet does happen in them."""
    met: set[str] = set()
    for mix in MIXES.values():
        shared = engine(**KNOBS[knob])
        seen: list[StepRecord] = []
        play(shared, [ask for ask in mix if sane(ask, shared.limits.num_blocks * shared.limits.block_size)], seen)
        met.update(happenings(seen))
    assert met >= expected


def test_the_oracle_agrees_with_a_dense_forward() -> None:
    """No cache, no batch, no chunks, no recorded step, fp64: the solo run's logprobs are its to four digits."""
    for ask in (*MIXES["lengths"], *MIXES["sampled"][:3]):
        answer = solo(ask)
        logits = dense_logits(model(), [*ask.prompt, *answer.tokens])
        for at, sampled in enumerate(answer.sampled):
            expected = logits[len(ask.prompt) + at - 1].log_softmax(-1)
            assert sampled.logprobs is not None
            assert abs(sampled.logprobs.chosen - expected[sampled.token]) < 1e-4
            assert sampled.logprobs.top[0][0] == int(expected.argmax())
            if ask.params.greedy:
                assert sampled.token == int(expected.argmax())


@pytest.mark.parametrize(("block_size", "blocks"), [(1, 50), (4, 13), (16, 4)])
def test_b007_lengths_budget_and_aborts_leave_nothing(block_size: int, blocks: int) -> None:
    """Prompts of 1 to 40 tokens, a budget of 6 that no block size divides, aborts at random, idle in between."""
    shared = engine(block_size=block_size, num_kv_blocks=blocks, max_num_batched_tokens=6)
    for part in range(4):
        rng = random.Random(block_size * 10 + part)
        asks = [
            Ask(text(n, n), greedy(rng.randint(1, 5)), at=k, abort=rng.choice([None, None, k + rng.randint(0, 12)]))
            for k, n in enumerate(range(1 + part, 41, 4))
        ]
        answers = play(shared, asks)
        assert differences(asks, answers) == []
        assert {answer.reason for answer in answers} <= {"length", "abort"}


@pytest.mark.parametrize("seed", range(4))
def test_b009_fuzz_with_shared_prefixes(seed: int) -> None:
    """Fifty requests a seed in a pool that just holds the largest; the seed is the test's id."""
    rng = random.Random(seed)
    shared = engine(num_kv_blocks=8, max_num_batched_tokens=rng.choice([5, 16]))
    asks = []
    for k in range(50):
        prompt = text(900 + rng.randrange(3), rng.randint(0, 14)) + text(k, rng.randint(1, 10))
        params = greedy(rng.randint(1, 8)) if rng.random() < 0.6 else seeded(rng.randint(1, 8), k)
        at = rng.randrange(120)
        asks.append(Ask(prompt, params, at, abort=at + rng.randint(0, 15) if rng.random() < 0.2 else None))
    assert differences(asks, play(shared, asks)) == []
    assert shared.counters.preemptions > 0
    assert shared.counters.finished["abort"] > 0


def test_b018_four_that_fit_alone_all_finish() -> None:
    shared = engine()
    asks = [Ask(text(k, 8), greedy(16)) for k in range(4)]
    assert differences(asks, play(shared, asks)) == []
    tokens = 4 * (8 + 16)
    assert shared.counters.iterations < tokens
    assert 0 < shared.counters.preemptions < 4 * 16 / 4  # at most once for each block that somebody grew by


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_b019_preempted_after_any_number_of_tokens(kind: str, budget: int, cache: bool) -> None:
    """A senior request takes the victim's blocks after 1, 3, 9 tokens, and more than once; nobody can tell afterwards."""
    params = greedy(14) if kind == "greedy" else seeded(14, 5, repetition_penalty=1.3, presence_penalty=0.4)
    after: set[int] = set()
    most = 0
    for ahead in (1, 4, 7, 9, 10, 11, 12):
        for blocks in (6, 7):
            asks = [Ask(text(50 + ahead, ahead), greedy(12)), Ask(text(7, 9), params)]
            asks.append(Ask(text(70, 5), greedy(8), at=8 + ahead, priority=-1))
            shared = engine(num_kv_blocks=blocks, max_num_batched_tokens=budget, enable_prefix_caching=cache)
            seen: list[StepRecord] = []
            answers = play(shared, asks, seen)
            assert differences(asks, answers) == []
            facts = answers[1].ends[0].facts
            assert facts is not None
            assert facts.generated_tokens == len(answers[1].tokens) == 14
            most = max(most, facts.preemptions)
            after |= {
                sum(request == 1 for record in seen[:at] for request, _ in record.sampled)
                for at, record in enumerate(seen)
                if 1 in record.preempted
            }
            history = 9
            for record in seen:  # nothing is sampled until the whole history is back
                for chunk in record.plan.chunks:
                    assert not (chunk.request == 1 and chunk.samples) or chunk.start + len(chunk.tokens) == history
                history += any(request == 1 for request, _ in record.sampled)
    assert most >= 2
    assert len(after & set(range(1, 14))) >= 5, after
    if budget > 4 and not cache:
        assert {1, 3, 9} <= after, after


def test_b025_a_stream_goes_on_while_a_long_prompt_is_prefilled() -> None:
    shared = engine(num_kv_blocks=40, max_num_batched_tokens=8)
    asks = [Ask(text(1, 4), greedy(30)), Ask(text(2, 60), greedy(2), at=3)]
    seen: list[StepRecord] = []
    answers = play(shared, asks, seen)
    assert differences(asks, answers) == []
    during = [record for record in seen if any(chunk.request == 1 for chunk in record.plan.chunks)]
    assert len(during) == 9  # seven tokens an iteration beside the stream's one
    assert all(0 in dict(record.sampled) for record in during)


@pytest.mark.parametrize("captures", [(1, 2, 4, 8), (3, 7), None], ids=["powers", "odd", "eager"])
def test_b048_the_same_prompt_in_batches_of_1_to_17(captures: tuple[int, ...] | None) -> None:
    for count in range(1, 18):
        shared = engine(
            num_kv_blocks=80,
            max_num_seqs=17,
            max_num_batched_tokens=256,
            capture_rows=captures,
            enforce_eager=captures is None,
        )
        asks = [Ask(text(3, 7), greedy(4))] * count
        assert differences(asks, play(shared, asks)) == [], f"batch size {count}"


HOSTILE = {"tokens": 511, "positions": 63, "slots": 0, "tables": 0}


def on_hostile_inputs(
    size: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, pads: bool = True
) -> list[str]:
    """What goes wrong when before each step the static inputs hold the worst that a padded row could be given.

    ``pads`` False is the fault: rows beyond the real ones keep what they hold.
    """
    fill = StaticInputs.fill

    def hostile(self: StaticInputs, values: dict[str, Any], rows: int, width: int) -> None:
        for name, buffer in self.host.items():
            buffer.fill_(HOSTILE[name])
        fill(self, values, rows if pads else len(values["tokens"]), width)

    asks = [Ask(text(k, 3 + k), greedy(6)) for k in range(size)]
    shared = engine(watched=True, num_kv_blocks=32, max_num_seqs=8, max_num_batched_tokens=64, capture_rows=shape)
    with monkeypatch.context() as patched:
        patched.setattr(StaticInputs, "fill", hostile)
        answers = play(shared, asks)
    bucket = min(rows for rows in shape if rows >= size)
    assert {rows for rows, _ in shared.counters.replays} == {bucket}
    assert isinstance(shared.runner, Watched)
    return [*shared.runner.complaints, *differences(asks, answers)]


@pytest.mark.parametrize("shape", [(1, 2, 4, 8), (3, 5, 8)], ids=["powers", "odd"])
def test_b037_every_bucket_with_every_real_size(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed with padding, each row says what it says alone, and no other memory is written."""
    for size in range(1, 9):
        assert on_hostile_inputs(size, shape, monkeypatch) == [], f"{size} rows"


def test_b037_rows_that_are_not_padded_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_hostile_inputs(5, (8,), monkeypatch, pads=False) != []


@pytest.mark.parametrize("length", range(1, 13))
def test_b039_every_length_on_poisoned_blocks(length: int) -> None:
    """One to three blocks, beside a neighbour; freed blocks turn to NaN, and the next owner never sees it."""
    shared = engine(watched=True)
    asks = [Ask(text(length, length), greedy(5)), Ask(text(99, 6), greedy(4)), Ask(text(8, length), greedy(4), at=7)]
    assert differences(asks, play(shared, asks)) == []
    assert isinstance(shared.runner, Watched)
    assert shared.runner.complaints == []


# That these comparisons can fail -----------------------------------------------------------------------------------


def _position_off(shared: Any) -> None:
    """A decode that reads its position one too low, from the third token on."""
    inner = shared.runner.execute

    def execute(plan: Any) -> Any:
        wrong = [attrs.evolve(d, position=d.position - 1) if d.position > 9 else d for d in plan.decodes]
        return inner(attrs.evolve(plan, decodes=tuple(wrong)))

    shared.runner.execute = execute


def _prompt_only(shared: Any) -> None:
    """A resumed request that brings its prompt but loses its last generated token (B019)."""
    inner = shared.runner.execute

    def execute(plan: Any) -> Any:
        chunks = [
            attrs.evolve(c, tokens=(*c.tokens[:-1], 3)) if c.samples and c.start + len(c.tokens) > 9 else c
            for c in plan.chunks
        ]
        return inner(attrs.evolve(plan, chunks=tuple(chunks)))

    shared.runner.execute = execute


@pytest.mark.parametrize("broken", [_position_off, _prompt_only])
def test_wrong_inputs_are_seen(broken: Any) -> None:
    asks = [Ask(text(51, 6), greedy(15)), Ask(text(7, 9), greedy(14))]
    shared = engine(num_kv_blocks=7, max_num_batched_tokens=64)
    broken(shared)
    assert differences(asks, play(shared, asks)) != []


def test_a_zero_block_that_is_not_zero_is_seen() -> None:
    """NaN that is read reaches the row's logits, and then its request ends with an error (rule 13.7), which nobody wanted."""
    shared = engine(watched=True)
    for layer in shared.runner.pool.layers:  # type: ignore[attr-defined]
        layer[:, shared.runner.pool.zero_block] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="iteration 0"):
        play(shared, [Ask(text(1, 5), greedy(5))])


def test_a_seed_that_is_not_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.compute.sampling_row import RowState

    make = RowState.__init__

    def forgetful(self: RowState, seat: Any, vocab_size: int) -> None:
        make(self, seat, vocab_size)
        self.seed += len(seat.tokens) - seat.prompt_len  # another stream after a preemption

    asks = [Ask(text(51, 6), greedy(15)), Ask(text(7, 9), seeded(14, 5))]
    differences(asks, play(engine(num_kv_blocks=64), asks))
    monkeypatch.setattr(RowState, "__init__", forgetful)
    assert differences(asks, play(engine(num_kv_blocks=7, max_num_batched_tokens=64), asks)) != []


def test_other_logits_have_another_digest() -> None:
    """Two requests whose logits differ have digests that differ; the comparison rests on it."""
    first, second = (solo(Ask(text(k, 4), greedy(1))).sampled[0].digest for k in (1, 2))
    assert first
    assert second
    assert first != second
