"""The trace keeps the trace event format: what viewers need is there, and slices on a track never overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.trace import Abort, FailStep, Shape, Submit, Workload
from properties import corpus
from properties.__main__ import main
from properties.faults import armed
from properties.lockstep import run
from properties.perfetto import ITERATION, POOL, REQUESTS, ROWS, trace

BUSY = Workload(
    Shape(6, 2, 3, budget=4, capture_rows=(1, 2, 3), capture_widths=(4,), prefix_cache=True),
    (
        Submit(0, (("a", 5),), 5),
        Submit(0, (("a", 4), ("b", 1)), 5, n=2),
        Submit(2, (("c", 3),), 4, priority=-1),
        Abort(3, 1),
        FailStep(2),
        Submit(0, (("d", 2),), 6),
    ),
    title="busy",
)
NEEDED = {
    "X": {"ts", "dur", "args"},
    "C": {"ts", "args"},
    "i": {"ts", "s"},
    "M": {"args"},
}


def overlaps(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Neighbouring slices of one track of which the first has not ended when the second starts."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    found = []
    for track in tracks.values():
        for one, other in pairwise(sorted(track, key=lambda event: event["ts"])):
            if one["ts"] + one["dur"] > other["ts"]:
                found.append((one["name"], other["name"]))
    return found


def complaints(events: list[dict[str, Any]]) -> list[str]:
    """Where events break the format."""
    said = []
    names = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    for event in events:
        missing = {"ph", "pid", "tid", "name", *NEEDED.get(event["ph"], ())} - event.keys()
        if event["ph"] not in NEEDED or missing:
            said.append(f"{event} lacks {missing}")
            continue
        if not all(isinstance(event[key], int) for key in ("pid", "tid", "ts") if key in event):
            said.append(f"{event} has a number that is none")
        if event["ph"] == "X" and (event["dur"] <= 0 or (event["pid"], event["tid"]) not in names):
            said.append(f"{event} has no length or no named track")
        if event["ph"] == "C" and not all(isinstance(value, int) for value in event["args"].values()):
            said.append(f"{event} counts something that is no number")
        if event["ph"] == "i" and event["s"] not in ("g", "p", "t"):
            said.append(f"{event} has no scope")
        if event["pid"] not in processes:
            said.append(f"{event} belongs to no named process")
    return said


def of(workload: Workload, fault: str | None = None) -> list[dict[str, Any]]:
    with armed(fault):
        outcome = run(workload)
    document = json.loads(json.dumps(trace(workload, outcome)))
    assert document["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_the_format_and_no_overlap_over_the_corpus() -> None:
    for workload in [BUSY, *corpus.workloads().values()]:
        events = of(workload)
        assert complaints(events) == []
        assert overlaps(events) == []
        times = [event["ts"] for event in events if event["ph"] != "M"]
        assert times == sorted(times)


def test_what_is_told() -> None:
    """Every iteration's counters; prefill, decode, waiting and preempted slices; aborts, preemptions and ends."""
    outcome = run(BUSY)
    events = of(BUSY)
    iterations = len(outcome.steps)
    assert sum(event["ph"] == "C" and event["name"] == "free blocks" for event in events) == iterations
    slices = {(event["pid"], event["name"].split(" [")[0]) for event in events if event["ph"] == "X"}
    assert {(REQUESTS, name) for name in ("waiting", "prefill", "decode", "preempted")} <= slices
    assert {(ROWS, "r0 prefill"), (ROWS, "r0 decode")} <= slices
    instants = [event["name"] for event in events if event["ph"] == "i"]
    for start in ("preempt r", "abort r1", "end r0: length", "execute raised"):
        assert any(name.startswith(start) for name in instants), start
    computed = sum(
        event["dur"] // ITERATION
        for event in events
        if event["ph"] == "X" and event["pid"] == ROWS and event["name"].endswith("decode")
    )
    assert computed == sum(len(step.step["decodes"]) for step in outcome.steps)


def test_a_finding_is_an_instant_of_the_whole_trace() -> None:
    workload = next(w for name, w in corpus.workloads().items() if name.startswith("A03-"))
    with armed("A03"):
        first = run(workload).first
    assert first is not None
    (found,) = (e for e in of(workload, "A03") if e["ph"] == "i" and e["pid"] == POOL and first.check in e["name"])
    assert (found["ts"], found["s"]) == (first.iteration * ITERATION, "g")


@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (lambda event: event.update(dur=event["dur"] + ITERATION), "overlap"),
        (lambda event: event.pop("ts"), "complaint"),
        (lambda event: event.update(tid=999), "complaint"),
        (lambda event: event.update(ph="Q"), "complaint"),
    ],
)
def test_a_spoiled_trace_is_seen(spoil: Any, seen: str) -> None:
    events = of(BUSY)
    chosen = next(event for event in events if event["ph"] == "X" and event["name"] == "waiting")
    spoil(chosen)
    assert complaints(events) if seen == "complaint" else overlaps(events)


def test_replay_and_show_write_it(tmp_path: Path) -> None:
    file, out = str(next(corpus.REGRESS.glob("A03-*.json"))), tmp_path / "trace.json"
    assert main(["replay", file, "--arm", "A03", "--perfetto", str(out)]) == 1
    assert "traceEvents" in json.loads(out.read_text(encoding="utf-8"))
    assert main(["show", file, "--perfetto", str(out)]) == 0
    assert complaints(json.loads(out.read_text(encoding="utf-8"))["traceEvents"]) == []
