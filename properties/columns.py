"""The timeline: one line an iteration in fixed columns, as the specification has it after commit.

Columns are as wide as their longest entry, up to a limit; what is cut there ends in ``~``. Up to ``MOST`` requests have a column
of their own; "what happened" tells of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from properties.lockstep import Run, Step
from properties.sides import blocks, people

LEGEND = """\
queue, running: in order. rows: who sits in row 0, 1, ... (. nobody). free: blank blocks. cached: published blocks without owner.
graph: rows x width of the recorded graph and + padded rows, or why the step ran eagerly.
a request: waiting, preempted (waiting again), computed/tokens while prefilling, "k of max_tokens" generated while decoding,
how it ended, and . once it is gone. Iterations count from 1."""
MOST = 8  # request columns
_LIMITS = {"it": 6, "events": 18, "queue": 14, "running": 14, "rows": 16, "free": 5, "cached": 6, "graph": 12}
_REQUEST = 10
_RIGHT = ("it", "free", "cached")


@attrs.define
class Columns:
    """Walks a run and writes its lines. ``wanted`` requests get a column first, then the others by number."""

    run: Run
    wanted: Sequence[int] = ()
    first: int = 1  # iteration of the first line
    last: int | None = None
    _cells: list[tuple[dict[str, str], str]] = attrs.field(factory=list)
    _preempted: set[int] = attrs.field(factory=set)
    _seen: set[int] = attrs.field(factory=set)

    def lines(self) -> Iterator[str]:
        for step in self.run.steps:
            cells = self._cell(step)
            if step.iteration >= self.first and (self.last is None or step.iteration <= self.last):
                self._cells.append((cells, "; ".join(happened(step.step)) or "-"))
        if self.run.late and self.last is None:
            self._cells.append(({"it": "-", "events": " ".join(self.run.late)}, "nothing left to do"))
        names, left_out = self._names()
        widths = {name: self._width(name) for name in names}
        yield _line({name: name for name in names}, "what happened", widths)
        for cells, rest in self._cells:
            yield _line(cells, rest, widths)
        if left_out:
            yield f"(no column for {people(left_out)})"

    def _names(self) -> tuple[list[str], list[int]]:
        shown = {int(name[1:]) for cells, _ in self._cells for name, cell in cells.items() if _is_request(name, cell)}
        order = [request for request in self.wanted if request in shown]
        order += [request for request in sorted(shown) if request not in order]
        cached = any("cached" in cells for cells, _ in self._cells)
        names = [name for name in _LIMITS if name != "cached" or cached]
        return [*names, *(f"r{request}" for request in sorted(order[:MOST]))], sorted(order[MOST:])

    def _width(self, name: str) -> int:
        longest = max((len(cells.get(name, "-")) for cells, _ in self._cells), default=1)
        return max(len(name), min(longest, _LIMITS.get(name, _REQUEST)))

    def _cell(self, step: Step) -> dict[str, str]:
        after = step.after
        self._preempted.update(step.step.get("preempted", ()))
        ended = dict(step.step.get("finished", ())) | dict.fromkeys(step.step.get("aborted", ()), "abort")
        cells = {
            "it": str(step.iteration),
            "events": " ".join(step.events) or "-",
            "queue": people(after["waiting"]) or "-",
            "running": people(after["running"]) or "-",
            "rows": seats(after["rows"]) or "-",
            "free": str(len(after["blank"])),
            "graph": graph(step.step.get("launch")),
        }
        if "cached" in after:
            cells["cached"] = str(len(after["cached"]))
        for request in self._seen | after["status"].keys() | ended.keys():
            self._seen.add(request)
            cells[f"r{request}"] = ended.get(request) or self._progress(request, after)
        return cells

    def _progress(self, request: int, after: Mapping[str, Any]) -> str:
        status, tokens = after["status"].get(request), after["num_tokens"].get(request)
        if status is None:
            return "."
        if status == "waiting":
            return "preempted" if request in self._preempted else "waiting"
        if status == "decoding" and (caller := self.run.callers.get(request)) is not None:
            return f"{tokens - caller.prompt_len} of {caller.max_tokens}"
        return f"{after['computed'][request]}/{tokens}" if status == "prefilling" else str(status)


def _is_request(name: str, cell: str) -> bool:
    return name[0] == "r" and name[1:].isdigit() and cell != "."


def _line(cells: Mapping[str, str], rest: str, widths: Mapping[str, int]) -> str:
    fixed = []
    for name, width in widths.items():
        cell = cells.get(name, "" if name not in _LIMITS else "-")
        cut = cell if len(cell) <= width else cell[: width - 1] + "~"
        fixed.append(cut.rjust(width) if name in _RIGHT else cut.ljust(width))
    return f"{'  '.join(fixed)}  {rest}".rstrip()


def seats(rows: Mapping[int, int | None]) -> str:
    """``r2 . r0``: who sits in each row, up to the last row that is taken."""
    holder = {row: request for request, row in rows.items() if row is not None}
    return " ".join(f"r{holder[row]}" if row in holder else "." for row in range(max(holder, default=-1) + 1))


def graph(launch: Sequence[Any] | None) -> str:
    if launch is None:
        return "-"
    if launch[0] == "eager":
        return str(launch[1])
    return f"{launch[1]}x{launch[2]}" + (f" +{launch[3]}" if launch[3] else "")


def happened(step: Mapping[str, Any]) -> Iterator[str]:
    """What the iteration did, in the order of rule 3."""
    for verb, key in (("abort", "aborted"), ("reap", "reaped"), ("preempt", "preempted")):
        if step.get(key):
            yield f"{verb} {people(step[key])}"
    if step.get("grown"):
        yield "grow " + " ".join(f"r{request}+b{block}" for request, block in step["grown"])
    if step.get("moves"):
        yield "move " + " ".join(f"{src}>{dst}" for src, dst in step["moves"])
    hits = {request: count for request, count in step.get("hits", ()) if count}
    for request, row, table in step.get("admitted", ()):
        found = f" ({_count(hits[request], 'hit')})" if request in hits else ""
        yield f"admit r{request}@{row} on {blocks(table)}{found}"
    if step.get("evicted"):
        yield f"evict {blocks(step['evicted'])}"
    for request, _, start, count, samples in step.get("chunks", ()):
        if start or not samples:
            yield f"chunk r{request} {start}..{start + count - 1}"
    if step.get("error"):
        yield "execute raised"
    if step.get("published"):
        yield f"publish {blocks(block for block, _ in step['published'])}"
    for request, reason in step.get("finished", ()):
        yield f"end r{request} {reason}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")


def timeline(run: Run, wanted: Iterable[int] = ()) -> Iterator[str]:
    """Every iteration of a run, the header first."""
    return Columns(run, tuple(wanted)).lines()
