"""``python -m properties laws``: every law held against lists of requests, on the real kernels, and what was compared."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import attrs

from properties.law_faults import LAW_FAULTS, armed_for_laws
from properties.law_play import DEFAULT, TINY
from properties.laws import LAWS, Report, check_laws
from properties.options import Misuse, Names, fault

HOLDS, VIOLATED = 0, 1


def show_laws(options: argparse.Namespace) -> int:
    from engine.loading.model import LoadError
    from properties.law_engines import engines_of  # imports torch

    try:
        make = engines_of(options.model, options.compute)
    except LoadError as error:
        raise Misuse(f"--model: {error}") from None
    lists = make.lists(range(options.seed, options.seed + options.lists), options.requests)
    with armed_for_laws(options.arm):
        report = check_laws(make, lists, only=options.only)
    holds = not report.findings and not report.missed
    if options.json:
        rows = [attrs.asdict(row) for row in report.rows]
        findings = [attrs.asdict(found) for found in report.findings]
        told = {
            "holds": holds,
            "model": make.model.name,
            "compute": make.compute,
            "laws": rows,
            "findings": findings,
            "missed": report.missed,
        }
        print(json.dumps(told, indent=1))
    else:
        print("\n".join(_table(report)))
        for line in (*(found.headline for found in report.findings), *report.missed):
            print(f"LAW: {line}")
        count = sum(row.tokens for row in report.rows)
        verdict = "hold" if holds else "were held"
        print(f"{make.model.name} on {make.compute} kernels: {len(report.rows)} laws {verdict} over {count} tokens")
    return HOLDS if holds else VIOLATED


def _table(report: Report) -> list[str]:
    lines = [f"{'law':18} {'requests':>8} {'tokens':>7}  {'a request is told the same':54} how often that occurred"]
    for row in report.rows:
        occurred = ", ".join(f"{count} {what}" for what, count in row.occurred.items())
        lines.append(f"{row.law:18} {row.requests:8} {row.tokens:7}  {LAWS[row.law].change:54} {occurred}")
    return lines


def _law(text: str) -> str:
    if text not in LAWS:
        raise argparse.ArgumentTypeError(f"there is no law {text!r}; there are {', '.join(sorted(LAWS))}")
    return text


def law_fault(text: str) -> str:
    """An id of the laws' own faults or of the catalogue."""
    return text if text in LAW_FAULTS else fault(text)


def add_commands(
    command: Callable[..., argparse.ArgumentParser], at_least: Callable[[int], Callable[[str], int]]
) -> None:
    laws = command(
        "laws",
        show_laws,
        "Run lists of requests with one setting changed at a time: nobody may be told anything else, to the byte.",
        "laws --lists 4",
    )
    laws.add_argument("--only", metavar="LAW", action=Names, known=_law, help="some laws; default: all")
    laws.add_argument("--lists", metavar="N", type=at_least(1), default=2, help="lists of requests (default 2)")
    laws.add_argument("--requests", metavar="N", type=at_least(1), default=8, help="requests in a list (default 8)")
    laws.add_argument("--seed", metavar="S", type=at_least(0), default=0, help="number of the first list (default 0)")
    laws.add_argument(
        "--model",
        metavar="MODEL",
        default=TINY,
        help=f"{TINY}: random weights; {DEFAULT}: the model installed beside the engine; or a folder, .gguf file or hub id",
    )
    laws.add_argument(
        "--compute", choices=("auto", "native", "torch"), default="auto", help="the engine's compute path"
    )
    laws.add_argument(
        "--arm", metavar="FAULT", type=law_fault, help="run with this fault: W01 and so on, or the catalogue's"
    )
