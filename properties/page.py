"""One self-contained page of a run: block grids, rows, queues and decisions of both sides, iteration by iteration.

Nothing is fetched: styles, script and data stand in the file, and its content security policy forbids everything else. The data
travels as JSON in a script element that the browser does not execute, with ``<``, ``>`` and ``&`` escaped; every other text
goes through the template's autoescaping, and the script only ever sets text, never markup. So whatever a workload calls its
streams, the page shows it and does nothing with it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import attrs
from jinja2 import Environment, FileSystemLoader, select_autoescape
from jinja2.utils import htmlsafe_json_dumps

from engine.trace import Workload, dumps
from properties import decided
from properties.checks import Finding
from properties.columns import timeline
from properties.lockstep import Run
from properties.report import report
from properties.sides import Side, compare, content, sides
from properties.subject_run import SubjectRun

_TEMPLATES = Path(__file__).parent / "templates"
BOTH = ("engine", "specification")


def page(workload: Workload, run: Run, command: str) -> str:
    """The page's text, with two sides or, of a foreign scheduler or of the specification alone, with one."""
    alone = all(step.ledger is None for step in run.steps)
    named = ("subject",) if isinstance(run, SubjectRun) else BOTH[1:] if alone else BOTH
    script, style = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=select_autoescape(default=True))
    found = run.first
    return environment.get_template("page.html").render(
        title=workload.title or "a workload without a title",
        found=found,
        command=command,
        names=named,
        mark=_mark(named),
        shape=_shape(workload),
        text=dumps(workload),
        report=None if found is None else report(workload, run, found, command),
        data=htmlsafe_json_dumps(data(workload, run, named), separators=(",", ":")),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
    )


def data(workload: Workload, run: Run, names: Sequence[str]) -> dict[str, Any]:
    """What the script reads; plain values only. A side that is not known (the engine raised) is null, decisions that are the
    specification's are 0."""
    pool = workload.shape.blocks
    header, *lines = timeline(run)
    texts: dict[str, int] = {}
    sent: list[_Sent] = [_Sent(texts) for _ in names]
    steps = []
    for step, mine, theirs in sides(run.steps):
        both = len(names) == 2
        entries = compare(mine, theirs, pool) if mine is not None else []
        engine = decided.of_record(step.record) if step.record is not None else None
        specified = decided.of_step(step.step)
        steps.append(
            {
                "it": step.iteration,
                "events": list(step.events),
                "differs": [[e.name, e.engine, e.specification, e.note] for e in entries if e.differs],
                "sides": [delta(side) for delta, side in zip(sent, (mine, theirs) if both else (theirs,), strict=True)],
                "decided": [0 if engine == specified else engine, specified] if both else [specified],
            }
        )
    return {
        "names": list(names),
        "mark": _mark(names),
        "pool": pool,
        "rows": workload.shape.rows,
        "finding": _finding(run.first),
        "header": header,
        "lines": lines,
        "texts": list(texts),
        "late": list(run.late),
        "steps": steps,
    }


def _mark(names: Sequence[str]) -> str:
    return "first difference" if len(names) == 2 else "finding"


@attrs.define
class _Sent:
    """What was sent of one side: of the next iteration only what changed travels, and long texts only once."""

    texts: dict[str, int]
    before: dict[str, Any] = attrs.field(factory=dict)

    def __call__(self, side: Side | None) -> dict[str, Any] | None:
        if side is None:
            return None
        now = self._plain(side)
        changed = {name: _change(self.before.get(name), value) for name, value in now.items()}
        self.before = now
        return {name: value for name, value in changed.items() if value is not None}

    def _plain(self, side: Side) -> dict[str, Any]:
        return {
            "waiting": list(side.waiting),
            "running": list(side.running),
            "rows": {str(request): row for request, row in side.rows.items()},
            "tables": {str(request): list(table) for request, table in side.tables.items() if table},
            "requests": {
                str(request): [
                    self._text(side.status[request]),
                    side.computed.get(request),
                    side.num_tokens.get(request),
                ]
                for request in side.running
                if request in side.status
            },
            "blank": list(side.blank),
            "cached": list(side.cached),
            "published": {str(block): self._text(content(held)) for block, held in side.published.items()},
        }

    def _text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))


def _change(before: Any, now: Any) -> Any:
    """None for no change; of a mapping the entries that changed, and null for those that are gone."""
    if before == now:
        return None
    if not isinstance(now, dict) or before is None:
        return now
    gone = dict.fromkeys(sorted(before.keys() - now.keys()))  # a set of texts has another order in each process
    return gone | {key: value for key, value in now.items() if before.get(key) != value}


def _finding(found: Finding | None) -> dict[str, Any] | None:
    if found is None:
        return None
    facts = [[fact.name, fact.engine, fact.specification] for fact in found.facts]
    return {"check": found.check, "iteration": found.iteration, "headline": found.headline, "facts": facts}


def _shape(workload: Workload) -> Mapping[str, str]:
    return {item.name: _written(getattr(workload.shape, item.name)) for item in fields(workload.shape)}


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "none"
    return str(value)


def _hash(text: str) -> str:
    """As a content security policy names what it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
