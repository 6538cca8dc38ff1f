"""The kill matrix written down for people: ci/matrix.md, one line a fault, and the totals that the command prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from properties.arming import AREAS, OUTSIDER
from properties.checks import ORDER
from properties.faults import CATALOGUE
from properties.law_faults import LAW_FAULTS, any_fault
from properties.law_matrix import LawRow, family_proofs, proofs
from properties.laws import LAWS
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
    if matrix.laws:
        yield f"| laws | {_some(family_proofs(matrix.laws))} | each law | see below |"
        yield from _laws(matrix.laws)


def law_cell(row: LawRow, law: str) -> str:
    """The iteration of the first difference. ``*`` must be seen by this law; ``0!`` must and was not."""
    at = row.seen.get(law, 0)
    fault = LAW_FAULTS.get(str(row.fault))
    if fault is not None and law in fault.expect:
        return f"{at}*" if at else "0!"
    return str(at) if at else ""


def law_totals(rows: tuple[LawRow, ...]) -> str:
    armed = [row for row in rows if row.fault is not None]
    seen, alone = sum(bool(row.seen) for row in armed), sum(row.alone is not None for row in armed)
    return f"laws: {len(LAWS)} against {len(armed)} faults of their own, {seen} seen, {alone} of them by one law alone"


def _laws(rows: tuple[LawRow, ...]) -> Iterator[str]:
    yield from ("", "## Laws", "")
    yield "A law runs one list of requests again with one setting changed. A cell is the iteration in which a request was first"
    yield "told something else, each law judged alone; `*` marks what must be seen. *lockstep*: the checks that see the same"
    yield "fault on the tiny rung, for those that were run there too. A law earns its place by a fault that no other law sees."
    yield from ("", f"- {law_totals(rows)}", "")
    yield "| fault | what is wrong | " + " | ".join(LAWS) + " | lockstep |"
    yield "|---|---|" + "--:|" * len(LAWS) + "---|"
    for row in rows:
        title = "the engine as it is" if row.fault is None else any_fault(row.fault).title
        if row.base:
            title += "; the unchanged run raises"
        cells = [law_cell(row, law) for law in LAWS]
        told = "" if row.elsewhere is None else ", ".join(row.elsewhere) or "nobody"
        yield "| " + " | ".join([row.fault or "none", title, *cells, told]) + " |"
    yield from ("", "| law | a request is told the same | seen by it alone |", "|---|---|---|")
    for law in LAWS.values():
        yield f"| {law.name} | {law.change} | {_some(proofs(rows, law.name))} |"


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
