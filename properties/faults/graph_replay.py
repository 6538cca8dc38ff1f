"""Faults of the replay decision (rule 12). What a replay then does with its padded rows is in faults/compute.py."""

from __future__ import annotations

from properties.arming import Fault, in_area, line

MODULE = "engine.control.scheduler"  # the name through which plan reaches the decision
SCHEDULER = "engine.control.scheduler:Scheduler"

FAULTS = in_area(
    "graph replay",
    Fault(
        "G01",
        "the largest graph that is too small instead of the smallest that is large enough",
        ("replay",),
        line(MODULE, "decide", "bisect_left(captures, (d, 0)) :", "max(0, bisect_left(captures, (d, 0)) - 1) :"),
        rules=("12.3",),
        needs="padded",
    ),
    Fault(
        "G02",
        "scattered rows are replayed",
        ("replay",),
        line(MODULE, "decide", "rows[-1] != d - 1", "False"),
        rules=("12.2",),
        needs="scattered",
    ),
    Fault(
        "G05",
        "the width of a graph is not looked at",
        ("replay",),
        line(MODULE, "decide", "if width >= longest:", "if width:"),
        rules=("12.3", "12.4"),
        needs="uncaptured",
    ),
    Fault(
        "G06",
        "padding counts all rows of the graph",
        ("replay",),
        line(MODULE, "decide", "captured_rows - d", "captured_rows"),
        rules=("12.3",),
        needs="exact replay",
    ),
    Fault(
        "G07",
        "the table of a request that is still prefilling decides the width of the graph",
        ("replay",),
        line(SCHEDULER, "_longest_table", "if r.status is Status.DECODING", "if r.status is not Status.FINISHED"),
        rules=("12.1", "12.5"),
        needs="mixed step",
    ),
    Fault(
        "G08",
        "a graph must be exactly as wide as the longest table",
        ("replay",),
        line(MODULE, "decide", "if width >= longest:", "if width == longest:"),
        rules=("12.3",),
    ),
)
