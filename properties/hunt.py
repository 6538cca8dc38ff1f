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
SHRINKING = 20.0  # seconds for a workload whose every failing try takes as long as a call may

Progress = Callable[["Hunted", float], None]  # so far, seconds left


@attrs.frozen
class Find:
    """``workload`` is shrunk; ``number`` is that of the one that failed first."""

    number: int
    workload: Workload
    finding: Finding


@attrs.define
class Hunted:
    seed: int
    iterations: int = 0
    floors: Floors = attrs.field(factory=Floors)
    finds: list[Find] = attrs.field(factory=list)

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
    """Runs batches on ``jobs`` processes. Keeps the first find of each check; stops early only when the time is up."""
    trial = Trial(rung, fault, subject)
    hunted = Hunted(seed)
    end = time.monotonic() + minutes * 60
    batches = iter(range(0, 1 << 40, BATCH))
    with workers.pool(jobs) as pool:
        pending: set[Future[dict[str, Any]]] = set()
        while True:
            left = end - time.monotonic()
            while left > 0 and len(pending) < 2 * jobs:
                pending.add(pool.submit(batch, seed, next(batches), trial))
            if not pending:
                break
            done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                _take(hunted, future.result(), trial)
            if progress is not None:
                progress(hunted, max(0.0, left))
    return hunted


def batch(seed: int, start: int, trial: Trial) -> dict[str, Any]:
    """One process's share: plain values back, so that it can cross a process boundary."""
    floors = Floors()
    iterations = 0
    failed: list[tuple[int, str]] = []
    for number in range(start, start + BATCH):
        outcome = trial.run(for_rung(numbered(seed, number), trial.rung))
        floors.add(outcome.occurred)
        iterations += len(outcome.steps)
        if outcome.first is not None:
            failed.append((number, outcome.first.check))
            if overtime(outcome.first):  # the next may take as long: first a look at the clock
                break
    return {"floors": floors.dump(), "iterations": iterations, "failed": failed}


def _take(hunted: Hunted, result: dict[str, Any], trial: Trial) -> None:
    hunted.floors.merge(result["floors"])
    hunted.iterations += result["iterations"]
    for number, check in result["failed"]:
        if check not in {find.finding.check for find in hunted.finds}:
            hunted.finds.append(_shrunk(hunted.seed, number, check, trial))


def _shrunk(seed: int, number: int, check: str, trial: Trial) -> Find:
    whole = for_rung(numbered(seed, number), trial.rung)
    first = trial.run(whole).first
    assert first is not None
    slow = overtime(first)
    end = time.monotonic() + SHRINKING if slow else math.inf

    def fails(candidate: Workload) -> bool:
        if time.monotonic() > end:
            return False
        found = trial.run(candidate).first
        return found is not None and found.check == check and overtime(found) == slow

    small, _ = shrink(whole, fails)
    found = first if small == whole else trial.run(small).first
    assert found is not None
    return Find(number, small, found)
