"""Faults of the row table: who sits where, and what compaction moves. Rows in compute are in faults/compute.py."""

from __future__ import annotations

from properties.arming import Fault, in_area, line

SCHEDULER = "engine.control.scheduler:Scheduler"
ROWS = "engine.control.rows:RowTable"

FAULTS = in_area(
    "rows",
    Fault(
        "T03",
        "compaction moves the row, but the request does not learn of it",
        ("audit", "rows"),
        line(SCHEDULER, "_compact", "decoding[src].row = dst", "pass"),
        rules=("7.3",),
        needs="moved",
    ),
    Fault(
        "T04",
        "two requests in one row",
        ("raises",),
        line(ROWS, "take", "self.owner.index(None)", "max(0, self.owner.index(None) - 1)"),
        rules=("10.3",),
    ),
    Fault(
        "T05",
        "a swap forgets the request that was displaced",
        ("audit", "rows"),
        line(SCHEDULER, "_compact", "self.requests[displaced].row = src", "pass"),
        rules=("7.4",),
        needs="swapped",
    ),
    Fault(
        "T06",
        "strays are paired in descending order",
        ("rows",),
        line(ROWS, "misplaced", "if row >= d)", "if row >= d)[::-1]"),
        rules=("7.3",),
        needs="moved",
    ),
    Fault(
        "T07",
        "a returned row is not counted",
        ("audit",),
        line(ROWS, "release", "self.num_free += 1", "pass"),
        rules=("4.1",),
    ),
    Fault(
        "T08",
        "a request that ends with its first token gives back its blocks, but not its row",
        ("audit",),
        line(SCHEDULER, "_give_back", "self.rows.release(row)", "request.generated == 1 or self.rows.release(row)"),
        source="sgl-project/sglang PR#10871",
        rules=("4.1",),
    ),
    Fault(
        "T09",
        "rows move without the persistent batch, too",
        ("rows",),
        line(SCHEDULER, "_compact", "if not self.limits.persistent_batch", "if False"),
        rules=("7.1",),
        needs="scattered",
    ),
    Fault(
        "T10",
        "compaction counts prefilling requests among those that decode",
        ("rows",),
        line(SCHEDULER, "_compact", "if r.status is Status.DECODING and", "if r.status is not Status.FINISHED and"),
        rules=("7.2",),
        needs="swapped",
    ),
    Fault(
        "T11",
        "the highest free row is taken",
        ("rows",),
        line(ROWS, "take", "self.owner.index(None)", "len(self.owner) - 1 - self.owner[::-1].index(None)"),
        rules=("10.3",),
    ),
)
