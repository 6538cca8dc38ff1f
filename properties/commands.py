"""What each command of ``python -m properties`` does. A command prints, and returns 0 (holds) or 1 (violated)."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

import attrs

from engine.trace import Workload, load
from properties import coverage_table, experiments, graph_faults
from properties.checks import Finding
from properties.faults import CATALOGUE
from properties.finds import check_folder, keep, replay_command
from properties.hunt import Hunted, hunt, numbered
from properties.lockstep import run
from properties.options import Misuse, judge_outputs
from properties.pictures import draw
from properties.plural import several
from properties.recording import compare
from properties.report import LEGEND, report, timeline
from properties.rungs import RUNGS
from properties.shrink import shrink
from properties.trial import Trial

Options = argparse.Namespace
HOLDS, VIOLATED = 0, 1


def replay(options: Options) -> int:
    judge_outputs(options)
    workload = load(options.file)
    trial = _trial(options)
    outcome = trial.run(workload, until=options.until)
    found = outcome.first or compare(workload, outcome)
    again = trial.command(options.file, found)
    written = draw(options, workload, outcome, again)
    if options.json:
        _print_json({"holds": found is None, "iterations": len(outcome.steps), **_finding(found), **written})
    elif found is None:
        requests = several(len(outcome.callers), "accepted request")
        print(f"holds: {several(len(outcome.steps), 'iteration')}, {requests}")
        if workload.digests:
            print(f"{_met(len(outcome.steps), len(workload.digests))} decided as when they were recorded")
    else:
        print(report(workload, outcome, found, again))
    _say_written(options, written)
    return HOLDS if found is None else VIOLATED


def show(options: Options) -> int:
    judge_outputs(options)
    workload = load(options.file)
    outcome = run(workload, make_rung=None, until=options.until)
    written = draw(options, workload, outcome, f"python -m properties show {options.file}")
    if options.json:
        _print_json(
            [{"iteration": s.iteration, "events": s.events, **_plain(s.step), "after": s.after} for s in outcome.steps]
        )
    else:
        print("\n".join(timeline(outcome)))
        print(f"\n{LEGEND}")
    _say_written(options, written)
    return HOLDS


def shrink_file(options: Options) -> int:
    judge_outputs(options)
    workload = load(options.file)
    trial = _trial(options)
    first = trial.run(workload).first
    if first is None:
        _say(options, {"holds": True}, "holds: there is no failure to shrink")
        return HOLDS

    def fails(candidate: Workload) -> bool:
        found = trial.run(candidate).first
        return found is not None and found.check == first.check

    small, tries = shrink(workload, fails)
    outcome = trial.run(small)
    found = outcome.first
    assert found is not None
    path = options.output or options.found / f"{options.file.stem}-shrunk.json"
    divergence = keep(small, outcome, found, path, by={"by": "shrink"}, trial=trial)
    before, after = several(len(workload.events), "event"), len(small.events)
    summary = f"{before} became {after} after {several(tries, 'try', 'tries')}: {path}"
    payload = {"holds": False, "file": str(path), "tries": tries, "events": len(small.events), **_finding(found)}
    _say(options, payload, f"{divergence}\n{summary}")
    return VIOLATED


def coverage(options: Options) -> int:
    if options.table:
        return _coverage_table(options)
    missing = [f"--{name}" for name in ("requests", "lengths", "rows") if getattr(options, name) is None]
    if missing:
        raise Misuse(f"the following arguments are required: {', '.join(missing)}")
    workload = experiments.coverage_workload(
        options.rows,
        options.requests,
        options.lengths,
        prompt=options.prompt,
        budget=options.budget,
        persistent_batch=options.persistent_batch,
    )
    return _experiment(options, experiments.coverage(workload, make_rung=RUNGS[options.rung or "ledger"]), None)


def _coverage_table(options: Options) -> int:
    """Every line of the published table; written down too where ``--output`` names a file."""
    given = [f"--{name}" for name in ("requests", "lengths", "rows", "rung") if getattr(options, name) is not None]
    if given:
        raise Misuse(f"--table has lines of its own, so {', '.join(given)} cannot be chosen")
    listed = []
    for line in coverage_table.lines():
        listed.append(line)
        _progress(f"{line.rows} rows, {len(listed)} lines", done=False)
    _progress(f"{len(listed)} lines", done=True)
    complaints = coverage_table.complaints(listed)
    if options.json:
        _print_json(
            {"holds": not complaints, "complaints": complaints, "lines": [attrs.asdict(line) for line in listed]}
        )
    else:
        print(coverage_table.page(listed), end="")
        print("\n".join(complaints) + ("\n" if complaints else ""), end="")
    if options.output is not None:
        options.output.write_text(coverage_table.page(listed), encoding="utf-8")
    return VIOLATED if complaints else HOLDS


def _met(ran: int, recorded: int) -> str:
    """How many recorded iterations a replay without a finding has met."""
    which = "all" if ran >= recorded > 1 else f"the first {ran} of" if ran < recorded else "the"
    return f"{which} {several(recorded, 'recorded iteration')} {'was' if recorded == 1 else 'were'}"


def graph_faults_command(options: Options) -> int:
    """Hunts the faults of recorded graphs, or the chosen ones, on each rung; the table is printed at the end."""

    def progress(number: int, total: int, name: str) -> None:
        _progress(f"{number} of {total}: {name}", done=number == total)

    listed = list(graph_faults.hunts(options.only or graph_faults.chosen(), progress))
    complaints = graph_faults.complaints(listed)
    if options.json:
        _print_json(
            {"holds": not complaints, "complaints": complaints, "hunts": [attrs.asdict(line) for line in listed]}
        )
    else:
        print(graph_faults.page(listed), end="")
        print("\n".join(complaints) + ("\n" if complaints else ""), end="")
    if options.output is not None:
        options.output.write_text(graph_faults.page(listed), encoding="utf-8")
    return VIOLATED if complaints else HOLDS


def soak(options: Options) -> int:
    workload = experiments.soak_workload(
        options.prompts,
        options.max_tokens,
        options.rows,
        options.blocks,
        options.block_size,
        watermark=options.watermark,
        budget=options.budget,
        persistent_batch=options.persistent_batch,
    )
    ran = experiments.soak(
        workload, fault=options.arm, looking=options.audit, make_rung=RUNGS[options.rung or "ledger"]
    )
    return _experiment(options, ran, options.arm)


def _experiment(options: Options, ran: experiments.Experiment, fault: str | None) -> int:
    found = ran.violated
    if found is None:
        _say(options, ran.figures, "\n".join(f"{name:24} {value}" for name, value in ran.figures.items()))
        return HOLDS
    path = options.found / f"{options.command}-{found.check}.json"
    divergence = keep(ran.workload, ran.outcome, found, path, fault=fault, by={"by": options.command})
    payload = {"check": found.check, "caught_at_iteration": found.iteration, "message": found.headline}
    _say(options, {**payload, "file": str(path), "replay": replay_command(path, found, fault)}, str(divergence))
    return VIOLATED


def hunt_command(options: Options) -> int:
    check_folder(options.found)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    jobs = options.jobs or len(os.sched_getaffinity(0))
    trial = _trial(options)
    result = hunt(
        options.minutes,
        seed=seed,
        jobs=jobs,
        rung=trial.rung,
        fault=trial.fault,
        subject=trial.subject,
        progress=_hunting(options.minutes),
    )
    kept = []
    for find in result.finds:
        outcome = trial.run(find.workload)
        path = options.found / f"hunt-{find.finding.check}-{find.workload.digest()}.json"
        by: dict[str, str | int] = {"by": "hunt", "seed": seed, "number": find.number}
        divergence = keep(find.workload, outcome, find.finding, path, by=by, trial=trial)
        kept.append({"file": str(path), "number": find.number, **_finding(find.finding)})
        if not options.json:
            print(f"{divergence}\n")
    # a run that stopped early did not reach all that it would have: after a failure no floor is judged
    missed = [] if kept else result.floors.missed(trial.floors(numbered(seed, 0).shape))
    if result.ended is not None:
        missed = []
    elif not kept and not result.workloads:
        missed = [f"NOTHING RAN: no workload ended within {options.minutes:g} minutes; give --minutes more"]
    totals = {"seed": seed, "workloads": result.workloads, "iterations": result.iterations}
    holds = not kept and not missed and result.ended is None
    if options.json:
        ended = result.ended is not None
        _print_json({"holds": holds, **totals, "finds": kept, "floors_missed": missed, "ended_early": ended})
    else:
        print("\n".join(missed) + ("\n" if missed else ""), end="")
        ran = f"{several(result.workloads, 'workload')}, {several(result.iterations, 'iteration')}"
        early = "" if result.ended is None else ", ended before its time"
        print(f"seed {seed}: {ran}, {several(len(kept), 'kind')} of failure{early}")
    if result.ended is not None and not kept:
        raise result.ended  # nothing failed, but nothing is proven either
    return HOLDS if holds else VIOLATED


def _trial(options: Options) -> Trial:
    """A fault is armed on the rung on which it must be found, unless another is named. Raises ``Misuse``."""
    given = [f"--{name}" for name in ("arm", "rung") if getattr(options, name) is not None]
    if options.subject is not None and given:
        raise Misuse(f"--subject runs somebody else's scheduler, but {' and '.join(given)} are of our engine")
    home = CATALOGUE[options.arm].rung if options.arm else "ledger"
    return Trial(options.rung or home, options.arm, options.subject)


def _hunting(minutes: float) -> Callable[[Hunted, float], None]:
    def progress(hunted: Hunted, left: float) -> None:
        so_far = f"{several(hunted.workloads, 'workload')}, {several(len(hunted.finds), 'kind')} of failure"
        _progress(f"{so_far}, {left:.0f} s of {minutes * 60:.0f} s left", done=left <= 0)

    return progress


def _progress(line: str, *, done: bool) -> None:
    """On stderr, rewritten in place; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r{line}\x1b[K", end="\n" if done else "", file=sys.stderr, flush=True)


def _say_written(options: Options, written: dict[str, str]) -> None:
    for kind, path in written.items() if not options.json else ():
        print(f"{kind}: {path}")


def _say(options: Options, payload: Any, text: str) -> None:
    _print_json(payload) if options.json else print(text)


def _print_json(payload: Any) -> None:
    print(json.dumps(payload, indent=1, default=str))


def _plain(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "iteration"}  # the model counts from 0


def _finding(found: Finding | None) -> dict[str, Any]:
    return {} if found is None else attrs.asdict(found)
