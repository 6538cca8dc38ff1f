"""The kill matrix as a value: every fault against every check, each check judged alone, and what the cells must show.

A matrix fails when an engine without a fault is not clean; when a fault is seen by nobody, or not by a check that must see it;
when its witness holds although it is armed; and when a check is useless. A check earns its place within its family: some
fault is seen by it alone, or in an earlier iteration than by its siblings. A family earns its place among the families in
the same way. All of it is computed from cells, so that it can be asked of the stored ones what happens without a check.

``properties.matrix_run`` fills the cells, ``properties.matrix_page`` writes them down. The laws have faults, rows and cells of
their own kind: see ``properties.law_matrix``.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from properties import law_matrix
from properties.checks import ORDER
from properties.faults import CANARY, CATALOGUE, Fault
from properties.law_matrix import LawRow

STORED = Path(__file__).parent.parent / "ci" / "matrix.json"

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "audit": ("raises", "audit"),  # what the engine says about itself
    "model diff": ("decisions", "ledger", "rows", "replay", "tokens", "counters"),
    "write set": ("writes",),
    "solo": ("solo", "text", "stream", "drain"),  # what callers are told, and that there is an end
}
FAMILY_OF: Mapping[str, str] = {check: name for name, checks in FAMILIES.items() for check in checks}


@attrs.frozen
class Row:
    """One fault on its rung, or (``fault`` None) the engine as it is. All counts are of workloads.

    ``fired``: the check fired. ``first``: no other fired earlier; of those that tie, the one that is reported. ``proof``: no
    sibling in its family fired, or only later. ``family``: the same of a whole family. ``reached``: what the fault needs
    occurred. ``kills``: how many numbered workloads until the first that failed, one entry a seed; None beyond the bound.
    """

    fault: str | None
    rung: str
    workloads: int = 0
    reached: int = 0
    fired: dict[str, int] = attrs.field(factory=dict)
    first: dict[str, int] = attrs.field(factory=dict)
    proof: dict[str, int] = attrs.field(factory=dict)
    family: dict[str, int] = attrs.field(factory=dict)
    witnesses: int = 0
    blind: list[str] = attrs.field(factory=list)  # witnesses that hold although the fault is armed
    kills: list[int | None] = attrs.field(factory=list)

    @property
    def median(self) -> float:
        return statistics.median(math.inf if kill is None else kill for kill in self.kills) if self.kills else math.inf

    def without(self, check: str) -> Row:
        """The row as it would be if nobody looked with this check. (Its family keeps what siblings saw; so this is lenient.)"""
        fired, first, proof = (
            {name: count for name, count in cells.items() if name != check}
            for cells in (self.fired, self.first, self.proof)
        )
        return attrs.evolve(self, fired=fired, first=first, proof=proof)


@attrs.frozen
class Matrix:
    """``sample``: digest of the generated workloads, so that a stored matrix knows whether it was made from the same ones.
    ``laws``: the rows of the laws, and ``requests`` the digest of the list that they were held against."""

    rows: tuple[Row, ...]
    sample: str = ""
    laws: tuple[LawRow, ...] = ()
    requests: str = ""

    @property
    def armed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.fault is not None)

    def row(self, fault: str) -> Row:
        return next(row for row in self.rows if row.fault == fault)

    def without(self, check: str) -> Matrix:
        return attrs.evolve(self, rows=tuple(row.without(check) for row in self.rows))

    def without_law(self, law: str) -> Matrix:
        return attrs.evolve(self, laws=tuple(row.without(law) for row in self.laws))

    def replaced(self, newer: Matrix) -> Matrix:
        """These rows, those of ``newer`` in their places or added."""
        rows = {(row.rung, row.fault): row for row in (*self.rows, *newer.rows)}
        laws = {row.fault: row for row in (*self.laws, *newer.laws)}
        ordered = sorted(laws.values(), key=lambda row: (row.fault is not None, row.fault or ""))
        requests = newer.requests or self.requests
        return Matrix(tuple(sorted(rows.values(), key=_place)), newer.sample or self.sample, tuple(ordered), requests)

    def hardest(self, count: int = 3) -> list[Row]:
        return sorted(self.armed, key=lambda row: (-row.median, str(row.fault)))[:count]

    def proofs(self, check: str) -> list[str]:
        """The faults that this check sees and its siblings see later or never. The canary proves nothing."""
        return [str(row.fault) for row in self.armed if row.fault != CANARY and row.proof.get(check)]

    def family_proofs(self, family: str) -> list[str]:
        return [str(row.fault) for row in self.armed if row.fault != CANARY and row.family.get(family)]

    def complaints(self, *, whole: bool = True, catalogue: Mapping[str, Fault] = CATALOGUE) -> list[str]:
        """Why the matrix fails; empty when it holds. Only the ``whole`` catalogue can show that a check is useless."""
        said: list[str] = []
        for row in self.rows:
            if row.fault is None:
                said += [
                    f"without a fault, {c} fires in {n} workloads on {row.rung}" for c, n in row.fired.items() if n
                ]
            elif row.fault not in catalogue:
                said.append(f"{row.fault} is in no catalogue")
            else:
                said += _row_complaints(row, catalogue[row.fault])
        if whole:
            present = {row.fault for row in self.armed}
            said += [f"{fault} has no row" for fault in catalogue if fault not in present]
            said += [
                f"{check} is useless: no fault is seen by it alone or first in the family {FAMILY_OF[check]}"
                for check in ORDER
                if not self.proofs(check)
            ]
            said += [
                f"the family {family} is useless: no fault is seen by it alone or first"
                for family in FAMILIES
                if not self.family_proofs(family)
            ]
        return said + law_matrix.complaints(self.laws, whole=whole)

    # The file --------------------------------------------------------------------------------------------------------

    def dumps(self) -> str:
        """One row a line, so that a change shows as the rows it changes."""
        rows, laws = (
            ",\n  ".join(json.dumps(_without_empty(attrs.asdict(row))) for row in part)
            for part in (self.rows, self.laws)
        )
        heads = f'"sample": {json.dumps(self.sample)},\n "requests": {json.dumps(self.requests)}'
        return f'{{{heads},\n "rows": [\n  {rows}],\n "laws": [\n  {laws}]}}\n'

    @classmethod
    def loads(cls, text: str) -> Matrix:
        document = json.loads(text)
        laws = tuple(LawRow(**row) for row in document.get("laws", ()))
        return cls(
            tuple(Row(**row) for row in document["rows"]), document["sample"], laws, document.get("requests", "")
        )


def stored() -> Matrix:
    """The cells of the last whole run. Raises ``OSError`` when there are none."""
    return Matrix.loads(STORED.read_text(encoding="utf-8"))


def _place(row: Row) -> tuple[bool, str, str]:
    return row.fault is not None, row.fault or "", row.rung


def _row_complaints(row: Row, fault: Fault) -> list[str]:
    said: list[str] = []
    if not any(row.fired.values()):
        reached = f"reached in {row.reached} workloads and seen by nobody" if row.reached else "never reached"
        said.append(f"{fault.id} was {reached} (it needs: {fault.needs or 'nothing special'})")
    said += [f"{fault.id} is not seen by {check}" for check in fault.expect if not row.fired.get(check)]
    if not row.witnesses:
        said.append(f"{fault.id} has no witness in properties/regress")
    said += [f"{fault.id}: {name} holds although the fault is armed" for name in row.blind]
    if row.kills and all(kill is None for kill in row.kills):
        said.append(f"{fault.id} is found by no generated workload")
    if row.rung != fault.rung:
        said.append(f"{fault.id} was run on {row.rung}, but belongs on {fault.rung}")
    return said


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    kept = ("fault", "rung") if values.get("elsewhere") is None else ("fault", "rung", "elsewhere")
    return {name: value for name, value in values.items() if value or name in kept}
