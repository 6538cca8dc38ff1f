"""The corners of control that a table shows best: the door, the replay decision, limits, ends and failures.

The lockstep harness in ``properties`` covers the interplay; here stands what a reader wants to see in one place.
"""

from __future__ import annotations

import pytest

from engine.control.audit import audit
from engine.control.blocks import BlockPool
from engine.control.door import most_tokens
from engine.control.limits import Limits
from engine.control.plan import NO_TOKEN, Eager, Replay, Sampled
from engine.control.record import StepRecord
from engine.control.replay import decide
from engine.control.scheduler import Refusal, Scheduler, Submission


def limits(**changes: object) -> Limits:
    sizes: dict[str, object] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "vocab_size": 100,
    }
    return Limits(**{**sizes, **changes})  # type: ignore[arg-type]


def step(scheduler: Scheduler, token: int = 1) -> StepRecord:
    plan = scheduler.plan()
    record = scheduler.commit(plan, [Sampled(token)] * len(plan.sampling))
    assert audit(scheduler) == []
    return record


def drain(scheduler: Scheduler, token: int = 1) -> list[StepRecord]:
    records = []
    while scheduler.has_work:
        records.append(step(scheduler, token))
        assert len(records) < 10_000
    assert scheduler.pool.num_free == scheduler.limits.num_blocks
    assert scheduler.rows.num_free == scheduler.limits.max_num_seqs
    return records


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason", "number"),
    [
        ((), 1, "empty_prompt", "0"),
        ((1, 100), 1, "token_out_of_range", "100"),
        ((-1,), 1, "token_out_of_range", "-1"),
        ((1,), 0, "max_tokens", "0"),
        ((1,), -5, "max_tokens", "-5"),
        ((1,) * 30, 35, "max_model_len", "65"),
        ((1,) * 64, None, "max_model_len", "64"),
        ((1,) * 30, 4, "pool", "9"),
        ((1,) * 33, None, "pool", "9"),
    ],
)
def test_the_door_names_the_number_that_was_wrong(
    prompt: tuple[int, ...], max_tokens: int | None, reason: str, number: str
) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(Refusal) as refusal:
        scheduler.submit(Submission(prompt, max_tokens))
    assert refusal.value.reason == reason
    if reason != "empty_prompt":
        assert number in str(refusal.value)
    assert not scheduler.has_work


@pytest.mark.parametrize("prompt_len", [1, 29, 30, 31, 32])
def test_the_last_sampled_token_needs_no_block(prompt_len: int) -> None:
    """32 positions hold a total of 33 tokens (rule 1), and absent max_tokens is exactly that (B102)."""
    scheduler = Scheduler(limits())
    scheduler.submit(Submission((1,) * prompt_len, None))
    ends = [end for record in drain(scheduler) for end in record.finished]
    assert [(end.reason, end.facts.generated_tokens) for end in ends if end.facts] == [("length", 33 - prompt_len)]
    assert most_tokens(scheduler.limits, prompt_len) == 33 - prompt_len


def test_a_full_queue_refuses_all_choices_or_none() -> None:
    scheduler = Scheduler(limits(max_waiting=3))
    assert scheduler.submit(Submission((1,), 1), n=2) == (0, 1)
    with pytest.raises(Refusal, match="2 requests are waiting, and the queue holds 3"):
        scheduler.submit(Submission((1,), 1), n=2)
    assert scheduler.submit(Submission((1,), 1)) == (4,)  # refused choices are numbered too
    drain(scheduler)


CAPTURES = ((1, 4), (1, 16), (4, 4), (4, 16), (8, 8))


@pytest.mark.parametrize(
    ("rows", "longest", "expected"),
    [
        ((), 0, None),
        ((0,), 4, Replay(1, 4, 0)),
        ((0,), 5, Replay(1, 16, 0)),
        ((0,), 17, Eager("uncaptured")),
        ((0, 1), 1, Replay(4, 4, 2)),
        ((0, 1, 2, 3, 4), 8, Replay(8, 8, 3)),
        ((0, 1, 2, 3, 4), 9, Eager("uncaptured")),
        (tuple(range(9)), 1, Eager("uncaptured")),
        ((1,), 1, Eager("scattered")),
        ((0, 2), 1, Eager("scattered")),
    ],
)
def test_replay_takes_the_smallest_shape_that_covers(
    rows: tuple[int, ...], longest: int, expected: Replay | Eager | None
) -> None:
    assert decide(rows, longest, CAPTURES) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens is 3, but must be at least max_num_seqs = 4"),
        ({"watermark": 8}, "watermark is 8 blocks, but must be 0..7"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"captures": ((2, 4), (1, 4))}, "ascending"),
    ],
)
def test_limits_refuse_what_cannot_run(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        limits(**changes)


def test_a_released_block_cannot_be_released_again() -> None:
    """B001: the second mention is refused and the count of free blocks rises by one only."""
    pool = BlockPool(3)
    block = pool.take()
    with pytest.raises(RuntimeError, match="block 0 is released, but no table holds it"):
        pool.release([block, block])
    assert pool.blank() == (0, 1, 2)


@pytest.mark.parametrize(
    ("min_tokens", "ignore", "expected"), [(0, False, ("stop", 1)), (3, False, ("stop", 3)), (3, True, ("length", 5))]
)
def test_stop_ids_wait_for_min_tokens(min_tokens: int, ignore: bool, expected: tuple[str, int]) -> None:
    scheduler = Scheduler(limits())
    stop_ids = frozenset() if ignore else frozenset({7})
    scheduler.submit(Submission((1,), 5, stop_ids=stop_ids, min_tokens=min_tokens))
    (end,) = [end for record in drain(scheduler, token=7) for end in record.finished]
    assert end.facts is not None
    assert (end.reason, end.facts.generated_tokens) == expected
    assert end.stop == (7 if end.reason == "stop" else None)


def test_stop_wins_over_length_on_the_same_token() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(Submission((1,), 1, stop_ids=frozenset({7})))
    (end,) = [end for record in drain(scheduler, token=7) for end in record.finished]
    assert end.reason == "stop"


def test_a_failed_step_ends_its_plan_and_nothing_else() -> None:
    scheduler = Scheduler(limits(max_num_seqs=2))
    first, second, third = (scheduler.submit(Submission((1,), 3))[0] for _ in range(3))
    step(scheduler)
    record = scheduler.fail(scheduler.plan(), "boom")
    assert [(end.request, end.reason) for end in record.finished] == [(first, "error"), (second, "error")]
    assert record.error == "boom"
    ends = [end for record in drain(scheduler) for end in record.finished]
    assert [(end.request, end.reason) for end in ends] == [(third, "length")]


def test_text_that_raises_ends_its_own_request_only() -> None:
    class Broken:
        matched = None

        def push(self, token: int, may_stop: bool = True, last: bool = False) -> bool:
            raise OverflowError("bad id")

    scheduler = Scheduler(limits())
    scheduler.submit(Submission((1,), 3, texts=(Broken(),)))
    scheduler.submit(Submission((1,), 3))
    ends = {end.request: end for record in drain(scheduler) for end in record.finished}
    assert {request: end.reason for request, end in ends.items()} == {0: "error", 1: "length"}
    assert ends[0].why == "the text of output token 1 failed"
    assert ends[0].cause == "OverflowError: bad id"


def test_a_row_without_a_token_ends_its_own_request_only() -> None:
    """Rule 13.7: nothing is appended, what this iteration wrote is no hit for anybody, and the blocks come back as ever."""
    scheduler = Scheduler(limits(prefix_cache=True))
    size = scheduler.limits.block_size
    for request in range(3):
        scheduler.submit(Submission((request + 1,) * size, 3))
    plan = scheduler.plan()
    record = scheduler.commit(plan, [Sampled(7), Sampled(NO_TOKEN, failure="NaN everywhere"), Sampled(8)])
    assert [(request, got.token) for request, got in record.sampled] == [(0, 7), (2, 8)]
    (end,) = record.finished
    assert (end.request, end.reason, end.stop, end.why) == (1, "error", None, "NaN everywhere")
    assert end.facts is not None
    assert end.facts.generated_tokens == 0
    assert audit(scheduler) == []
    held = scheduler.ledger()
    assert set(held.published) == {held.tables[0][0], held.tables[2][0]}
    assert (held.computed[1], held.num_tokens[1], held.status[1]) == (size, size, "finished")
    assert scheduler.counters.finished["error"] == 1
    assert (scheduler.counters.sampled_tokens, scheduler.counters.failed_steps) == (2, 0)
    ends = {end.request: end.reason for record in drain(scheduler) for end in record.finished}
    assert ends == {0: "length", 2: "length"}


@pytest.mark.parametrize("when", range(8))
def test_abort_in_every_state_gives_everything_back(when: int) -> None:
    """B028: waiting, part-prefilled, decoding, preempted, finished, unknown, twice."""
    scheduler = Scheduler(limits(num_blocks=5, max_num_batched_tokens=5))
    scheduler.submit(Submission((1,) * 7, 10))
    (victim,) = scheduler.submit(Submission((1,) * 9, 6))
    aborted: list[int] = []
    for iteration in range(200):
        if iteration == when:
            scheduler.abort(victim)
            scheduler.abort(victim)
            scheduler.abort(999)
        if not scheduler.has_work:
            break
        record = step(scheduler)
        aborted += [end.request for end in record.aborted]
    assert aborted == [victim]
    scheduler.abort(victim)
    drain(scheduler)


def test_plan_and_commit_take_turns() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(Submission((1,), 3))
    plan = scheduler.plan()
    with pytest.raises(RuntimeError, match="neither committed nor failed"):
        scheduler.plan()
    with pytest.raises(ValueError, match="0 tokens came back, but 1 rows sample"):
        scheduler.commit(plan, [])


@pytest.mark.parametrize("n", [0, -1])
def test_less_than_one_choice_uses_up_no_id(n: int) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(ValueError, match=f"n is {n}, but must be at least 1"):
        scheduler.submit(Submission((1,), 3), n)
    assert scheduler.counters.submitted == 0
    assert scheduler.submit(Submission((1,), 3)) == (0,)
