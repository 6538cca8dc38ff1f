"""The one interpreter of workloads: it walks the events and drives whatever can be submitted to, aborted and stepped.

``wait`` counts iterations; a target without work makes none, so a wait ends early. That is the whole of time here.
"""

from __future__ import annotations

from typing import Protocol

from engine.trace import Abort, Event, FailStep, Shutdown, Submit, Workload


class Target(Protocol):
    """What a workload can drive. A target that wants no more raises ``Stop``."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, event: Submit) -> None:
        """``event.n`` ids are used up, whether the door lets the request in or not."""
        ...

    def abort(self, request: int) -> None: ...

    def fail(self, count: int) -> None:
        """The next ``count`` iterations raise in execute."""
        ...

    def shutdown(self) -> None:
        """No event follows. Whatever has not finished is aborted."""
        ...

    def note(self, label: str) -> None:
        """An event as the timeline shows it, told before it is applied."""
        ...

    def step(self) -> None: ...


class Stop(Exception):
    """The target has seen enough."""


def play(workload: Workload, target: Target) -> None:
    """Runs a workload to its end: every event applied, then stepped until no work is left."""
    submitted = 0
    for event in workload.events:
        for _ in range(event.wait):
            if not target.has_work:
                break
            target.step()
        target.note(label(event, submitted))
        match event:
            case Submit():
                first, submitted = submitted, submitted + event.n
                target.submit(event)
                for left in range(first, submitted) if event.client == "leaves" else ():
                    target.note(f"leave r{left}")
                    target.abort(left)
            case Abort():
                request = event.target(submitted)
                if request is not None:
                    target.abort(request)
            case FailStep():
                target.fail(event.count)
            case Shutdown():
                target.shutdown()
                break
    while target.has_work:
        target.step()


def label(event: Event, submitted: int) -> str:
    """``+r3``, ``+r3..r5``, ``abort r1``, ``fail 2``, ``shutdown``; in brackets what cannot apply. Targets bracket what
    did not."""
    match event:
        case Submit():
            last = submitted + event.n - 1
            return f"+r{submitted}" if event.n == 1 else f"+r{submitted}..r{last}"
        case Abort():
            request = event.target(submitted)
            return "(abort nobody)" if request is None else f"abort r{request}"
        case FailStep():
            return f"fail {event.count}" if event.count else "(fail 0)"
        case Shutdown():
            return "shutdown"
