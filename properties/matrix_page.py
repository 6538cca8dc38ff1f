"""The kill matrix written down for people: ci/matrix.md, one line a fault, and the totals that the command prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from properties.arming import AREAS, OUTSIDER
from properties.checks import ORDER
from properties.faults import CATALOGUE
from properties.matrix import FAMILIES, Matrix, Row


def page(matrix: Matrix) -> str:
    return "\n".join(_lines(matrix)) + "\n"


def totals(matrix: Matrix) -> list[str]:
    """What was armed, where it comes from, and which faults are hardest to find."""
    faults = [CATALOGUE[row.fault] for row in matrix.armed if row.fault in CATALOGUE]
    areas = Counter(fault.area for fault in faults)
    public = sum(fault.public for fault in faults)
    outsiders = sum(fault.source == OUTSIDER for fault in faults)
    rungs = Counter(row.rung for row in matrix.armed)
    cells = sum(1 for row in matrix.armed for count in row.fired.values() if count)
    return [
        f"{len(faults)} faults: {public} from public reports, {outsiders} by an outsider, "
        f"{len(faults) - public - outsiders} our own; {cells} cells in which a check fires, "
        f"{sum(len(fault.expect) for fault in faults)} of them expected",
        "by area: " + ", ".join(f"{area} {areas[area]}" for area in AREAS if areas[area]),
        "by rung: " + ", ".join(f"{rung} {count}" for rung, count in sorted(rungs.items())),
        "hardest to find (median workloads of the plain hunter): "
        + "; ".join(
            f"{row.fault} {_number(row.median)} ({CATALOGUE[str(row.fault)].title})" for row in matrix.hardest()
        ),
    ]


def cell(row: Row, check: str) -> str:
    """Workloads in which the check fired, judged alone. ``*`` must fire; ``0!`` must and did not."""
    expected = row.fault in CATALOGUE and check in CATALOGUE[str(row.fault)].expect
    times = row.fired.get(check, 0)
    if expected:
        return f"{times}*" if times else "0!"
    return str(times) if times else ""


def _lines(matrix: Matrix) -> Iterator[str]:
    yield "# Faults x checks"
    yield ""
    yield "Written by `python -m properties matrix`; ci/matrix.json holds the same cells. A cell counts the workloads in"
    yield "which the check fired, judged alone, to the end of the run; `*` marks what must fire. *of*: workloads that ran."
    yield "*first*: the check that most often fired before all others. *kill*: workloads until the plain hunter fails,"
    yield "median over seeds. Sources are public reports, `own`, or `outsider`: somebody who had not seen the harness."
    yield ""
    yield from (f"- {line}" for line in totals(matrix))
    checks = [check for check in ORDER if any(row.fired.get(check) for row in matrix.rows)]
    rows = [row for row in matrix.rows if row.fault is None]
    yield from _table("Without a fault", rows, checks)
    for area in (*AREAS, "plumbing"):
        rows = [row for row in matrix.armed if row.fault in CATALOGUE and CATALOGUE[row.fault].area == area]
        if rows:
            yield from _table(area.capitalize(), rows, checks)
    yield from ("", "## What each check is for", "")
    yield "A check earns its place in its family by the faults that it sees alone or in an earlier iteration than its siblings."
    yield "A family earns its place in the same way."
    yield from ("", "| family | faults | check | faults |", "|---|---|---|---|")
    for family, members in FAMILIES.items():
        for number, check in enumerate(members):
            mine = _some(matrix.family_proofs(family)) if number == 0 else ""
            yield f"| {family if number == 0 else ''} | {mine} | {check} | {_some(matrix.proofs(check))} |"


def _table(title: str, rows: list[Row], checks: list[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield "| fault | what is wrong | rung | of | " + " | ".join(checks) + " | first | kill | source |"
    yield "|---|---|---|--:|" + "--:|" * len(checks) + "---|--:|---|"
    for row in rows:
        fault = CATALOGUE.get(str(row.fault))
        named = [row.fault or "none", fault.title if fault else "the engine as it is", row.rung, str(row.workloads)]
        told = [_first(row), _number(row.median) if row.kills else "", fault.source if fault else ""]
        yield "| " + " | ".join([*named, *(cell(row, check) for check in checks), *told]) + " |"


def _first(row: Row) -> str:
    return max(row.first, key=lambda check: (row.first[check], -ORDER.index(check)), default="")


def _number(median: float) -> str:
    return "not found" if math.isinf(median) else f"{median:g}"


def _some(faults: list[str], most: int = 6) -> str:
    return f"{len(faults)}: {', '.join(faults[:most])}{', ...' if len(faults) > most else ''}"
