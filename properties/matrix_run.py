"""Filling the kill matrix: each fault is armed on its rung, over its witnesses and generated workloads.

Every check is judged to the end of each run, whatever fired before it. Rows are independent, so processes share them out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack

from engine.trace import Workload
from properties import corpus, workers
from properties.checks import Finding
from properties.faults import CATALOGUE
from properties.generate import RandomSource, workload
from properties.killing import kills, outcome
from properties.matrix import FAMILY_OF, Matrix, Row
from properties.sampled import RUNGS_WITH_A_SAMPLER, with_sampling

GENERATED: Mapping[str, int] = {
    "ledger": 40,
    "rows": 30,
    "staged": 30,
    "tiny": 10,
    "native": 10,
    "wire": 10,
}  # workloads a row; slower rungs get fewer
SEEDS: Mapping[str, int] = {
    "ledger": 5,
    "rows": 5,
    "staged": 5,
    "tiny": 3,
    "native": 3,
    "wire": 5,
}  # hunts for each fault
BOUND: Mapping[str, int] = {
    "ledger": 4000,
    "rows": 2000,
    "staged": 2000,
    "tiny": 500,
    "native": 500,
    "wire": 500,
}  # until a seed gives up

Progress = Callable[[int, int, str], None]
_Task = tuple[str | None, str, int | None, int | None]


def sample(count: int, rung: str = "ledger") -> list[Workload]:
    """Generated workloads, the same ones every time."""
    made = [workload(RandomSource(f"matrix {number}")) for number in range(count)]
    return [with_sampling(w) for w in made] if rung in RUNGS_WITH_A_SAMPLER else made


def digest(count: int = max(GENERATED.values())) -> str:
    """Names the sample: it changes exactly when the generator makes other workloads."""
    return hashlib.sha256("".join(w.digest() for w in sample(count)).encode()).hexdigest()[:16]


def matrix(faults: Iterable[str], *, generated: int | None = None, seeds: int | None = None, jobs: int = 1) -> Matrix:
    """The rows of ``faults``; see ``rows``."""
    return Matrix(tuple(rows(faults, generated=generated, seeds=seeds, jobs=jobs)), digest())


def rows(
    faults: Iterable[str],
    *,
    generated: int | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Rows for ``faults`` as they are made, those without a fault first, one for each rung among them.

    ``generated``: workloads a row beside the corpus. ``seeds``: hunts for each fault. None takes each rung's own number.
    """
    listed = list(faults)
    rungs = sorted({CATALOGUE[fault].rung for fault in listed} or {"ledger"})
    tasks: list[_Task] = [(None, rung, generated, 0) for rung in rungs]
    tasks += [(fault, CATALOGUE[fault].rung, generated, seeds) for fault in listed]
    with ExitStack() as stack:
        made: Iterator[Row] = map(_task, tasks)
        if jobs > 1:
            made = stack.enter_context(workers.pool(jobs)).map(_task, tasks)
        for number, row in enumerate(made, 1):
            if progress is not None:
                progress(number, len(tasks), row.fault or f"no fault on {row.rung}")
            yield row


def _task(task: _Task) -> Row:
    return make_row(*task)


def make_row(fault: str | None, rung: str, generated: int | None = None, seeds: int | None = None) -> Row:
    saved = {name: w for name, w in corpus.workloads().items() if corpus.rung_of(w) == rung}
    candidates = {name: w for name, w in saved.items() if fault in (None, w.fault)}  # without a fault the whole corpus
    count = GENERATED[rung] if generated is None else generated
    candidates |= {f"generated {number}": w for number, w in enumerate(sample(count, rung))}
    need = CATALOGUE[fault].needs if fault is not None else ""
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("fired", "first", "proof", "family")}
    witnesses, blind, reached = 0, [], 0
    for name, candidate in candidates.items():
        ran = outcome(candidate, fault, judge_all=True, rung=rung)
        reached += not need or ran.occurred[need] > 0
        _count(counts, ran.findings)
        if fault is not None and candidate.fault == fault:
            witnesses += 1
            if not ran.findings:
                blind.append(name)
    hunts = SEEDS[rung] if seeds is None else seeds
    found = [] if fault is None else kills(fault, range(hunts), workloads=BOUND[rung])
    cells = {name: dict(sorted(counted.items())) for name, counted in counts.items()}
    return Row(
        fault,
        rung,
        workloads=len(candidates),
        reached=reached,
        witnesses=witnesses,
        blind=blind,
        kills=[None if kill is None else kill.workloads for kill in found],
        **cells,
    )


def _count(counts: Mapping[str, Counter[str]], findings: Iterable[Finding]) -> None:
    """``findings``: the first of each check, in order of iteration."""
    listed = list(findings)
    counts["fired"].update(found.check for found in listed)
    if listed:
        counts["first"][listed[0].check] += 1
    earliest: dict[str, int] = {}  # by family
    for found in listed:
        earliest.setdefault(FAMILY_OF[found.check], found.iteration)
    for found in listed:
        siblings = [o for o in listed if o is not found and FAMILY_OF[o.check] == FAMILY_OF[found.check]]
        if all(found.iteration < sibling.iteration for sibling in siblings):
            counts["proof"][found.check] += 1
    for family, iteration in earliest.items():
        if all(iteration < other for name, other in earliest.items() if name != family):
            counts["family"][family] += 1
