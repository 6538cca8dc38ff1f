"""What the engine did and is, against what the specification did and is, in one iteration. First difference wins.

    decisions   who: refused (by the driver), aborted, reaped, grown, preempted, admitted, scheduled, finished
    ledger      queues, tables, progress, blank stack, references, and the blocks that grow and admit handed out
    rows        rows, moves, and the row named in each part of the plan; also the order that follows from rows
    replay      launch, with reason and padding
    tokens      what the plan hands to compute, and what was appended
    text        what each caller has been told since it began

Each function returns the facts that differ. ``before`` and ``after`` are the model's states around the step, ``step`` is
what the model did. Block ids, rows and orders are compared as they are: the rules specify them (rules 4, 8 and 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.control.plan import Eager, Replay
from engine.control.record import Ledger, StepRecord
from properties.checks import Fact, differing


class Known(Protocol):
    """A request as the harness knows it: how long its prompt is, and prompt plus generated tokens."""

    @property
    def prompt_len(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int]: ...


class SoloText(Protocol):
    """The text of a request alone."""

    @property
    def text(self) -> str: ...

    def told(self, tokens: int) -> str: ...


class Listening(Known, Protocol):
    @property
    def text(self) -> SoloText: ...


State = Mapping[str, Any]
Step = Mapping[str, Any]


def decisions(record: StepRecord, step: Step) -> tuple[Fact, ...]:
    plan = record.plan
    return differing(
        [
            ("aborted", [end.request for end in record.aborted], step["aborted"]),
            ("reaped", list(record.reaped), step["reaped"]),
            ("grown", [grow.request for grow in plan.grown], [request for request, _ in step["grown"]]),
            ("preempted", list(record.preempted), step["preempted"]),
            ("admitted", [seat.request for seat in plan.seated], [request for request, *_ in step["admitted"]]),
            (
                "chunks",
                [(chunk.request, chunk.start, len(chunk.tokens), chunk.samples) for chunk in plan.chunks],
                [(request, *rest) for request, _, *rest in step["chunks"]],
            ),
            (
                "decodes",
                sorted((decode.request, decode.position) for decode in plan.decodes),
                sorted((request, position) for request, _, position in step["decodes"]),
            ),
            ("finished", sorted((end.request, end.reason) for end in record.finished), sorted(step["finished"])),
            ("failed", record.error is not None, step["error"]),
        ]
    )


def ledger(record: StepRecord, mine: Ledger, step: Step, after: State) -> tuple[Fact, ...]:
    tables = {request: tuple(table) for request, table in after["tables"].items()}
    return differing(
        [
            ("blocks grown", [grow.block for grow in record.plan.grown], [block for _, block in step["grown"]]),
            ("blocks seated", [seat.table for seat in record.plan.seated], [tuple(b) for _, _, b in step["admitted"]]),
            ("waiting", mine.waiting, tuple(after["waiting"])),
            ("running", mine.running, tuple(after["running"])),
            ("status", mine.status, after["status"]),
            ("tables", _held(mine.tables), _held(tables)),
            ("blank", mine.blank, tuple(after["blank"])),
            ("references", mine.references, _references(tables, len(mine.references))),
            ("computed", mine.computed, after["computed"]),
            ("num_tokens", mine.num_tokens, after["num_tokens"]),
        ]
    )


def cache(
    record: StepRecord, contents: Mapping[int, object], mine: Ledger, step: Step, after: State
) -> tuple[Fact, ...]:
    """Rule 11: who took how many hits, what is published where, and what would be evicted first. ``contents`` is the
    engine's published blocks, each named by what it holds."""
    starts = {chunk.request: chunk.start for chunk in record.plan.chunks}
    return differing(
        [
            (
                "hits",
                [(seat.request, starts.get(seat.request)) for seat in record.plan.seated],
                [
                    (request, at)
                    for request, _, at, *_ in step["chunks"]
                    if request in {r for r, *_ in step["admitted"]}
                ],
            ),
            ("cached", mine.cached, tuple(after.get("cached", ()))),
            ("published", dict(sorted(contents.items())), dict(sorted(after.get("published", {}).items()))),
        ]
    )


def _held(tables: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """A request that holds nothing may have an empty table or none: the same fact."""
    return {request: table for request, table in tables.items() if table}


def _references(tables: Mapping[int, tuple[int, ...]], blocks: int) -> tuple[int, ...]:
    references = [0] * blocks
    for table in tables.values():
        for block in table:
            references[block] += 1
    return tuple(references)


def rows(record: StepRecord, mine: Ledger, step: Step, before: State, after: State) -> tuple[Fact, ...]:
    plan = record.plan
    old: Mapping[int, int] = before["rows"]
    vacated = [old[request] for request in (*step["reaped"], *step["preempted"]) if request in old]
    return differing(
        [
            ("vacated", list(plan.vacated), vacated),
            ("rows grown", [grow.row for grow in plan.grown], [old[request] for request, _ in step["grown"]]),
            ("moves", [(move.src, move.dst, move.swap) for move in plan.moves], moves(step, old, vacated)),
            ("rows seated", [seat.row for seat in plan.seated], [row for _, row, _ in step["admitted"]]),
            ("rows of chunks", [chunk.row for chunk in plan.chunks], [row for _, row, *_ in step["chunks"]]),
            (
                "rows of decodes",
                [(decode.request, decode.row) for decode in plan.decodes],
                [(request, row) for request, row, _ in step["decodes"]],
            ),
            ("rows", mine.rows, {request: row for request, row in after["rows"].items() if row is not None}),
            (
                "order of samples",
                [request for request, _ in record.sampled],
                [request for request, _ in step["sampled"]],
            ),
            ("order of ends", [end.request for end in record.finished], [request for request, _ in step["finished"]]),
        ]
    )


def moves(step: Step, old: Mapping[int, int], vacated: Sequence[int]) -> list[tuple[int, int, bool]]:
    """The model's moves, with the swap derived from who sat where: ``dst`` was taken."""
    taken = set(old.values()) - set(vacated)
    moved = []
    for src, dst in step["moves"]:
        swap = dst in taken
        moved.append((src, dst, swap))
        taken.add(dst)
        if not swap:
            taken.discard(src)
    return moved


def replay(record: StepRecord, step: Step) -> tuple[Fact, ...]:
    launch = record.plan.launch
    mine: tuple[object, ...] | None = None
    if isinstance(launch, Replay):
        mine = ("replay", launch.rows, launch.width, launch.padding)
    elif isinstance(launch, Eager):
        mine = ("eager", launch.reason)
    theirs = step["launch"]
    return differing([("launch", mine, None if theirs is None else tuple(theirs))])


def tokens(record: StepRecord, step: Step, known: Mapping[int, Known]) -> tuple[Fact, ...]:
    """``known`` holds what the harness knows of each request before this step."""
    plan = record.plan
    seats = [seat for seat in plan.seated if seat.request in known]
    chunks = [chunk for chunk in plan.chunks if chunk.request in known]
    decodes = [decode for decode in plan.decodes if decode.request in known]
    return differing(
        [
            (
                "tokens seated",
                [(seat.prompt_len, seat.tokens) for seat in seats],
                [(known[seat.request].prompt_len, tuple(known[seat.request].tokens)) for seat in seats],
            ),
            (
                "tokens of chunks",
                [chunk.tokens for chunk in chunks],
                [tuple(known[c.request].tokens[c.start : c.start + len(c.tokens)]) for c in chunks],
            ),
            (
                "tokens of decodes",
                [decode.token for decode in decodes],
                [known[decode.request].tokens[-1] for decode in decodes],
            ),
            ("appended", sorted((request, got.token) for request, got in record.sampled), sorted(step["sampled"])),
        ]
    )


def text(told: Mapping[int, str], step: Step, known: Mapping[int, Listening]) -> tuple[Fact, ...]:
    """Told is exactly what is certain, and at the end exactly the text alone; an abort or an error adds nothing."""
    sampled = {request for request, _ in step["sampled"]}
    whole = {request for request, reason in step["finished"] if reason in ("stop", "length")}
    pairs: list[tuple[str, object, object]] = []
    for request, mine in told.items():
        if (caller := known.get(request)) is not None:
            generated = len(caller.tokens) - caller.prompt_len + (request in sampled)
            theirs = caller.text.text if request in whole else caller.text.told(generated)
            if mine != theirs:
                pairs.append((f"text of r{request}", ascii(mine), ascii(theirs)))
    return differing(pairs)
