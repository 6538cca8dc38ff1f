"""The measurement on paper: the table on a terminal, and the document that --json writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from server.bench.offline import table
from server.bench.offline.limits import Limits
from server.bench.offline.quality import ALLOWED, GREEDY, Quality
from server.bench.offline.rounds import Outcome
from server.bench.offline.shares import Share

FORMAT = "bench/1"


def short(number: float | None) -> str:
    """Three figures are what such a measurement is good for."""
    if number is None or number != number:
        return "-"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def show(console: Console, rows: Sequence[table.Row], title: str) -> None:
    """Numbers, then ratios of this engine's rows to the best fp32 peer and to the best peer of any type."""
    found = _table(title)
    for row in rows:
        found.add_row(row.label, *(short(row.cells[column.key]) for column in table.COLUMNS))
    for label, fp32_only in (("best fp32 peer", True), ("best peer", False)):
        told = table.ratios(rows, fp32_only=fp32_only)
        if any(value is not None for cells in told.values() for value in cells.values()):
            found.add_section()
            for name, cells in told.items():
                numbers = (short(cells[column.key]) for column in table.COLUMNS)
                found.add_row(f"{name} / {label}", *numbers)
    console.print(found)
    for row in rows:
        for note in row.notes:
            console.print(f"- {note}", markup=False, highlight=False)


def _table(title: str) -> Table:
    found = Table(title=title, box=box.SIMPLE_HEAD)
    found.add_column("", overflow="fold")
    for column in table.COLUMNS:
        found.add_column(column.title, justify="right")
    return found


def show_goals(console: Console, rows: Sequence[table.Row]) -> None:
    found = Table(title="aims, each as a ratio above 1", box=box.SIMPLE_HEAD)
    for heading in ("", "wanted", "measured", ""):
        found.add_column(heading, justify="left" if not heading else "right")
    words = {True: "met", False: "missed", None: "not measured"}
    for goal in table.goals(rows):
        found.add_row(goal.text, short(goal.wanted), short(goal.reached), words[goal.met])
    found.add_section()
    for one in table.comparisons(rows):
        found.add_row(one.text, "", short(one.ratio), "on the same footing" if one.ratio is not None else words[None])
    console.print(found)


def show_shares(console: Console, limits: Limits, shares: Sequence[Share]) -> None:
    on_tiles = f" ({limits.multiply(tiles=True):.0f} on matrix tiles)" if limits.tile_gflop_s else ""
    machine = f"{limits.gflop_s:.0f} GFLOP/s{on_tiles} on {limits.threads} threads, reads as listed"
    title = f"decode step, share of the limit: {machine}"
    found = Table(title=title, box=box.SIMPLE_HEAD)
    rows = sorted(shares[0].times)
    headings = ["weights", "MB", "read GB/s", *(f"{n} rows, ms" for n in rows), *(f"{n} rows, share" for n in rows)]
    for heading in headings:
        found.add_column(heading, justify="left" if heading == "weights" else "right")
    for share in shares:
        numbers = [f"{share.times[n] * 1000:.1f}" for n in rows]
        numbers += [f"{share.shares[n]:.0%}{' (!)' if n in share.impossible else ''}" for n in rows]
        read = limits.read(round(share.weight_mb * 1e6))
        found.add_row(share.kind, f"{share.weight_mb:.0f}", f"{read:.1f}", *numbers)
    console.print(found)
    console.print("share at 1 row: of reading memory; at more rows: of multiplying")
    console.print("read GB/s: of as many MB over and over, so from the last cache where they fit")
    console.print("limits: the fastest reading of several ways, before and after each measurement of steps")
    if any(share.impossible for share in shares):
        console.print(
            "(!) more than the limit: the machine was disturbed while the limit was measured, so measure again"
        )


def show_quality(console: Console, qualities: Sequence[Quality]) -> None:
    found = Table(title="against transformers in fp32 on the dequantised weights", box=box.SIMPLE_HEAD)
    for heading in ("weights", "tokens", "perplexity", "reference", "difference", "same best token", "greedy"):
        found.add_column(heading, justify="left" if heading == "weights" else "right")
    for one in qualities:
        greedy = " ".join(f"{count}/{GREEDY}" for count in one.greedy)
        mark = "" if abs(one.difference) < ALLOWED else " !"
        numbers = (f"{one.ours:.4f}", f"{one.reference:.4f}", f"{one.difference:+.1e}{mark}", f"{one.agreement:.2%}")
        found.add_row(one.kind, str(one.tokens), *numbers, greedy)
    console.print(found)


def document(
    rows: Sequence[table.Row], outcomes: Sequence[Outcome], conditions: Mapping[str, Any], **parts: Any
) -> dict[str, Any]:
    """Everything that was measured. ``parts``: "machine" and "quality", where they were."""
    detail = {
        outcome.name: {
            "facts": dict(outcome.facts),
            "start_s": outcome.start_seconds,
            "peak_rss_mib": outcome.peak,
            "runs": {
                name: [{"wall": r.wall, "first": r.first, "last": r.last, "foreign_cores": r.foreign} for r in runs]
                for name, runs in outcome.runs.items()
            },
        }
        for outcome in outcomes
    }
    return {"format": FORMAT, "conditions": dict(conditions), **table.plain(rows), "contestants": detail, **parts}


def conditions(threads: int, repeats: int, model: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Under which the numbers arose: the processor, and how busy others kept it."""
    foreign = sorted(run.foreign for outcome in outcomes for runs in outcome.runs.values() for run in runs)
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "repeats": repeats,
        "model": model,
        "foreign_cores_median": foreign[len(foreign) // 2] if foreign else None,
        "foreign_cores_worst": foreign[-1] if foreign else None,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return "unknown"
    return next((value.strip() for key, value in lines.items() if key.strip() == "model name"), "unknown")
