"""What a workload says of text and of clients, drawn after everything else: stop strings, how answers are read, a shutdown.

Drawn last, so that the rest of a workload is what it would be without. Two workloads in three say nothing that changes it: stop
strings and clients that leave make requests shorter, and long ones are what preempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from engine.trace import Shutdown, Submit, Workload

T = TypeVar("T")


class Source(Protocol):
    def pick(self, options: Sequence[T]) -> T: ...


def dress(source: Source, workload: Workload) -> Workload:
    says = source.pick((True, False, False))
    events = [_submit(source, event, says) if isinstance(event, Submit) else event for event in workload.events]
    if not says:
        return replace(workload, events=tuple(events))
    if source.pick((False, False, False, False, True)):
        events.append(Shutdown(source.pick((1, 0, 2, 4, 8))))
    shape = replace(workload.shape, byte_fallback=source.pick((False, True)))
    return replace(workload, shape=shape, events=tuple(events))


def _submit(source: Source, event: Submit, says: bool) -> Submit:
    client = source.pick(("streams", "stalls", "whole", "stalls", "streams", "leaves" if says else "streams"))
    stop_text = source.pick((None, 1, 2, None, 3, 5, 8)) if says else None
    if stop_text is None:
        return replace(event, client=client) if client != "streams" else event
    return replace(
        event,
        stop_text=stop_text,
        include_stop=source.pick((False, False, True)),
        min_tokens=source.pick((event.min_tokens, event.min_tokens, 2, 3, 4)),
        client=client,
    )
