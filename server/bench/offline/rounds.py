"""The order of a measurement and what is kept of it.

    round 1:  single: A B C   batch16: A B C   ...        every list goes round before the next one begins,
    round 2:  single: A B C   ...                         so a ratio compares runs that are minutes apart at most

A run that took longer than SLOW seconds is not repeated; one that takes longer than PATIENCE is cut, and its process is
started anew for the other lists.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from server.bench.offline.contestants import Contestant
from server.bench.offline.worker import Reading, TooSlow, Worker, WorkerFailed
from server.bench.requests import Ask

SLOW = 20.0
PATIENCE = 90.0
SHARED = "shared16"
COLD = "shared16, no cache"
WARM_TOKENS = 4

Say = Callable[[str], None]


@attrs.frozen
class Turn:
    """One run: who, which list, the how manieth time (from 0)."""

    name: str
    list: str
    repeat: int


@attrs.define
class Outcome:
    """What a contestant's runs gave. ``lost``: lists it could not finish, and why."""

    name: str
    peer: str | None
    fp32: bool
    int8: bool = False
    runs: dict[str, list[Reading]] = attrs.field(factory=dict)
    lost: dict[str, str] = attrs.field(factory=dict)
    rss: float | None = None  # MiB, after its last run
    peak: float | None = None
    start_seconds: float | None = None
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    failure: str | None = None  # it did not start


def schedule(people: Sequence[Contestant], lists: Sequence[str], repeats: int) -> Iterator[Turn]:
    """Interleaved: the contestants change fastest, then the lists, then the rounds."""
    for repeat in range(repeats):
        for name in lists:
            for one in people:
                yield Turn(one.name, name, repeat)
                if name == SHARED and one.cold:
                    yield Turn(one.name, COLD, repeat)


def salted(asks: Sequence[Ask], name: str, repeat: int) -> list[Ask]:
    """Other first tokens in every round, the same for everybody, so that no prefix cache knows an earlier round."""
    common = name in (SHARED, COLD)
    offset = 9 if name == COLD else 0
    return [ask.salted(17 * repeat + offset + (0 if common else 61 * at)) for at, ask in enumerate(asks)]


def warm_asks(lists: Mapping[str, Sequence[Ask]]) -> list[list[Ask]]:
    """A stream and a crowd, short: whatever an engine makes at its first step is made then."""
    longest = max(lists.values(), key=len)
    short = [Ask(ask.prompt[:32], WARM_TOKENS) for ask in longest]
    return [short[:1], short] if len(short) > 1 else [short]


def measure(
    workers: Mapping[str, Worker],
    lists: Mapping[str, Sequence[Ask]],
    turns: Sequence[Turn],
    say: Say,
    *,
    slow: float = SLOW,
    patience: float = PATIENCE,
) -> dict[str, Outcome]:
    """Starts everybody, takes the turns, ends everybody. ``say`` hears what is going on before it begins."""
    outcomes = {
        name: Outcome(name, one.contestant.peer, one.contestant.fp32, one.contestant.int8)
        for name, one in workers.items()
    }
    try:
        for name, one in workers.items():
            say(f"starting {name}")
            _start(one, outcomes[name], lists, patience)
        for turn in turns:
            say(f"round {turn.repeat + 1}, {turn.list}: {turn.name}")
            _take(turn, workers[turn.name], outcomes[turn.name], lists, slow, patience)
        for name, one in workers.items():
            if outcomes[name].failure is None:
                outcomes[name].rss, outcomes[name].peak = one.memory()
    finally:
        for one in workers.values():
            one.close()
    return outcomes


def _start(one: Worker, outcome: Outcome, lists: Mapping[str, Sequence[Ask]], patience: float) -> None:
    try:
        one.start()
        for asks in warm_asks(lists):
            one.run(asks, patience)
    except WorkerFailed as error:
        outcome.failure = str(error)
        return
    outcome.facts, outcome.start_seconds = one.facts, one.start_seconds


def _take(
    turn: Turn, one: Worker, outcome: Outcome, lists: Mapping[str, Sequence[Ask]], slow: float, patience: float
) -> None:
    done = outcome.runs.get(turn.list, [])
    if outcome.failure is not None or turn.list in outcome.lost or any(run.wall > slow for run in done):
        return
    asks = salted(lists[SHARED if turn.list == COLD else turn.list], turn.list, turn.repeat)
    try:
        outcome.runs.setdefault(turn.list, []).append(one.run(asks, patience, hits=turn.list != COLD))
    except TooSlow as error:
        outcome.lost[turn.list] = str(error)
        one.close()
        _start(one, outcome, lists, patience)
    except WorkerFailed as error:
        outcome.lost[turn.list] = str(error)
        if not done:
            outcome.runs.pop(turn.list, None)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
