"""The hunter: generated workloads from a plain generator of numbers, on every core, until the time is up.

Ten times as many workloads a second as Hypothesis, no memory and no shrinking of its own: what it finds, the reducer
shrinks. Workload number k of seed s is the same everywhere, so a find names (seed, number) and needs no database.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import attrs

from engine.trace import Workload
from properties import workers
from properties.checks import Finding
from properties.floors import Floors
from properties.generate import RandomSource, workload
from properties.guard import overtime
from properties.sampled import for_rung
from properties.shrink import shrink
from properties.trial import Trial

BATCH = 100  # workloads that a process runs between two looks at the clock
SHRINKING = 40.0  # seconds that finds are still shrunk when the time is up
SHRINKING_SLOW = 20.0  # seconds for a workload whose every failing try takes as long as a call may

Progress = Callable[["Hunted", float], None]  # so far, seconds left


@attrs.frozen
class Find:
    """``workload`` is shrunk; ``number`` is that of the one that failed first."""

    number: int
    workload: Workload
    finding: Finding


@attrs.define
class Hunted:
    """``ended``: what ended it before its time, Ctrl-C or SIGTERM."""

    seed: int
    iterations: int = 0
    floors: Floors = attrs.field(factory=Floors)
    finds: list[Find] = attrs.field(factory=list)
    ended: BaseException | None = None

    @property
    def workloads(self) -> int:
        return self.floors.runs


def numbered(seed: int, number: int) -> Workload:
    return workload(RandomSource(f"{seed}/{number}"))


def hunt(
    minutes: float,
    *,
    seed: int,
    jobs: int = 1,
    rung: str = "ledger",
    fault: str | None = None,
    subject: str | None = None,
    progress: Progress | None = None,
) -> Hunted:
    """Runs batches on ``jobs`` processes. Keeps the first find of each check; stops early only when the time is up.

    When it is, nothing new starts: what runs ends with its workload, and shrinking soon after. So an engine that loops for
    ever takes no longer than the time asked for, one call's bound, ``SHRINKING_SLOW`` and a last try.

    An interrupt, or SIGTERM, ends it too: what was found until then comes back, as small as it is by then.
    """
    hunted = Hunted(seed)
    try:
        _hunt(hunted, minutes, jobs, Trial(rung, fault, subject), progress)
    except (KeyboardInterrupt, workers.Terminated) as ended:
        hunted.ended = ended
    return hunted


def _hunt(hunted: Hunted, minutes: float, jobs: int, trial: Trial, progress: Progress | None) -> None:
    end = time.monotonic() + minutes * 60
    batches = iter(range(0, 1 << 40, BATCH))
    with workers.pool(jobs) as pool:
        pending: set[Future[dict[str, Any]]] = set()
        while True:
            left = end - time.monotonic()
            while left > 0 and len(pending) < 2 * jobs:
                pending.add(pool.submit(batch, hunted.seed, next(batches), trial, end))
            if left <= 0:
                pending = {future for future in pending if not future.cancel()}
            if not pending:
                break
            done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                _take(hunted, future.result(), trial, end)
            if progress is not None:
                progress(hunted, max(0.0, left))


def batch(seed: int, start: int, trial: Trial, end: float = math.inf) -> dict[str, Any]:
    """One process's share, until ``end`` on the monotonic clock, which processes share. Plain values come back."""
    floors = Floors()
    iterations = 0
    failed: list[tuple[int, Finding]] = []
    for number in range(start, start + BATCH):
        if time.monotonic() > end:
            break
        outcome = trial.run(for_rung(numbered(seed, number), trial.rung))
        floors.add(outcome.occurred)
        iterations += len(outcome.steps)
        if outcome.first is not None:
            failed.append((number, outcome.first))
            if overtime(outcome.first):  # the next may take as long: first a look at the clock
                break
    return {"floors": floors.dump(), "iterations": iterations, "failed": failed}


def _take(hunted: Hunted, result: dict[str, Any], trial: Trial, end: float) -> None:
    hunted.floors.merge(result["floors"])
    hunted.iterations += result["iterations"]
    for number, found in result["failed"]:
        if found.check not in {find.finding.check for find in hunted.finds}:
            whole = for_rung(numbered(hunted.seed, number), trial.rung)
            hunted.finds.append(Find(number, whole, found))
            _shrink_last(hunted.finds, trial, end)


def _shrink_last(finds: list[Find], trial: Trial, end: float) -> None:
    """Makes the last find smaller, step by step, so that an interrupt leaves the smallest so far. ``end``: of the hunt, on
    the monotonic clock."""
    first = finds[-1]
    slow = overtime(first.finding)
    until = end + SHRINKING  # of several finds at the end, the later ones have less
    if slow:
        until = min(until, time.monotonic() + SHRINKING_SLOW)

    def fails(candidate: Workload) -> bool:
        if time.monotonic() > until:
            return False
        again = trial.run(candidate).first
        if again is None or again.check != first.finding.check or overtime(again) != slow:
            return False
        finds[-1] = Find(first.number, candidate, again)
        return True

    shrink(first.workload, fails)
