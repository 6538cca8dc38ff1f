"""The commands about faults: ``matrix`` asks which check sees which fault, ``faults`` hunts each of them as a person would."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from engine.trace import save
from properties import corpus, fault_table, law_matrix, matrix_page
from properties.checks import ORDER
from properties.faults import CATALOGUE
from properties.killing import first_kill, reduced
from properties.law_commands import law_fault
from properties.law_faults import LAW_FAULTS, any_fault
from properties.law_matrix import LawRow
from properties.laws import LAWS
from properties.matrix import Matrix, Row, stored
from properties.matrix_run import digest, rows
from properties.options import Names
from properties.options import fault as fault_id

Options = argparse.Namespace
HOLDS, VIOLATED = 0, 1


def show_matrix(options: Options) -> int:
    """Runs the whole matrix and writes it down, or some rows, or judges the stored cells without running anything.

    The cells are written as they come, so that a run that was cut short is taken up with ``--missing``.
    """
    result = stored() if options.stored else _kept(options)
    writes = not options.stored and (options.missing or not options.only)
    shown: list[Row] = []
    law_shown: list[LawRow] = []
    for row in () if options.stored else _made(options, result):
        (shown if isinstance(row, Row) else law_shown).append(row)  # type: ignore[arg-type]
        new = Matrix((row,), result.sample) if isinstance(row, Row) else Matrix((), "", (row,), law_matrix.digest())
        result = result.replaced(new)
        if writes and (len(shown) + len(law_shown)) % 10 == 0:
            _write_matrix(result, options.output)
    if writes:
        _write_matrix(result, options.output)
    whole = options.stored or writes
    complaints = result.complaints(whole=whole)
    if options.json:
        told = [_plain(row) for row in (shown if options.only else result.rows)]
        laws = [attrs.asdict(row) for row in (law_shown if options.only else result.laws)]
        _print_json({"holds": not complaints, "complaints": complaints, "rows": told, "laws": laws})
        return VIOLATED if complaints else HOLDS
    if options.only:
        print("\n\n".join([*map(_block, shown), *map(_law_block, law_shown)]))
    if whole:
        print("\n".join([*matrix_page.totals(result), matrix_page.law_totals(result.laws)]))
    for complaint in complaints:
        print(f"MATRIX: {complaint}")
    return VIOLATED if complaints else HOLDS


def _made(options: Options, kept: Matrix) -> Iterator[Row | LawRow]:
    """The rows that the options ask for, those of lockstep first."""
    had, had_laws = {row.fault for row in kept.rows}, {row.fault for row in kept.laws}
    chosen = [fault for fault in CATALOGUE if fault not in had]
    for_laws: list[str | None] = [fault for fault in (None, *LAW_FAULTS) if fault not in had_laws]
    if options.only:
        chosen = [fault for fault in options.only if fault in CATALOGUE]
        for_laws = [None, *(fault for fault in options.only if options.laws or fault in LAW_FAULTS)]
    cores = options.jobs or len(os.sched_getaffinity(0))
    if chosen and not options.laws:
        jobs = min(cores, len(chosen))
        yield from rows(chosen, generated=options.workloads, seeds=options.seeds, jobs=jobs, progress=_told)
    if for_laws and for_laws != [None]:
        from properties.law_cells import law_rows  # imports torch

        yield from law_rows(for_laws, jobs=min(cores, len(for_laws)), progress=_told)


def _kept(options: Options) -> Matrix:
    """What is not run again: with ``--laws`` the other rows; with ``--missing`` all stored rows that are of today's catalogues,
    unless the generators make other workloads and requests by now."""
    file = options.output / "matrix.json"
    if not (options.missing or options.laws) or not file.exists():
        return Matrix((), digest())
    cells = Matrix.loads(file.read_text(encoding="utf-8"))
    kept = tuple(row for row in cells.rows if row.fault is None or row.fault in CATALOGUE)
    if not options.laws and cells.sample != digest():
        kept = ()
    laws = tuple(row for row in cells.laws if options.missing and (row.fault is None or row.fault in LAW_FAULTS))
    if laws and cells.requests != law_matrix.digest():
        laws = ()
    return Matrix(kept, cells.sample if kept else digest(), laws, cells.requests if laws else "")


def _write_matrix(result: Matrix, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "matrix.json").write_text(result.dumps(), encoding="utf-8")
    (folder / "matrix.md").write_text(matrix_page.page(result), encoding="utf-8")


def show_faults(options: Options) -> int:
    """Hunts every fault, or the chosen ones; the files stay in ``--found`` when one is named.

    The table is written line by line, so that a run that was cut short is taken up with ``--missing``.
    """
    if options.list:
        return _list(options)
    if options.witness:
        return _witnesses(options)
    file = options.output / "faults.json"
    lines = {line.fault: line for line in (fault_table.stored(file) if options.missing and file.exists() else [])}
    lines = {fault: line for fault, line in lines.items() if fault in CATALOGUE and not line.complaints()}
    chosen = options.only or [fault for fault in CATALOGUE if fault not in lines]
    with tempfile.TemporaryDirectory() as scratch:
        hunts = fault_table.hunt_each(
            chosen, options.found or Path(scratch), seed=options.seed, seconds=options.seconds, progress=_told
        )
        for line in hunts:
            lines[line.fault] = line
            if options.missing or not options.only:
                fault_table.write(list(lines.values()), options.output)
    shown = [line for line in lines.values() if line.fault in chosen] if options.only else list(lines.values())
    complaints = fault_table.complaints(shown)
    if options.json:
        _print_json(
            {"holds": not complaints, "complaints": complaints, "faults": [attrs.asdict(line) for line in shown]}
        )
        return VIOLATED if complaints else HOLDS
    print(fault_table.page(shown))
    for complaint in complaints:
        print(f"FAULTS: {complaint}")
    return VIOLATED if complaints else HOLDS


def _list(options: Options) -> int:
    """What the catalogue holds, or the chosen ones of it; nothing runs."""
    chosen = [CATALOGUE[name] for name in options.only or CATALOGUE]
    if options.json:
        _print_json([{"id": it.id, "rung": it.rung, "area": it.area, "title": it.title} for it in chosen])
        return HOLDS
    wide = max(len(it.area) for it in chosen)
    print("\n".join(f"{it.id:4} {it.rung:7} {it.area:{wide}}  {it.title}" for it in chosen))
    return HOLDS


def _witnesses(options: Options) -> int:
    """Saves a shrunk workload for each fault that has none in properties/regress, seen by a check that must see the fault."""
    had = {workload.fault for workload in corpus.workloads().values()}
    missing = 0
    for fault in options.only or [fault for fault in CATALOGUE if fault not in had]:
        for seed in range(options.seed, options.seed + 4):
            kill = first_kill(fault, seed, seconds=options.seconds)
            if kill is None:
                continue
            small, found, _ = reduced(kill, fault)
            if found.check in CATALOGUE[fault].expect:
                told: Mapping[str, str | int] = {"check": found.check, "iteration": found.iteration}
                path = corpus.witness_path(fault)
                save(small.titled(CATALOGUE[fault].title, fault=fault, found=told), path)
                print(f"{fault}: {path}, {len(small.events)} events")
                break
        else:
            missing += 1
            print(f"{fault}: nothing found that a check sees which must see it")
    return VIOLATED if missing else HOLDS


def _block(row: Row) -> str:
    """One row, for reading alone."""
    if row.fault is None:
        fires = ", ".join(f"{check} {count}" for check, count in row.fired.items()) or "no check fires"
        return f"without a fault, {row.workloads} workloads on {row.rung}: {fires}"
    fault = CATALOGUE[row.fault]
    cells = [f"{check} {text}" for check in ORDER if (text := matrix_page.cell(row, check))]
    kills = ", ".join("not found" if kill is None else str(kill) for kill in row.kills)
    return "\n".join(
        [
            f"{fault.id}  {fault.title}",
            f"    {fault.area}, on {row.rung}; source: {fault.source}; rules: {', '.join(fault.rules) or 'none'}",
            f"    fires in so many of {row.workloads} workloads, * must: {', '.join(cells) or 'nowhere'}",
            f"    what it needs ({fault.needs or 'nothing special'}) occurred in {row.reached}; witnesses: {row.witnesses}",
            *([f"    workloads until the hunter fails, by seed: {kills}"] if kills else []),
        ]
    )


def _law_block(row: LawRow) -> str:
    """One row of the laws, for reading alone."""
    cells = ", ".join(f"{law} {text}" for law in LAWS if (text := matrix_page.law_cell(row, law)))
    if row.fault is None:
        return f"without a fault: {cells or 'every law holds'}"
    lines = [
        f"{row.fault}  {any_fault(row.fault).title}",
        f"    broken laws and the iteration in which each shows, * must: {cells or row.base or 'none'}",
    ]
    if row.elsewhere is not None:
        seen = ", ".join(f"{check} {count}" for check, count in row.elsewhere.items())
        lines.append(f"    in lockstep on the tiny rung, checks and workloads: {seen or 'nobody sees it'}")
    return "\n".join(lines)


def _plain(row: Row) -> dict[str, Any]:
    fault = CATALOGUE.get(str(row.fault))
    told = {} if fault is None else {"title": fault.title, "expect": list(fault.expect), "source": fault.source}
    return {**attrs.asdict(row), **told}


def _told(number: int, total: int, name: str) -> None:
    """On stderr, rewritten in place; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        end = "\n" if number == total else ""
        print(f"\r{number} of {total}: {name:20}\x1b[K", end=end, file=sys.stderr, flush=True)


def _print_json(payload: Any) -> None:
    print(json.dumps(payload, indent=1, default=str))


def add_commands(
    command: Callable[[str, Callable[..., int], str, str], argparse.ArgumentParser], at_least: Any
) -> None:
    """Both commands; ``command`` makes one from (name, run, text, example), ``at_least`` reads a bounded integer."""
    grid = command(
        "matrix",
        show_matrix,
        "Arm every fault in turn and count which checks see it, each judged alone, and which laws; fail on an unseen fault or "
        "a useless check or law. Writes matrix.json and matrix.md.",
        "matrix --only A05",
    )
    table = command(
        "faults",
        show_faults,
        "Hunt every fault of the catalogue: search, shrink, save, replay. Writes faults.json and faults.md.",
        "faults --only A05",
    )
    for made, known in ((grid, law_fault), (table, fault_id)):
        made.add_argument("--only", metavar="FAULT", action=Names, known=known, help="some; then nothing is written")
        made.add_argument("--output", metavar="DIR", type=Path, default=Path("ci"), help="where it is written (ci)")
    grid.add_argument(
        "--workloads",
        metavar="N",
        type=at_least(0),
        help="generated workloads a row (default: by the speed of the rung)",
    )
    grid.add_argument(
        "--seeds", metavar="N", type=at_least(0), help="hunts for each fault (default 5, tiny 3); 0: none"
    )
    grid.add_argument("--jobs", metavar="J", type=at_least(1), help="processes (default: one a core)")
    grid.add_argument("--missing", action="store_true", help="keep the rows that are stored; with --only: add to them")
    grid.add_argument(
        "--laws", action="store_true", help="run the laws' rows only, and keep the others that are stored"
    )
    grid.add_argument("--stored", action="store_true", help="judge the cells of the last whole run; run nothing")
    table.add_argument("--seconds", metavar="S", type=float, default=fault_table.SECONDS, help="for each fault (60)")
    table.add_argument("--seed", metavar="S", type=at_least(0), default=1, help="the same seed runs the same workloads")
    table.add_argument("--found", metavar="DIR", type=Path, help="keep the files there (default: nowhere)")
    table.add_argument(
        "--missing", action="store_true", help="keep the lines that hold already; with --only: add to them"
    )
    table.add_argument("--witness", action="store_true", help="save witnesses for faults without one, and nothing else")
    table.add_argument("--list", action="store_true", help="print id, rung, area and title of each; hunt nothing")
