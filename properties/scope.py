"""Every workload of a small box, run in lockstep: what holds then holds for all of them, and the box says for which.

It cannot see what needs more than the box holds; so the box is printed, and how often the things happened that make a run
worth anything. A zero among those fails: a box in which nobody is preempted proves nothing about preemption. Two workloads
are the same run if the specification's trace of them is the same, event by event; only distinct traces count.
"""

from __future__ import annotations

import marshal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from hashlib import blake2b
from itertools import islice

import attrs

from engine.trace import Submit, Workload, dumps, loads
from properties import workers
from properties.boxes import BOXES, Box
from properties.checks import Finding
from properties.faults import armed
from properties.lockstep import Run, run

CROWDED = "three running, pool below demand"
MUST: dict[str, str] = {  # what must happen somewhere in a box, and the name under which a run notes it
    "preempt": "preempted",
    "evict": "evicted",
    "share": "shared",
    "swap": "swapped",
    "pad": "padded",
    CROWDED: CROWDED,
}

Progress = Callable[[int, int, str], None]


@attrs.define
class Scope:
    """What came of the boxes. ``happened``: in how many workloads. ``failed``: the first failure of a shape, which ends it."""

    workloads: int = 0
    iterations: int = 0
    traces: set[int] = attrs.field(factory=set)
    happened: Counter[str] = attrs.field(factory=Counter)
    failed: list[tuple[Workload, Finding]] = attrs.field(factory=list)

    @property
    def duplicates(self) -> int:
        return self.workloads - len(self.traces)

    def missing(self) -> list[str]:
        return [name for name in MUST if not self.happened[name]]


def scope(names: Sequence[str], jobs: int = 1, progress: Progress | None = None, fault: str | None = None) -> Scope:
    """Runs every workload of the named boxes on ``jobs`` processes."""
    tasks = [(name, number) for name in names for number in range(len(list(BOXES[name].shapes())))]
    total = Scope()
    with workers.pool(jobs) as pool:
        pending = [pool.submit(one_shape, *task, fault) for task in tasks]
        for done, future in enumerate(as_completed(pending)):
            _add(total, future.result())
            if progress is not None:
                progress(done, len(tasks), f"shapes, {total.workloads} workloads")
    return total


Share = tuple[int, int, list[int], Counter[str], tuple[str, Finding] | None]


def one_shape(name: str, number: int, fault: str | None = None) -> Share:
    """One process's share, as plain values: workloads, iterations, traces, what happened, the first failure."""
    box = BOXES[name]
    shape = next(islice(box.shapes(), number, None))
    traces: list[int] = []
    happened: Counter[str] = Counter()
    iterations = 0
    first: tuple[str, Finding] | None = None
    for workload in box.workloads(shape):
        with armed(fault):
            outcome = run(workload)
        iterations += len(outcome.steps)
        traces.append(trace(outcome))
        happened.update(notable(workload, outcome))
        if outcome.first is not None:
            first = dumps(workload), outcome.first
            break
    return len(traces), iterations, traces, happened, first


def _add(total: Scope, share: Share) -> None:
    workloads, iterations, traces, happened, first = share
    total.workloads += workloads
    total.iterations += iterations
    total.traces.update(traces)
    total.happened.update(happened)
    if first is not None:
        total.failed.append((loads(first[0]), first[1]))


def trace(outcome: Run) -> int:
    """64 bits of everything that the specification saw: events, decisions and states, iteration by iteration."""
    seen = [(step.events, step.step, step.after) for step in outcome.steps]
    plain = marshal.dumps((seen, outcome.late), 2)  # version 2 writes equal values as equal bytes
    return int.from_bytes(blake2b(plain, digest_size=8).digest())


def notable(workload: Workload, outcome: Run) -> Iterator[str]:
    for name, occurrence in MUST.items():
        if outcome.occurred[occurrence]:
            yield name
    if demand(workload) > workload.shape.blocks and any(len(step.after["running"]) > 2 for step in outcome.steps):
        yield CROWDED


def demand(workload: Workload) -> int:
    """Blocks that all requests together need when each is at its longest and none shares."""
    size = workload.shape.block_size
    submits = [event for event in workload.events if isinstance(event, Submit)]
    return sum(event.n * -(-(event.prompt_len + (event.max_tokens or 1) - 1) // size) for event in submits)


# Faults ----------------------------------------------------------------------------------------------------------


def in_order(boxes: Iterable[Box]) -> Iterator[Workload]:
    """All of the boxes, small to large: they take turns, and so do the shapes of each, so few requests on every shape come
    first."""
    return _turns([_turns([box.workloads(shape) for shape in box.shapes()]) for box in boxes])


def _turns(sources: list[Iterator[Workload]]) -> Iterator[Workload]:
    while sources:
        left = []
        for source in sources:
            workload = next(source, None)
            if workload is not None:
                yield workload
                left.append(source)
        sources = left


@attrs.frozen
class Kill:
    """``workloads``: how many ran, the killing one included. ``check`` is None for a fault that survived them all."""

    fault: str
    workloads: int
    check: str | None


def first_kill(fault: str, names: Sequence[str], most: int) -> Kill:
    """Runs the boxes with a fault armed up to the first failure, or up to ``most`` workloads."""
    number = 0
    for number, workload in enumerate(islice(in_order(BOXES[name] for name in names), most), 1):
        with armed(fault):
            outcome = run(workload)
        if outcome.first is not None:
            return Kill(fault, number, outcome.first.check)
    return Kill(fault, number, None)


def kills(faults: Sequence[str], names: Sequence[str], most: int, jobs: int = 1) -> Iterator[Kill]:
    """What came of each fault, as soon as it is known: a fault that survives costs ``most`` workloads, half a minute."""
    with workers.pool(jobs) as pool:
        for future in as_completed([pool.submit(first_kill, fault, names, most) for fault in faults]):
            yield future.result()
