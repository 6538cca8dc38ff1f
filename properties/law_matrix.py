"""The laws' part of the kill matrix as a value: every fault against every law, each law judged alone.

A cell is the iteration, from 1, in which the law's changed run first told a request something else; no cell, no difference.
Laws run on the real kernels, over one small list of requests, so a row has one entry a law where the other families count
workloads. It is stricter here than in the other families: a law is useless unless some fault is seen by it *alone*, since
iterations of runs whose settings differ are no common clock. ``properties.law_cells`` fills the cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import attrs

from engine.request import SamplingParams
from properties.faults import CATALOGUE
from properties.law_faults import LAW_FAULTS
from properties.law_play import Ask, draw_asks
from properties.laws import LAWS

SEED = 47  # of a list in which every law has something to change: test_law_matrix.py asks for it


def requests() -> list[Ask]:
    """The list that the cells are computed from, for a vocabulary of 512 ids."""
    return draw_asks(SEED, ids=(3, 500))


def digest() -> str:
    """Names the list: it changes exactly when the generator makes another one."""
    plain, names = SamplingParams(), sorted(attrs.fields_dict(SamplingParams))
    told = [
        (ask.prompt, ask.at, [(n, v) for n in names if (v := getattr(ask.params, n)) != getattr(plain, n)])
        for ask in requests()
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


@attrs.frozen
class LawRow:
    """``seen``: law to iteration. ``base``: what the unchanged run raised; then no law was asked. ``elsewhere``: the checks of
    lockstep that fired on the tiny rung, and in how many workloads, for faults that were run there too; else None."""

    fault: str | None
    seen: dict[str, int] = attrs.field(factory=dict)
    base: str = ""
    elsewhere: dict[str, int] | None = None

    @property
    def alone(self) -> str | None:
        """The one law that sees it; None when several do, or none."""
        return next(iter(self.seen)) if len(self.seen) == 1 else None

    def without(self, law: str) -> LawRow:
        return attrs.evolve(self, seen={name: at for name, at in self.seen.items() if name != law})


def proofs(rows: Iterable[LawRow], law: str) -> list[str]:
    """The faults that this law alone sees."""
    return [row.fault for row in rows if row.fault is not None and row.alone == law]


def family_proofs(rows: Iterable[LawRow]) -> list[str]:
    """The laws' own faults that lockstep on the same kernels does not see, of those that were run there."""
    return [str(row.fault) for row in rows if row.fault in LAW_FAULTS and row.seen and row.elsewhere == {}]


def complaints(rows: Iterable[LawRow], *, whole: bool = True) -> list[str]:
    """Why the laws' part of the matrix fails; empty when it holds. Only the ``whole`` of it can show that a law is useless."""
    listed = list(rows)
    said = [complaint for row in listed for complaint in _of_row(row)]
    if whole:
        present = {row.fault for row in listed}
        said += [f"the laws: {fault} has no row" for fault in LAW_FAULTS if fault not in present]
        if None not in present:
            said.append("the laws were not held without a fault")
        said += [f"the law {law} is useless: no fault is seen by it alone" for law in LAWS if not proofs(listed, law)]
        if not family_proofs(listed):
            said.append("the family laws is useless: no fault is seen by it alone")
    return said


def _of_row(row: LawRow) -> Iterable[str]:
    if row.fault is None:
        yield from (f"without a fault, the law {law} is broken at iteration {at}" for law, at in row.seen.items())
        yield from [f"without a fault, the laws' unchanged run raises: {row.base}"] if row.base else []
        return
    if row.fault in LAW_FAULTS:
        yield from [f"{row.fault} lets the laws' unchanged run raise: {row.base}"] if row.base else []
        expected = LAW_FAULTS[row.fault].expect
        yield from (f"{row.fault} is not seen by the law {law}" for law in expected if law not in row.seen)
    elif row.fault not in CATALOGUE:  # whose faults may be asked for, but nothing is expected of the laws there
        yield f"the laws: {row.fault} is in no catalogue"
