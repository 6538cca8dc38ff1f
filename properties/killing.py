"""From an armed fault to a small file: numbered workloads until a check fires, then the reducer on the first that failed.

A fault is armed on its own rung, and workload number k of seed s is the same everywhere, so a kill names (seed, number). What it
costs is told in workloads, which a machine's speed does not change, and in seconds, which people wait for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import attrs

from engine.trace import Workload
from properties import hunt
from properties.checks import Finding
from properties.faults import CATALOGUE, armed
from properties.lockstep import Run, run
from properties.rungs import RUNGS
from properties.sampled import RUNGS_WITH_A_SAMPLER, with_sampling
from properties.shrink import shrink

TRIES = {"ledger": 3000, "rows": 1500, "staged": 1500}  # of the reducer; fewer where a run takes longer


@attrs.frozen
class Kill:
    """``workloads``: how many ran, the failing one included. ``seconds``: wall time of those, without shrinking."""

    seed: int
    workloads: int
    seconds: float
    workload: Workload
    finding: Finding


def numbered(rung: str, seed: int, number: int) -> Workload:
    """Workload ``number`` of ``seed``, with temperatures and seeds where there is a sampler."""
    plain = hunt.numbered(seed, number)
    return with_sampling(plain) if rung in RUNGS_WITH_A_SAMPLER else plain


def outcome(workload: Workload, fault: str | None, *, judge_all: bool = False, rung: str | None = None) -> Run:
    """The workload with the fault armed, on the fault's rung unless another is named."""
    chosen = rung or (CATALOGUE[fault].rung if fault is not None else "ledger")
    with armed(fault):
        return run(workload, make_rung=RUNGS[chosen], judge_all=judge_all)


def first_kill(fault: str, seed: int, *, workloads: int = 1 << 40, seconds: float = math.inf) -> Kill | None:
    """The first workload of ``seed`` that fails with ``fault`` armed; None when the bound is reached before."""
    start = time.monotonic()
    for number in range(workloads):
        candidate = numbered(CATALOGUE[fault].rung, seed, number)
        found = outcome(candidate, fault).first
        spent = time.monotonic() - start
        if found is not None:
            return Kill(seed, number + 1, spent, candidate, found)
        if spent > seconds:
            break
    return None


def reduced(kill: Kill, fault: str) -> tuple[Workload, Finding, int]:
    """The smallest workload found that the same check sees, what it sees there, and how many were tried."""

    def fails(candidate: Workload) -> bool:
        found = outcome(candidate, fault).first
        return found is not None and found.check == kill.finding.check

    small, tries = shrink(kill.workload, fails, budget=TRIES.get(CATALOGUE[fault].rung, 500))
    found = outcome(small, fault).first
    assert found is not None
    return small, found, tries


def kills(fault: str, seeds: Iterable[int], *, workloads: int, seconds: float = math.inf) -> list[Kill | None]:
    """One kill a seed, each within the bounds."""
    return [first_kill(fault, seed, workloads=workloads, seconds=seconds) for seed in seeds]
