"""A run in the trace event format (JSON), which ui.perfetto.dev and chrome://tracing open. One iteration lasts one millisecond.

    process "rows"       a track for each row: what it computes, in slices (a prefill chunk; a stretch of decoding)
    process "requests"   a track for each request: waiting, prefill, decode, preempted, until it ends
    process "pool"       counters: free blocks (blank, cached), waiting requests, tokens of the iteration

Preemptions, aborts and findings are instants. On a track slices never overlap, so none is drawn inside another.
Everything is told from the specification's side, which the engine matched up to the finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import attrs

from engine.trace import Workload
from properties.lockstep import Run, Step

ITERATION = 1000  # microseconds, the unit of ``ts`` and ``dur``
ROWS, REQUESTS, POOL = 1, 2, 3  # process ids
FIRST = 1  # thread id of row 0 and of r0; viewers take 0 for the idle thread

Event = dict[str, Any]


def trace(workload: Workload, run: Run) -> dict[str, Any]:
    """The whole document."""
    drawing = _Drawing(run)
    events = [event for step in run.steps for event in drawing.step(step)]
    events += drawing.finish()
    events += _findings(run)
    events.sort(key=lambda event: event["ts"])  # stable; viewers want it, the format does not
    tracks = list(_tracks(workload, drawing.requests))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"title": workload.title, "time": "1 ms is one iteration"},
        "traceEvents": [*tracks, *events],
    }


@attrs.frozen
class _Slice:
    """A slice that may go on in the next iteration: same track, same name."""

    pid: int
    tid: int
    name: str
    start: int  # iteration
    args: dict[str, Any]


@attrs.define
class _Drawing:
    run: Run
    requests: set[int] = attrs.field(factory=set)
    _open: dict[tuple[int, int], _Slice] = attrs.field(factory=dict)  # by track
    _preempted: set[int] = attrs.field(factory=set)
    _last: int = 0

    def step(self, step: Step) -> Iterator[Event]:
        did, after, at = step.step, step.after, step.iteration
        self._last = at
        self._preempted.update(did.get("preempted", ()))
        now = {(slice_.pid, slice_.tid): slice_ for slice_ in chain(_work(step), self._statuses(step))}
        for track, slice_ in list(self._open.items()):
            if track not in now or now[track].name != slice_.name or slice_.name.endswith("]"):
                yield _complete(self._open.pop(track), at)
        for track, slice_ in now.items():
            self._open.setdefault(track, slice_)
        yield from _instants(did, at)
        free = {"blank": len(after["blank"]), "cached": len(after.get("cached", ()))}
        tokens = {
            "prefill": sum(count for _, _, _, count, _ in did.get("chunks", ())),
            "decode": len(did.get("decodes", ())),
        }
        for name, values in (
            ("free blocks", free),
            ("waiting", {"requests": len(after["waiting"])}),
            ("tokens", tokens),
        ):
            yield {"ph": "C", "pid": POOL, "tid": 0, "ts": at * ITERATION, "name": name, "args": values}

    def finish(self) -> Iterator[Event]:
        for slice_ in self._open.values():
            yield _complete(slice_, self._last + 1)
        self._open.clear()

    def _statuses(self, step: Step) -> Iterator[_Slice]:
        """What each request is after the iteration; what it did in the iteration where it ended, its last slice."""
        decoded = {request for request, *_ in step.step.get("decodes", ())}
        chunked = {request for request, *_ in step.step.get("chunks", ())}
        for request, status in step.after["status"].items():
            self.requests.add(request)
            if status == "waiting":
                name = "preempted" if request in self._preempted else "waiting"
            elif request in chunked:
                name = "prefill"
            elif request in decoded:
                name = "decode"
            else:
                name = str(status)
            tokens = {"tokens": step.after["num_tokens"][request], "blocks": len(step.after["tables"].get(request, ()))}
            yield _Slice(REQUESTS, request + FIRST, name, step.iteration, tokens)


def _work(step: Step) -> Iterator[_Slice]:
    """What each row computes. A chunk is a slice of its own; decoding goes on."""
    for request, row, start, count, samples in step.step.get("chunks", ()):
        args = {"request": request, "from": start, "count": count, "samples": samples}
        yield _Slice(ROWS, row + FIRST, f"r{request} prefill [{start}..{start + count - 1}]", step.iteration, args)
    for request, row, position in step.step.get("decodes", ()):
        yield _Slice(ROWS, row + FIRST, f"r{request} decode", step.iteration, {"request": request, "from": position})


def _complete(slice_: _Slice, until: int) -> Event:
    return {
        "ph": "X",
        "pid": slice_.pid,
        "tid": slice_.tid,
        "ts": slice_.start * ITERATION,
        "dur": (until - slice_.start) * ITERATION,
        "name": slice_.name,
        "args": slice_.args,
    }


def _instants(did: Mapping[str, Any], at: int) -> Iterator[Event]:
    ended = [(request, f"end r{request}: {reason}") for request, reason in did.get("finished", ())]
    preempted = [(request, f"preempt r{request}") for request in did.get("preempted", ())]
    aborted = [(request, f"abort r{request}") for request in did.get("aborted", ())]
    for request, name in (*aborted, *preempted, *ended):
        yield _instant(name, at, pid=REQUESTS, tid=request + FIRST, scope="t")
    if did.get("error"):
        yield _instant("execute raised", at, pid=POOL, tid=0, scope="g")


def _findings(run: Run) -> Iterator[Event]:
    for found in run.findings:
        name = f"{found.check}: {found.headline}"
        yield _instant(name, found.iteration, pid=POOL, tid=0, scope="g")


def _instant(name: str, at: int, *, pid: int, tid: int, scope: str) -> Event:
    return {"ph": "i", "pid": pid, "tid": tid, "ts": at * ITERATION, "s": scope, "name": name}


def _tracks(workload: Workload, requests: set[int]) -> Iterator[Event]:
    """Names and order of processes and tracks."""
    for pid, name in ((ROWS, "rows"), (REQUESTS, "requests"), (POOL, "pool")):
        yield _meta("process_name", pid, 0, {"name": name})
        yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
    tracks = [(ROWS, row + FIRST, f"row {row}") for row in range(workload.shape.rows)]
    tracks += [(REQUESTS, request + FIRST, f"r{request}") for request in sorted(requests)]
    for pid, tid, name in tracks:
        yield _meta("thread_name", pid, tid, {"name": name})
        yield _meta("thread_sort_index", pid, tid, {"sort_index": tid})


def _meta(kind: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": args}
