"""What a person reads of a first divergence: the timeline up to it, both ledgers with an arrow at the difference, who last held
the blocks in question, the workload, and the one command that replays it.

The layout is pinned by a snapshot test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from engine.trace import Workload, dumps
from properties.checks import Finding
from properties.columns import LEGEND, Columns, timeline
from properties.history import holds
from properties.lockstep import Run, Step
from properties.sides import Entry, compare, of_model, sides
from properties.subject_run import SubjectRun

__all__ = ["LEGEND", "WINDOW", "report", "timeline"]

WINDOW = 12  # iterations that a report shows
MOST_BLOCKS = 4  # whose holders it tells
ARROW = "<--"
_NAME, _SIDE = 18, 36


def report(workload: Workload, run: Run, found: Finding, command: str) -> str:
    """The first divergence: where, what happened up to there, what differs, and how to see it again."""
    lines = [f"{found.check} at iteration {found.iteration}: {found.headline}", ""]
    if workload.title and found.headline not in workload.title:
        lines.insert(0, workload.title)
    shown = [step for step in run.steps if step.iteration <= found.iteration]
    first = max(1, found.iteration - WINDOW + 1)
    if shown and shown[0].iteration < first:
        lines.append(f"({first - shown[0].iteration} earlier iterations)")
    lines += Columns(run, named_requests(found), first, found.iteration).lines()
    foreign = isinstance(run, SubjectRun)
    entries = [] if foreign else ledgers(run.steps, found.iteration, workload.shape.blocks)
    if found.check == "audit" or foreign:
        lines += ["", *(f"also: {fact.engine}" for fact in found.facts)] if found.facts else []
    elif facts := _beside(found, entries):
        lines += ["", *_table(f"{found.check} at {found.iteration}", facts, arrows=False)]
    if foreign and shown:
        when = "holds after" if shown[-1].step else "held before"  # an iteration that was not finished
        held = of_model(shown[-1].after).entries()
        lines += [
            "",
            f"what it {when} {shown[-1].iteration}",
            *(f"  {name:{_NAME - 2}}  {text}" for name, text in held if text),
        ]
    if entries:
        lines += ["", *_table(f"ledger at {found.iteration}", entries, arrows=True)]
    lines += ["", *_holders(found, entries, shown), "workload:", dumps(workload).rstrip(), "", f"replay: {command}"]
    return "\n".join(lines)


def ledgers(steps: Sequence[Step], iteration: int, pool: int) -> list[Entry]:
    """Both ledgers after an iteration, line by line; empty where the engine has none to show. A request that waits on both
    sides holds nothing, so its line would say nothing."""
    for step, mine, theirs in sides(steps):
        if step.iteration == iteration:
            entries = [] if mine is None else compare(mine, theirs, pool)
            return [entry for entry in entries if entry.differs or not entry.engine.startswith("waiting ")]
    return []


def _beside(found: Finding, entries: Sequence[Entry]) -> list[Entry]:
    """The facts of a finding, without those that the ledger below shows as a difference anyway."""
    told = {entry.name for entry in entries if entry.differs}
    if any(name[0] == "r" and name[1:].isdigit() for name in told):
        told |= {"tables", "status", "computed", "num_tokens", "rows"}
    if any(name.endswith(" holds") for name in told):
        told.add("published")
    return [Entry(fact.name, fact.engine, fact.specification) for fact in found.facts if fact.name not in told]


def _table(title: str, entries: Sequence[Entry], *, arrows: bool) -> Iterator[str]:
    """Two columns; an entry that is too long for its column gets a line for each side, so that nothing is cut."""
    yield f"{title:{_NAME}}  {'engine':{_SIDE}}  specification"
    for entry in entries:
        mark = f"  {ARROW} {entry.note}".rstrip() if arrows and entry.differs else ""
        left, right = entry.engine or "-", entry.specification or "-"
        if max(len(left), len(right)) <= _SIDE:
            yield f"  {entry.name:{_NAME - 2}}  {left:{_SIDE}}  {right:{_SIDE if mark else 0}}{mark}".rstrip()
        elif left == right:
            yield f"  {entry.name:{_NAME - 2}}  {left}"
            yield f"  {'':{_NAME - 2}}  (the same on both sides)"
        else:
            yield f"  {entry.name:{_NAME - 2}}  engine:        {left}{mark}"
            yield f"  {'':{_NAME - 2}}  specification: {right}"


def _holders(found: Finding, entries: Sequence[Entry], steps: Sequence[Step]) -> list[str]:
    """The last holding of each block that the finding, or a difference of the free blocks, is about."""
    lines = []
    history = holds(steps)
    for block in sorted(named_blocks(found, entries))[:MOST_BLOCKS]:
        held = history.get(block)
        lines.append(f"last to hold block {block}: {held[-1] if held else 'nobody so far'}")
    return [*lines, ""] if lines else []


def named_blocks(found: Finding, entries: Sequence[Entry] = ()) -> set[int]:
    """Blocks in the words of an audit or ledger finding, and those that only one side believes to be free."""
    if found.check not in ("audit", "ledger", "drain"):
        return set()
    named = {int(number) for number in re.findall(r"block (\d+)", found.headline)}
    for entry in entries:
        if entry.name == "blank":
            mine, theirs = (set(map(int, re.findall(r"\d+", text))) for text in (entry.engine, entry.specification))
            named |= mine ^ theirs
    return named


def named_requests(found: Finding) -> tuple[int, ...]:
    """Requests that the finding names, the first one first."""
    texts = [found.headline, *(fact.name for fact in found.facts)]
    texts += [text for fact in found.facts for text in (fact.engine, fact.specification)]
    numbers = [int(number) for text in texts for number in re.findall(r"\b(?:r|request )(\d+)\b", text)]
    return tuple(dict.fromkeys(numbers))
