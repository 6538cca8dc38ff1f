"""Faults in the specification: a mistake in the model must be told just as loudly as one in the engine.

If the harness compared what the engine wrote with itself, by a shared helper or a value handed from one side to the other, a
fault of the model would pass. Each is a change of one place in model.py, armed from outside as the engine's faults are, on
a workload of one or two events; the engine's side of the run must not notice anything.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from engine.trace import Abort, Event, Shape, Submit, Workload
from model_sim.model import Model
from properties.arming import Faded, line
from properties.lockstep import Run, run

A = "a"


def work(blocks: int, block_size: int, rows: int, *events: Event, budget: int = 2048, **rest: object) -> Workload:
    return Workload(Shape(blocks, block_size, rows, budget, **rest), events)  # type: ignore[arg-type]


def submit(prompt: int, max_tokens: int, n: int = 1, wait: int = 0, **rest: object) -> Submit:
    return Submit(wait, ((A, prompt),), max_tokens, n=n, **rest)  # type: ignore[arg-type]


# clause, what is wrong, function, text, its replacement, workload, the check that fires
FAULTS = (
    (
        "1.2",
        "the door refuses what fills the pool to the last block",
        ("submit", "need > self.blocks", "need >= self.blocks"),
        work(2, 2, 1, submit(4, 1)),
        "decisions",
    ),
    (
        "4.5",
        "a waiting request that is aborted is not told",
        ("step", "if r.number in self._aborts", "if r.number in self._aborts and r.row is not None"),
        work(2, 2, 1, submit(2, 2), submit(2, 2), Abort(1, 1)),
        "decisions",
    ),
    (
        "6.1",
        "a block is taken one token early",
        ("_grow", "self._blocks_for(len(request.tokens))", "self._blocks_for(len(request.tokens) + 1)"),
        work(2, 2, 1, submit(2, 3)),
        "decisions",
    ),
    (
        "6.2",
        "the victim is the first in the order",
        ("_grow", "self._running()[-1]", "self._running()[0]"),
        work(2, 1, 2, submit(1, 2, n=2)),
        "decisions",
    ),
    (
        "6.3",
        "a victim keeps its progress",
        ("_grow", "victim.computed, victim.decoding = 0, False", "victim.decoding = False"),
        work(2, 1, 2, submit(1, 2, n=2)),
        "ledger",
    ),
    (
        "7.3",
        "strays and holes are paired crosswise",
        ("_compact", "zip(strays, holes", "zip(strays[::-1], holes"),
        work(6, 1, 4, submit(1, 2, n=2), submit(1, 2, n=2, wait=1)),
        "rows",
    ),
    (
        "7.4",
        "a prefilling request that is displaced keeps its row",
        ("_compact", "if hole in holder", "if False"),
        work(3, 2, 2, submit(2, 2, n=3), budget=2),
        "rows",
    ),
    (
        "8.2",
        "the last block that is free is not given away",
        ("_fits", "<= len(free) - reserve", "< len(free) - reserve"),
        work(3, 3, 1, submit(7, 1)),
        "decisions",
    ),
    (
        "8.3",
        "the watermark is never waived",
        ("_fits", "if need <= self.blocks - self.watermark else 0", "if need else 0"),
        work(4, 2, 1, submit(7, 1), watermark=1),
        "decisions",
    ),
    (
        "8.7",
        "nobody waits for a block that is about to be published",
        ("_admit", "if missed in [", "if False and missed in ["),
        work(4, 2, 2, submit(3, 1, n=2), prefix_cache=True),
        "decisions",
    ),
    (
        "9.2",
        "decoding requests cost nothing",
        ("step", "self.budget - len(decodes)", "self.budget"),
        work(2, 3, 2, submit(2, 2, n=2), budget=2),
        "decisions",
    ),
    (
        "10.2",
        "a table goes back head first",
        ("_release", "reversed(request.table)", "list(request.table)"),
        work(2, 2, 1, submit(1, 3)),
        "ledger",
    ),
    (
        "10.3",
        "the highest free row is taken",
        ("_admit", "self._free_rows()[0]", "self._free_rows()[-1]"),
        work(2, 2, 2, submit(1, 1)),
        "rows",
    ),
    (
        "10.4",
        "the block that was freed last is evicted first",
        ("_cached", "in self._freed()", "in self._freed()[::-1]"),
        work(2, 1, 1, submit(1, 2, n=2), prefix_cache=True),
        "ledger",
    ),
    (
        "11.4",
        "a duplicate is published beside the first",
        ("_publish", "if content not in self._content.values()", "if True"),
        work(4, 2, 2, submit(2, 4, n=2), prefix_cache=True),
        "ledger",
    ),
    (
        "11.6",
        "a prompt may be a hit to its last token",
        ("_hits", "(len(request.tokens) - 1)", "len(request.tokens)"),
        work(1, 1, 1, submit(1, 1, n=2), prefix_cache=True),
        "decisions",
    ),
    (
        "12.3",
        "a graph that is exactly as wide as the longest table is passed over",
        ("_launch", "and graph[1] >= width", "and graph[1] > width"),
        work(2, 2, 1, submit(1, 2), capture_rows=(1,), capture_widths=(1, 2)),
        "replay",
    ),
    (
        "13.2",
        "min_tokens tokens are not yet enough",
        ("_commit", "r.generated >= r.min_tokens", "r.generated > r.min_tokens"),
        work(3, 2, 1, submit(1, 4, stop_at=2, min_tokens=2)),
        "decisions",
    ),
    (
        "13.3",
        "one token more than max_tokens",
        ("_commit", "r.generated == r.max_tokens", "r.generated > r.max_tokens"),
        work(2, 2, 1, submit(1, 1)),
        "decisions",
    ),
    (
        "13.7",
        "a row without a token ends like one that ran its length",
        ("_commit", 'r.finished = "error"  # 13.7', 'r.finished = "length"'),
        work(2, 2, 1, submit(1, 3, fail_at=2)),
        "decisions",
    ),
    (
        "13.7",
        "what a row without a token wrote is published",
        ("_commit", 'r.finished = "error"  # 13.7', 'r.finished = "error"; sound.append((r, at, count))'),
        work(2, 2, 1, submit(2, 2, fail_at=1), prefix_cache=True),
        "ledger",
    ),
    (
        "13.8",
        "a text that fails is heard one token late",
        ("_commit", "r.generated == r.text_fails", "r.generated - 1 == r.text_fails"),
        work(2, 2, 1, submit(1, 3, fail_at=2, fail_by="text")),
        "decisions",
    ),
)
cases = pytest.mark.parametrize(
    ("change", "workload", "check"), [case[2:] for case in FAULTS], ids=[f"{case[0]} {case[1]}" for case in FAULTS]
)


def faulty(change: tuple[str, str, str], workload: Workload) -> Run:
    owner, name, value = line(Model, *change)()
    with patch.object(owner, name, value):
        return run(workload)


def records(outcome: Run) -> list[object]:
    return [(step.record, step.ledger) for step in outcome.steps]


@cases
def test_a_fault_of_the_model_is_told_and_the_engine_knows_nothing_of_it(
    change: tuple[str, str, str], workload: Workload, check: str
) -> None:
    healthy = run(workload)
    assert healthy.findings == ()
    found = faulty(change, workload)
    assert found.first is not None
    assert found.first.check == check
    mine = records(found)
    assert mine == records(healthy)[: len(mine)]


def test_a_fault_that_the_model_no_longer_holds_is_noticed() -> None:
    with pytest.raises(Faded):
        faulty(("_grow", "text that stands nowhere", ""), work(1, 1, 1, submit(1, 1)))
