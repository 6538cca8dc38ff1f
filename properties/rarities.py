"""What is rare in a workload, drawn after all else: requests that take no hits or cannot go on, unlike salts, far priorities,
ids below zero.

Drawn last, as text and clients are, so that the rest of a workload is what it would be without. Most workloads have none of it:
who takes no hits and who is salted alone shares nothing, and sharing is what fills the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from engine.trace import BELOW, FAILURES, INT32, OUTSIDE, Submit, Workload

T = TypeVar("T")

KINDS = ("", "priorities", "", "", "hits", "failures", "", "salts", "", "")
SALTS = ("s1", "", "s2", "s3", "s4", "s5", "0", "00", " ", "S1", "\u00e9", "e\u0301", "k" * 64 + "1", "k" * 64 + "2")
"""Unlike each other by one character, by case, by how a letter is composed, or only at their end."""
FAILS_AT = (None, 1, 2, 3, 5, 8)
PRIORITIES = (0, 2, -2, 3, 7, -100, 1000, *INT32)


class Source(Protocol):
    def pick(self, options: Sequence[T]) -> T: ...


def season(source: Source, workload: Workload) -> Workload:
    kind = source.pick(KINDS)
    if kind in ("hits", "salts") and not workload.shape.prefix_cache:
        kind = ""
    events = [_submit(source, event, kind) if isinstance(event, Submit) else event for event in workload.events]
    return replace(workload, events=tuple(events))


def _submit(source: Source, event: Submit, kind: str) -> Submit:
    if any(stream == OUTSIDE for stream, _ in event.prompt):
        side = source.pick((OUTSIDE, BELOW))
        event = replace(event, prompt=tuple((side if name == OUTSIDE else name, n) for name, n in event.prompt))
    if kind == "hits":
        return replace(event, takes_hits=source.pick((True, False)))
    if kind == "salts":
        return replace(event, salt=source.pick(SALTS))
    if kind == "failures":
        return replace(event, fail_at=source.pick(FAILS_AT), fail_by=source.pick(FAILURES))
    if kind == "priorities":
        return replace(event, priority=source.pick(PRIORITIES))
    return event
