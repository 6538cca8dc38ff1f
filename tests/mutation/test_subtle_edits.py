"""Edits that a careless engineer might make, thought up by reading control and not the checks: each must be seen.

The first two were not, until workloads had prompts that go on from an earlier answer (streams "answer/N"): where no prompt
holds generated tokens, nobody ever waits for, or hits, a block that a decode filled. The third is rare enough to be shown
by a workload of its own.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from engine.control.scheduler import Scheduler
from engine.trace import Abort, Shape, Submit, Workload
from properties.arming import line
from properties.hunt import numbered
from properties.lockstep import Run, run

ENOUGH = 400  # generated workloads, of which the first that shows the edit ends the search

FOLLOW_UP = Workload(
    Shape(7, 1, 2, prefix_cache=True),
    (
        Submit(0, (("sys", 3),), 2),
        Submit(0, (("sys", 3), ("answer/0", 2)), 1),
    ),
)
TWO_FILL_ONE_CONTENT = Workload(
    Shape(5, 4, 2, 2, prefix_cache=True),
    (
        Submit(0, (("a", 1),), 1),
        Submit(0, (("a", 1),), 1),
        Submit(0, (("sys", 8), ("answer/0", 4), ("c", 1)), 4),
        Submit(0, (("sys", 8), ("answer/0", 4), ("c", 1), ("answer/2", 3)), 1),
    ),
)


FULL_QUEUE = Workload(
    Shape(4, 2, 1, max_waiting=2),
    (Submit(0, (("a", 1),), 1), Submit(0, (("a", 1),), 1), Abort(0, 1), Submit(0, (("a", 1),), 1)),
)

CROSSED = Workload(
    Shape(12, 2, 4),
    (
        Submit(0, (("a", 1),), 2, n=2),
        Submit(0, (("a", 1),), 4, priority=1),
        Submit(1, (("a", 1),), 4),
    ),
)


def edited(name: str, old: str, new: str, workload: Workload) -> Run:
    owner, member, value = line(Scheduler, name, old, new)()
    with patch.object(owner, member, value):
        return run(workload)


@pytest.mark.parametrize(
    ("name", "old", "new", "workload", "check"),
    [
        (
            "_admit",
            "self._to_be_published(work)",
            "self._to_be_published([entry for entry in work if isinstance(entry, Chunk)])",
            FOLLOW_UP,
            "decisions",
        ),
        (
            "_publish",
            "sorted([self.requests[i] for i in ids if i not in doubtful], key=lambda r: r.order)",
            "[self.requests[i] for i in ids if i not in doubtful]",
            TWO_FILL_ONE_CONTENT,
            "ledger",
        ),
        (
            "submit",
            "len(self.waiting))",
            "sum(not r.aborted for r in self.waiting))",
            FULL_QUEUE,
            "decisions",
        ),
        (
            "_compact",
            "self.rows.misplaced(decoding)",
            "[*zip([row for row in decoding if row >= len(decoding)], sorted({*range(len(decoding))} - {*decoding}))]",
            CROSSED,
            "rows",
        ),
    ],
    ids=[
        "nobody waits for a block that a decode fills",
        "blocks are published in the order of the plan",
        "an abort that is not yet applied makes room in the queue",
        "strays are paired in the order of requests",
    ],
)
def test_one_workload_sees_it(name: str, old: str, new: str, workload: Workload, check: str) -> None:
    assert run(workload).findings == ()
    found = edited(name, old, new, workload).first
    assert found is not None
    assert found.check == check


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "_grow",
            "victim = self.running[-1]",
            "victim = max(self.running, key=lambda r: (r.status == 'prefilling', r.order))",
        ),
        ("_grow", "victim = self.running[-1]", "victim = min(self.running, key=lambda r: len(r.table))"),
        ("_preempt", "self._enqueue(victim)", "self.waiting.insert(0, victim)"),
        ("_seat", "request.published = len(hits)", "request.published = max(request.published, len(hits))"),
        ("_longest_table", " if r.status is Status.DECODING", ""),
        ("_record", "self.iteration += 1", "self.iteration += bool(opened.plan.forwards)"),
    ],
    ids=[
        "who still prefills falls first",
        "the victim is the smallest",
        "a victim goes before all that wait",
        "what was published before a preemption counts as published after it",
        "prefilling requests widen the graph",
        "an iteration that only reaps is not counted",
    ],
)
def test_generated_workloads_see_it(name: str, old: str, new: str) -> None:
    found = (edited(name, old, new, numbered(1, number)).first for number in range(ENOUGH))
    assert next((one for one in found if one is not None), None) is not None
