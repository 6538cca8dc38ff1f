"""Filling the laws' part of the kill matrix: each fault armed anew for each law, over one list of requests, always the same one.

It runs on torch's kernels, through which every part of the engine that a fault can be patched into is Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from properties import workers
from properties.law_engines import ModelEngines, engines_of
from properties.law_faults import armed_for_laws
from properties.law_matrix import LawRow, requests
from properties.law_play import TINY
from properties.laws import LAWS, check_laws
from properties.lockstep import run
from properties.matrix_run import sample
from properties.rungs import RUNGS

ELSEWHERE = 4  # workloads on the tiny rung
IN_LOCKSTEP = ("W01", "W02", "W03", "W04", "W05")  # are run there too: enough to show what only laws see
CPU_SECONDS = 5.0  # for one iteration

Progress = Callable[[int, int, str], None]


@cache
def engines() -> ModelEngines:
    return engines_of(TINY, "torch")


def law_rows(faults: Sequence[str | None], *, jobs: int = 1, progress: Progress | None = None) -> Iterator[LawRow]:
    """A row for each, as they are made; None is the engine as it is."""
    if jobs > 1:
        with workers.pool(jobs) as pool:
            yield from _told(pool.map(law_row, faults), len(faults), progress)
    else:
        yield from _told(map(law_row, faults), len(faults), progress)


def _told(rows: Iterator[LawRow], total: int, progress: Progress | None) -> Iterator[LawRow]:
    for number, row in enumerate(rows, 1):
        if progress is not None:
            progress(number, total, f"{row.fault or 'no fault'} by the laws")
        yield row


def law_row(fault: str | None) -> LawRow:
    """Each law has its own engines and its own unchanged run, so that nothing which one leaves behind reaches the next."""
    seen: dict[str, int] = {}
    base = ""
    for law in LAWS:
        with armed_for_laws(fault):
            findings = check_laws(engines(), [requests()], only=[law], cpu_seconds=CPU_SECONDS).findings
        base = next((found.headline for found in findings if found.check == "raises"), "")
        if base:
            break
        if findings:
            seen[law] = min(found.iteration for found in findings)
    return LawRow(fault, {} if base else seen, base, _elsewhere(fault) if fault in IN_LOCKSTEP else None)


def _elsewhere(fault: str | None) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for workload in sample(ELSEWHERE, "tiny"):
        with armed_for_laws(fault):
            ran = run(workload, make_rung=RUNGS["tiny"], judge_all=True)
        counts.update(found.check for found in ran.findings)
    return dict(sorted(counts.items()))
