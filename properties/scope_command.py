"""The commands about how much is searched: ``scope`` runs every workload of a stated box, and with ``--faults`` says what the
box alone would have caught; ``rate`` says how fast lockstep is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from properties.boxes import BOXES
from properties.faults import CATALOGUE
from properties.finds import check_folder, keep
from properties.plural import several
from properties.rate import Rate, plain, profile, with_hypothesis
from properties.rungs import RUNGS
from properties.scope import MUST, Kill, Scope, kills, scope
from properties.trial import Trial

LARGE = ("arrivals", "prefixes", "trouble", "ends")
HOLDS, VIOLATED = 0, 1

Options = argparse.Namespace


def add_commands(command: Callable[..., Any], at_least: Callable[[int], Callable[[str], int]]) -> None:
    """Adds ``scope`` and ``rate``; ``command`` makes a parser in the style of the others."""
    box = command(
        "scope",
        run_scope,
        "Run every workload of small boxes in lockstep; fail when one differs, or when nothing of interest happens in them.",
        "scope --box small",
    )
    box.add_argument(
        "--box", action="append", choices=sorted(BOXES), help=f"a box, repeatable (default: {', '.join(LARGE)})"
    )
    box.add_argument("--jobs", metavar="J", type=at_least(1), help="processes (default: one a core)")
    box.add_argument("--arm", metavar="FAULT", choices=sorted(CATALOGUE), help="run the boxes with this fault")
    box.add_argument("--faults", action="store_true", help="arm each fault in turn, up to its first kill")
    box.add_argument(
        "--workloads", metavar="N", type=at_least(1), default=20000, help="with --faults: N survived (default 20000)"
    )
    box.add_argument("--found", metavar="DIR", type=Path, default=Path("found"), help="where failures are written")
    speed = command(
        "rate",
        run_rate,
        "Measure iterations in lockstep a second of CPU time on one core, plain, and with Hypothesis drawing.",
        "rate --rung ledger --hypothesis",
    )
    speed.add_argument("--rung", action="append", choices=sorted(RUNGS), help="a rung, repeatable (default: ledger)")
    speed.add_argument("--hypothesis", action="store_true", help="measure the same under Hypothesis, too")
    speed.add_argument("--workloads", metavar="N", type=at_least(1), default=300, help="how many (default 300)")
    speed.add_argument("--profile", metavar="N", type=at_least(1), help="also print the N most expensive functions")


def run_rate(options: Options) -> int:
    rates: list[Rate] = []
    for rung in options.rung or ["ledger"]:
        rates.append(plain(rung, options.workloads))
        rates.append(plain(rung, options.workloads, frozenset({"text"})))
        if options.hypothesis:
            rates.append(with_hypothesis(rung, options.workloads))
        if not options.json:
            print("\n".join(rate.line() for rate in rates if rate.rung == rung), flush=True)
        if options.profile:
            print(profile(rung, options.workloads, options.profile))
    if options.json:
        plainly = [{**attrs.asdict(rate), "iterations_per_second": round(rate.iterations_per_second)} for rate in rates]
        print(json.dumps(plainly, indent=1))
    return HOLDS


def run_scope(options: Options) -> int:
    check_folder(options.found)
    boxes = tuple(options.box or LARGE)
    jobs = options.jobs or len(os.sched_getaffinity(0))
    return _faults(options, boxes, jobs) if options.faults else _everything(options, boxes, jobs)


def _everything(options: Options, boxes: tuple[str, ...], jobs: int) -> int:
    start = time.monotonic()
    result = scope(boxes, jobs, _progress, options.arm)
    seconds = time.monotonic() - start
    missing = result.missing()
    saved = [_save(options, number, result) for number in range(len(result.failed))]
    if options.json:
        payload = {
            "holds": not saved and not missing,
            "boxes": {name: dict(line.split(None, 1) for line in BOXES[name].lines()) for name in boxes},
            "workloads": result.workloads,
            "distinct": len(result.traces),
            "duplicates": result.duplicates,
            "iterations": result.iterations,
            "happened": {name: result.happened[name] for name in MUST},
            "missing": missing,
            "seconds": round(seconds, 1),
            "found": [str(path) for path, _ in saved],
        }
        print(json.dumps(payload, indent=1))
    else:
        _tell(boxes, result, seconds)
        for _, report in saved:
            print(f"\n{report}")
        for name in missing:
            print(f"SCOPE: nothing in the box does this: {name}")
    return VIOLATED if saved or missing else HOLDS


def _tell(boxes: tuple[str, ...], result: Scope, seconds: float) -> None:
    for name in boxes:
        print(f"box {name}")
        for line in BOXES[name].lines():
            print(f"  {line}")
    distinct = len(result.traces)
    traces = several(distinct, "distinct trace")
    print(f"{several(result.workloads, 'workload')}, {traces}, {several(result.duplicates, 'duplicate')} of them")
    ran = several(result.iterations, "iteration")
    print(f"{ran} in {seconds:.0f} s, {several(len(result.failed), 'shape')} with a failure")
    for name in MUST:
        print(f"  {name:34} {result.happened[name]:8}")


def _save(options: Options, number: int, result: Scope) -> tuple[Path, str]:
    workload, found = result.failed[number]
    path = options.found / f"scope-{found.check}-{workload.digest()}.json"
    trial = Trial(fault=options.arm)
    return path, str(keep(workload, trial.run(workload), found, path, by={"by": "scope"}, trial=trial))


def _faults(options: Options, boxes: tuple[str, ...], jobs: int) -> int:
    """What survives is no failure: a box says what it is, and some faults need more than it holds."""
    chosen = [fault.id for fault in CATALOGUE.values() if fault.rung == "ledger"]
    found = []
    for done, kill in enumerate(kills(chosen, boxes, options.workloads, jobs)):
        found.append(kill)
        if not options.json:
            print(_line(kill), flush=True)
        _progress(done, len(chosen), f"faults, last {kill.fault}")
    found.sort(key=lambda kill: kill.fault)
    survivors = [kill.fault for kill in found if kill.check is None]
    if options.json:
        payload = {"boxes": boxes, "kills": [attrs.asdict(kill) for kill in found], "survived": len(survivors)}
        print(json.dumps(payload, indent=1))
        return HOLDS
    killed = len(found) - len(survivors)
    print(f"{killed} of {len(found)} faults of the ledger rung are killed by {', '.join(boxes)} alone")
    if survivors:
        print(f"not within {options.workloads} workloads: {' '.join(survivors)}")
    return HOLDS


def _line(kill: Kill) -> str:
    how = (
        f"killed by {kill.check} at workload {kill.workloads}" if kill.check else f"survives {kill.workloads} workloads"
    )
    return f"{kill.fault:5} {how:44} {CATALOGUE[kill.fault].title}"


def _progress(number: int, total: int, text: str) -> None:
    """On stderr, rewritten in place; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        end = "\n" if number + 1 == total else ""
        print(f"\r{number + 1} of {total} {text}\x1b[K", end=end, file=sys.stderr, flush=True)
