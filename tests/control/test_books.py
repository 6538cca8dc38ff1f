"""What the books of control refuse, so that a mistake elsewhere ends in an exception and not in a wrong block.

No caller in the engine gets this far; so no workload does either.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from engine.control.blocks import BlockPool
from engine.control.limits import Limits
from engine.control.plan import Logprobs, Plan, Sampled
from engine.control.prefix import block_key, root
from engine.control.record import Facts, Finished, Ledger, StepRecord
from engine.control.request import Submission
from engine.control.rows import RowTable
from engine.control.scheduler import Scheduler

KEY = block_key(root(None), (1, 2))


def held(blocks: int) -> BlockPool:
    pool = BlockPool(blocks)
    for _ in range(blocks):
        pool.take()
    return pool


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: held(2).take(), "no free block: all 2 are held"),
        (lambda: held(2).share(1), "block 1 is shared, but its content is not published"),
        (lambda: BlockPool(2).publish(1, KEY), "block 1 is published, but no table holds it"),
        (lambda: BlockPool(2).release([1]), "block 1 is released, but no table holds it"),
        (lambda: RowTable(2).release(1), "row 1 is released, but no request holds it"),
    ],
)
def test_books_refuse(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()


def test_no_row_is_given_when_none_is_free() -> None:
    rows = RowTable(1)
    rows.take(7)
    with pytest.raises(RuntimeError, match="no free row for request 8: all 1 are taken"):
        rows.take(8)


def test_strays_and_holes_are_paired_by_row_whoever_comes_first() -> None:
    assert RowTable(5).misplaced([4, 1, 3]) == [(3, 0), (4, 2)]


def test_cached_blocks_are_counted() -> None:
    pool = held(2)
    pool.publish(1, KEY)
    pool.release([0, 1])
    assert (pool.num_free, pool.num_cached, pool.cached()) == (2, 1, (1,))


def test_only_the_plan_that_is_open_is_closed() -> None:
    scheduler = Scheduler(Limits(4, 2, 2, 4, 8, 100))
    scheduler.submit(Submission((1,), 1))
    plan = scheduler.plan()
    other = attrs.evolve(plan)
    with pytest.raises(RuntimeError, match="the plan of iteration 0 is not the one that is open"):
        scheduler.commit(other, [Sampled(1)])
    with pytest.raises(RuntimeError, match="the plan of iteration 0 is not the one that is open"):
        scheduler.fail(plan, "it was dropped by the attempt")


@pytest.mark.parametrize("salt", ["", "a", "A", "\ud800"])
def test_every_text_is_a_salt_of_its_own(salt: str) -> None:
    """Half a surrogate pair too: JSON can carry one."""
    others = [root(other) for other in (None, "", "a", "A", "salt:", "\ud800", "\ud801") if other != salt]
    assert root(salt) not in others


def test_what_is_left_out_asks_for_nothing() -> None:
    """Defaults are part of the rules (2.3, 11): who does not ask for priority, salt or stops gets none."""
    asked = Submission((1,))
    assert attrs.asdict(asked, recurse=False) == {
        "prompt": (1,),
        "max_tokens": None,
        "priority": 0,
        "stop_ids": frozenset(),
        "min_tokens": 0,
        "texts": (),
        "payloads": (),
        "salt": None,
        "takes_hits": True,
    }
    assert Limits(4, 2, 2, 4, 8, 100) == Limits(4, 2, 2, 4, 8, 100, 0, 1024, True, False, ())
    plan = Plan(3)
    assert (plan.vacated, plan.grown, plan.moves, plan.seated, plan.chunks, plan.decodes) == ((),) * 6
    assert (plan.launch, plan.forwards, plan.num_tokens, plan.sampling) == (None, False, 0, ())
    assert Sampled(5) == Sampled(5, None, None)
    assert Logprobs(-1.0, 1) == Logprobs(-1.0, 1, ())
    assert Finished(1, "length") == Finished(1, "length", None, None)
    assert Finished(1, "error", why="NaN", cause="a test") == Finished(1, "error")  # sentences decide nothing
    assert StepRecord(0, plan) == StepRecord(0, plan, (), (), (), (), (), None)
    assert Facts(1, 2, 0, 0, 0, None, 3).cached_tokens == 0
    assert (
        Ledger((), (), {}, {}, {}, {}, {}, (), ()).cached,
        Ledger((), (), {}, {}, {}, {}, {}, (), ()).published,
    ) == ((), {})
