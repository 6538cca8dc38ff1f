"""Every fault of recorded graphs, padding and batch rows, hunted on the rungs that run production code down to the kernels.

The faults are those of the catalogue's area "graph replay", save the native tape's own, and those that re-create public reports
about graphs, padded rows and rows that move (ci/public_faults.md tells which report is which fault). Each must be killed on
``rows``, on ``tiny`` and, since a GPU reads a copy of its inputs, on ``staged``, save where a rung cannot hold what it breaks;
then the reason is written here, and another kills it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from properties.faults import CATALOGUE
from properties.killing import numbered, outcome

Progress = Callable[[int, int, str], None]
RUNGS = ("rows", "tiny", "staged")
REPORTED: Mapping[str, str] = {
    "N01": "B036",
    "N02": "B036",
    "N03": "B037",
    "N04": "B037",
    "N06": "B037",
    "N42": "B039",
    "L08": "B040",
    "N31": "B042",
    "L02": "B043",
    "S23": "B045",
    "N07": "B049",
    "N11": "B051",
    "N18": "B051",
}
BEYOND: Mapping[tuple[str, str], str] = {
    ("N42", "rows"): "it computes no attention",
    ("N42", "staged"): "it computes no attention",
    **{(fault, rung): "nothing is copied" for fault in ("N65", "N66") for rung in ("rows", "tiny")},
}
BOUND: Mapping[str, int] = {"rows": 600, "tiny": 300, "staged": 600}  # workloads until a hunt gives up
STORED = Path(__file__).parents[1] / "ci" / "graph_faults.md"
COMMAND = "python -m properties graph-faults --output ci/graph_faults.md"


def chosen() -> list[str]:
    """The faults of the table."""
    return sorted(
        {fault.id for fault in CATALOGUE.values() if fault.area == "graph replay" and fault.rung != "native"}
        | set(REPORTED)
    )


@attrs.frozen
class Hunted:
    """One fault on one rung. ``workloads``: how many ran, the one that failed included. ``check`` is None where none did."""

    fault: str
    rung: str
    workloads: int
    check: str | None
    iteration: int | None = None

    def complaints(self) -> list[str]:
        if self.check is not None or (self.fault, self.rung) in BEYOND:
            return []
        return [f"{self.fault} is not killed on {self.rung} in {self.workloads} workloads"]


def hunt(fault: str, rung: str, *, seed: int = 1, bound: int | None = None) -> Hunted:
    workloads = BOUND[rung] if bound is None else bound
    for number in range(workloads):
        found = outcome(numbered(rung, seed, number), fault, rung=rung).first
        if found is not None:
            return Hunted(fault, rung, number + 1, found.check, found.iteration)
    return Hunted(fault, rung, workloads, None)


def hunts(faults: Iterable[str], progress: Progress | None = None) -> Iterator[Hunted]:
    """Each fault on each rung that can hold it. ``progress`` is told the number of a hunt, of how many, and which, before it."""
    asked = [(fault, rung) for fault in faults for rung in RUNGS if (fault, rung) not in BEYOND]
    for number, (fault, rung) in enumerate(asked, 1):
        if progress is not None:
            progress(number, len(asked), f"{fault} on {rung}")
        yield hunt(fault, rung)


def complaints(listed: Sequence[Hunted]) -> list[str]:
    """Why the table fails: a fault that lives, or one that no rung was asked about."""
    said = [complaint for line in listed for complaint in line.complaints()]
    killed = {line.fault for line in listed if line.check is not None}
    said += [f"{fault} is killed on no rung" for fault in sorted({line.fault for line in listed} - killed)]
    return said


def page(listed: Sequence[Hunted]) -> str:
    """The table, in Markdown: one line a fault. One of some faults says so."""
    some, every = len({line.fault for line in listed}), len(chosen())
    told = [
        "# Faults of recorded graphs, padding and rows" + (f": {some} of {every}" if some < every else ""),
        "",
        f"{_origin(some, every)}. Each fault is armed alone and hunted with generated workloads on these rungs;",
        "told are the check that saw it first, and after how many workloads.",
        "",
        f"| fault | report | what is wrong | {' | '.join(RUNGS)} |",
        "|---|---|---|" + "---|" * len(RUNGS),
    ]
    lines = {(line.fault, line.rung): line for line in listed}
    for fault in sorted({line.fault for line in listed}):
        cells = [_cell(lines.get((fault, rung)), fault, rung) for rung in RUNGS]
        told.append(f"| {fault} | {REPORTED.get(fault, '')} | {CATALOGUE[fault].title} | {' | '.join(cells)} |")
    return "\n".join(told) + "\n"


def _origin(some: int, every: int) -> str:
    return f"Written by `{COMMAND}`" if some == every else f"Part of the table that `{COMMAND}` writes"


def _cell(line: Hunted | None, fault: str, rung: str) -> str:
    if line is None:
        return BEYOND[fault, rung]
    return "**lives**" if line.check is None else f"{line.check}, {line.workloads}"
