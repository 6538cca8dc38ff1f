"""Who held a block, and since when: kept by the harness from what it saw after each iteration, never by the engine.

So a report can name the last holder of a block that the engine has lost. Holdings are read from the tables of the engine's
own ledgers where an engine ran, otherwise from the specification's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from properties.lockstep import Step

Holding = tuple[int, int]  # block, request


@attrs.frozen
class Hold:
    """One holding of a block. ``released`` and ``number`` (which release of the run it was) are None while it lasts."""

    block: int
    request: int
    taken: int  # iteration
    released: int | None = None
    number: int | None = None

    def __str__(self) -> str:
        if self.released is None:
            return f"r{self.request}, taken at {self.taken}, not released"
        return f"r{self.request}, taken at {self.taken}, released at {self.released} (release #{self.number})"


def holds(steps: Sequence[Step]) -> dict[int, tuple[Hold, ...]]:
    """The holdings of each block in order of their end, those that last behind the others.

    A request that gives its table back and takes the same block again within one iteration has held it twice.
    """
    over: dict[int, list[Hold]] = {}
    open_: dict[Holding, int] = {}
    releases = 0
    for step in steps:
        now = {(block, request) for request, table in tables(step).items() for block in table}
        gave = _gave_back(step)
        ended = sorted(open_.keys() - now | {key for key in open_ if key[1] in gave}, key=lambda key: _turn(gave, key))
        number = {request: releases + turn for turn, request in enumerate(dict.fromkeys(r for _, r in ended), 1)}
        releases += len(number)
        for block, request in ended:
            taken = open_.pop((block, request))
            over.setdefault(block, []).append(Hold(block, request, taken, step.iteration, number[request]))
        for key in now - open_.keys():
            open_[key] = step.iteration
    for (block, request), taken in sorted(open_.items(), key=lambda item: item[1]):
        over.setdefault(block, []).append(Hold(block, request, taken))
    return {block: tuple(kept) for block, kept in sorted(over.items())}


def tables(step: Step) -> Mapping[int, Sequence[int]]:
    """Block tables after the iteration: the engine's where there is one, otherwise the specification's."""
    held: Mapping[int, Sequence[int]] = step.after.get("tables", {}) if step.ledger is None else step.ledger.tables
    return held


def _gave_back(step: Step) -> list[int]:
    """Requests that released their table in this iteration, in the order in which they did."""
    if step.record is not None:
        return [*step.record.reaped, *step.record.preempted]
    done: Mapping[str, Any] = step.step
    return [*done.get("reaped", ()), *done.get("preempted", ())]


def _turn(gave: Sequence[int], holding: Holding) -> tuple[int, int]:
    """Sorts holdings by the release that ended them."""
    block, request = holding
    return (gave.index(request) if request in gave else len(gave), block)
