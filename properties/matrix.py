"""The kill matrix: every fault against every check, each check judged alone.

It fails when the engine without a fault is not clean, when a fault is not seen by a check that must see it, when a fault's
witness does not fail, and when a check is useless: no fault is seen by it alone, or earlier than by every other check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import attrs

from engine.trace import Workload
from properties import corpus
from properties.checks import ON_LEDGER
from properties.faults import CATALOGUE, armed
from properties.generate import RandomSource, workload
from properties.lockstep import Run, run

Progress = Callable[[int, int, str], None]


@attrs.define
class Row:
    """``fired[check]``: in how many workloads it fired. ``alone`` and ``earlier``: where no other check fired, or only later."""

    fault: str | None
    workloads: int = 0
    fired: Counter[str] = attrs.field(factory=Counter)
    alone: Counter[str] = attrs.field(factory=Counter)
    earlier: Counter[str] = attrs.field(factory=Counter)
    witnesses: int = 0
    witnessed: bool = False

    def add(self, outcome: Run) -> None:
        self.workloads += 1
        findings = outcome.findings
        self.fired.update(found.check for found in findings)
        if len(findings) == 1:
            self.alone[findings[0].check] += 1
        elif findings and findings[0].iteration < findings[1].iteration:
            self.earlier[findings[0].check] += 1


@attrs.frozen
class Matrix:
    rows: tuple[Row, ...]

    def complaints(self, *, whole: bool = True) -> list[str]:
        """Why the matrix fails; empty when it holds. Useless checks can only be told from the whole catalogue."""
        said: list[str] = []
        for row in self.rows:
            if row.fault is None:
                said += [f"without a fault, {check} fires in {times} workloads" for check, times in row.fired.items()]
                continue
            said += [f"{row.fault} is not seen by {c}" for c in CATALOGUE[row.fault].expect if not row.fired[c]]
            if not row.witnesses:
                said.append(f"{row.fault} has no witness in properties/regress")
            elif not row.witnessed:
                said.append(f"{row.fault}: its witness holds although the fault is armed")
        if whole:
            said += [f"{check} is useless: no fault is seen by it alone or first" for check in self.useless()]
        return said

    def useless(self) -> list[str]:
        """The matrix runs on the ledger rung, so what needs a cache is not judged here."""
        return [check for check in ON_LEDGER if not self.proofs(check)]

    def proofs(self, check: str) -> list[str]:
        """The faults that this check sees alone, or in an earlier iteration than every other. The canary proves nothing."""
        rows = [row for row in self.rows if row.fault not in (None, "Z00")]
        return [str(row.fault) for row in rows if row.alone[check] or row.earlier[check]]


def sample(count: int) -> list[Workload]:
    """Generated workloads, the same ones every time."""
    return [workload(RandomSource(f"matrix {number}")) for number in range(count)]


def matrix(
    faults: Iterable[str],
    generated: int = 40,
    progress: Progress | None = None,
    saved: Mapping[str, Workload] | None = None,
) -> Matrix:
    """Runs corpus and sample once without a fault and once with each of ``faults``."""
    listed = [None, *faults]
    kept = list((corpus.workloads() if saved is None else saved).values())
    rows = []
    for number, fault in enumerate(listed):
        if progress is not None:
            progress(number, len(listed), fault or "no fault")
        row = Row(fault)
        for candidate in (*kept, *sample(generated)):
            with armed(fault):
                outcome = run(candidate, judge_all=True)
            row.add(outcome)
            if fault is not None and candidate.fault == fault:
                row.witnesses += 1
                row.witnessed = row.witnessed or bool(outcome.findings)
        rows.append(row)
    return Matrix(tuple(rows))
