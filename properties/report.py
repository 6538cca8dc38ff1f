"""What a person reads: the timeline in fixed columns, one line an iteration, and the report of a first divergence.

The report ends with the one command that replays it. Its layout is pinned by a snapshot test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.trace import Workload, dumps
from properties.checks import Finding
from properties.lockstep import Run, Step

LEGEND = (
    "running: request@row; (computed/tokens) while prefilling, ! once finished. launch: rows x width, + padded rows. "
    "Iterations count from 1."
)
WINDOW = 12  # iterations that a report shows
_COLUMNS = (("it", 4), ("events", 18), ("waiting", 14), ("running", 30), ("free", 4), ("launch", 12))


def header() -> str:
    return _line([name for name, _ in _COLUMNS], "what happened")


def line(step: Step) -> str:
    """One iteration, as the specification has it after commit."""
    after = step.after
    cells = [
        str(step.iteration),
        " ".join(step.events) or "-",
        " ".join(f"r{request}" for request in after["waiting"]) or "-",
        _running(after) or "-",
        str(len(after["blank"])),
        _launch(step.step.get("launch")),
    ]
    return _line(cells, "; ".join(_happened(step.step)) or "-")


def timeline(run: Run) -> Iterator[str]:
    yield header()
    for step in run.steps:
        yield line(step)
    if run.late:
        yield _line(["-", " ".join(run.late), "-", "-", "-", "-"], "nothing left to do")


def report(workload: Workload, run: Run, found: Finding, command: str) -> str:
    """The first divergence: where, what happened up to there, what differs, and how to see it again."""
    lines = [f"{found.check} at iteration {found.iteration}: {found.headline}", ""]
    if workload.title and found.headline not in workload.title:
        lines.insert(0, workload.title)
    shown = [step for step in run.steps if step.iteration <= found.iteration]
    if len(shown) > WINDOW:
        lines.append(f"({len(shown) - WINDOW} earlier iterations)")
    lines += [header(), *(line(step) for step in shown[-WINDOW:])]
    if found.facts:
        lines += ["", f"{f'{found.check} at {found.iteration}':28} {'engine':44} specification"]
        lines += [f"  {fact.name:26} {fact.engine:44} {fact.specification}".rstrip() for fact in found.facts]
    lines += ["", *_histories(found, run.steps), "workload:", dumps(workload).rstrip(), "", f"replay: {command}"]
    return "\n".join(lines)


def _line(cells: Sequence[str], rest: str) -> str:
    fixed = []
    for cell, (name, width) in zip(cells, _COLUMNS, strict=True):
        cut = cell if len(cell) <= width else cell[: width - 1] + "~"
        fixed.append(cut.rjust(width) if name in ("it", "free") else cut.ljust(width))
    return f"{'  '.join(fixed)}  {rest}".rstrip()


def _running(after: Mapping[str, Any]) -> str:
    cells = []
    for request, row in sorted(after["rows"].items(), key=lambda item: item[1]):
        status = after["status"][request]
        progress = f"({after['computed'][request]}/{after['num_tokens'][request]})" if status == "prefilling" else ""
        cells.append(f"r{request}@{row}{progress}{'!' if status == 'finished' else ''}")
    return " ".join(cells)


def _launch(launch: Sequence[Any] | None) -> str:
    if launch is None:
        return "-"
    if launch[0] == "eager":
        return str(launch[1])
    return f"{launch[1]}x{launch[2]}" + (f" +{launch[3]}" if launch[3] else "")


def _happened(step: Mapping[str, Any]) -> Iterator[str]:
    for verb, key in (("abort", "aborted"), ("reap", "reaped"), ("preempt", "preempted")):
        if step.get(key):
            yield f"{verb} {' '.join(f'r{request}' for request in step[key])}"
    if step.get("grown"):
        yield "grow " + " ".join(f"r{request}+b{block}" for request, block in step["grown"])
    if step.get("moves"):
        yield "move " + " ".join(f"{src}>{dst}" for src, dst in step["moves"])
    for request, row, blocks in step.get("admitted", ()):
        yield f"admit r{request}@{row} on {','.join(f'b{block}' for block in blocks)}"
    for request, _, start, count, samples in step.get("chunks", ()):
        if start or not samples:
            yield f"chunk r{request} {start}..{start + count - 1}"
    if step.get("error"):
        yield "execute raised"
    for request, reason in step.get("finished", ()):
        yield f"end r{request} {reason}"


def _histories(found: Finding, steps: Sequence[Step]) -> list[str]:
    """Who held the blocks that a ledger or audit finding names, according to the specification."""
    if found.check not in ("audit", "ledger"):
        return []
    lines = []
    for block in sorted(_named_blocks(found))[:4]:
        spans: list[tuple[int, int, int]] = []  # request, first, last iteration
        for step in steps:
            for request, table in step.after["tables"].items():
                if block in table:
                    if spans and spans[-1][0] == request and spans[-1][2] == step.iteration - 1:
                        spans[-1] = (request, spans[-1][1], step.iteration)
                    else:
                        spans.append((request, step.iteration, step.iteration))
        held = (
            ", ".join(f"by r{request} in {first}..{last}" for request, first, last in spans[-4:]) or "by nobody so far"
        )
        lines.append(f"block {block} is held, says the specification, {held}")
    return [*lines, ""] if lines else []


def _named_blocks(found: Finding) -> set[int]:
    named = {int(number) for number in re.findall(r"block (\d+)", found.headline)}
    for fact in found.facts:
        if fact.name == "blank":
            mine, theirs = (set(map(int, re.findall(r"\d+", side))) for side in (fact.engine, fact.specification))
            named |= mine ^ theirs
    return named
