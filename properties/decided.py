"""What one iteration decided, in the same words for both sides: the engine's from its record, the specification's from its step.

Names and order are those of rule 3. The page shows them side by side; the report shows only what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.control.plan import Replay
from engine.control.record import StepRecord
from properties.sides import blocks, people

Decided = dict[str, str]  # name -> text, empty where nothing of the kind happened


def of_record(record: StepRecord) -> Decided:
    plan = record.plan
    told: tuple[Any, ...] | None = None
    if isinstance(plan.launch, Replay):
        told = ("replay", plan.launch.rows, plan.launch.width, plan.launch.padding)
    elif plan.launch is not None:
        told = ("eager", plan.launch.reason)
    seated = {seat.request for seat in plan.seated}
    starts = {chunk.request: chunk.start for chunk in plan.chunks if chunk.request in seated}
    return {
        "aborted": people(end.request for end in record.aborted),
        "reaped": people(record.reaped),
        "grown": " ".join(f"r{grow.request}+b{grow.block}" for grow in plan.grown),
        "preempted": people(record.preempted),
        "moves": _moves((move.src, move.dst) for move in plan.moves),
        "admitted": "; ".join(
            f"r{seat.request}@{seat.row} on {blocks(seat.table)}{_cached(starts.get(seat.request, 0))}"
            for seat in plan.seated
        ),
        "chunks": "; ".join(
            _chunk(chunk.request, chunk.start, len(chunk.tokens), chunk.samples) for chunk in plan.chunks
        ),
        "decodes": " ".join(f"r{decode.request}:{decode.position}" for decode in plan.decodes),
        "launch": _launch(told),
        "execute": "raised" if record.error is not None else "",
        "sampled": _sampled((request, got.token) for request, got in record.sampled),
        "finished": "; ".join(f"r{end.request} {end.reason}" for end in record.finished),
    }


def of_step(step: Mapping[str, Any]) -> Decided:
    """Of the specification, or of a subject that tells its steps in the same words; what it does not tell is empty."""
    admitted = step.get("admitted", ())
    starts = {request: at for request, _, at, *_ in step.get("chunks", ())}
    return {
        "aborted": people(step.get("aborted", ())),
        "reaped": people(step.get("reaped", ())),
        "grown": " ".join(f"r{request}+b{block}" for request, block in step.get("grown", ())),
        "preempted": people(step.get("preempted", ())),
        "moves": _moves(step.get("moves", ())),
        "admitted": "; ".join(
            f"r{request}@{row} on {blocks(table)}{_cached(starts.get(request, 0))}" for request, row, table in admitted
        ),
        "chunks": "; ".join(
            _chunk(request, at, count, samples) for request, _, at, count, samples in step.get("chunks", ())
        ),
        "decodes": " ".join(f"r{request}:{position}" for request, _, position in step.get("decodes", ())),
        "launch": _launch(step.get("launch")),
        "execute": "raised" if step.get("error") else "",
        "sampled": _sampled(step.get("sampled", ())),
        "finished": "; ".join(f"r{request} {reason}" for request, reason in step.get("finished", ())),
    }


def _moves(moves: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"{src}>{dst}" for src, dst in moves)


def _chunk(request: int, start: int, count: int, samples: bool) -> str:
    return f"r{request} {start}..{start + count - 1}" + (" samples" if samples else "")


def _cached(start: int) -> str:
    return f", {start} tokens cached" if start else ""


def _launch(launch: Sequence[Any] | None) -> str:
    if launch is None:
        return ""
    if launch[0] == "eager":
        return f"eager: {launch[1]}"
    _, rows, width, padding = launch
    padded = f"{padding} padded row{'s' if padding > 1 else ''}" if padding else "no padding"
    return f"replay {rows}x{width}, {padded}"


def _sampled(pairs: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"r{request}:{token}" for request, token in pairs)
