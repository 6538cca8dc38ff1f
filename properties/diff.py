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
Pair = tuple[str, object, object]  # a name, the engine's value, the specification's


def decisions(record: StepRecord, step: Step) -> tuple[Fact, ...]:
    plan = record.plan
    pairs: list[Pair] = []
    if not record.iteration == plan.iteration == step["iteration"]:
        pairs.append(("iteration", (record.iteration, plan.iteration), (step["iteration"],) * 2))
    if record.aborted or step["aborted"]:
        pairs.append(("aborted", [end.request for end in record.aborted], step["aborted"]))
    if record.reaped or step["reaped"]:
        pairs.append(("reaped", list(record.reaped), step["reaped"]))
    if plan.grown or step["grown"]:
        pairs.append(("grown", [grow.request for grow in plan.grown], [request for request, _ in step["grown"]]))
    if record.preempted or step["preempted"]:
        pairs.append(("preempted", list(record.preempted), step["preempted"]))
    if plan.seated or step["admitted"]:
        mine: object = [seat.request for seat in plan.seated]
        pairs.append(("admitted", mine, [request for request, *_ in step["admitted"]]))
    if plan.chunks or step["chunks"]:
        mine = [(chunk.request, chunk.start, len(chunk.tokens), chunk.samples) for chunk in plan.chunks]
        pairs.append(("chunks", mine, [(request, *rest) for request, _, *rest in step["chunks"]]))
    if plan.decodes or step["decodes"]:
        mine = sorted([(decode.request, decode.position) for decode in plan.decodes])
        pairs.append(("decodes", mine, sorted([(request, position) for request, _, position in step["decodes"]])))
    if record.finished or step["finished"]:
        mine = sorted([(end.request, end.reason) for end in record.finished])
        pairs.append(("finished", mine, sorted(step["finished"])))
    pairs.append(("failed", record.error is not None, step["error"]))
    return differing(pairs)


def ledger(record: StepRecord, mine: Ledger, step: Step, after: State) -> tuple[Fact, ...]:
    tables = after["tables"]
    pairs: list[Pair] = []
    if record.plan.grown or step["grown"]:
        pairs.append(
            ("blocks grown", [grow.block for grow in record.plan.grown], [block for _, block in step["grown"]])
        )
    if record.plan.seated or step["admitted"]:
        seated = [seat.table for seat in record.plan.seated]
        pairs.append(("blocks seated", seated, [table for _, _, table in step["admitted"]]))
    pairs += [
        ("waiting", mine.waiting, tuple(after["waiting"])),
        ("running", mine.running, tuple(after["running"])),
        ("status", mine.status, after["status"]),
        ("tables", _held(mine.tables), _held(tables)),
        ("blank", mine.blank, tuple(after["blank"])),
        ("references", mine.references, _references(tables, len(mine.references))),
        ("computed", mine.computed, after["computed"]),
        ("num_tokens", mine.num_tokens, after["num_tokens"]),
    ]
    return differing(pairs)


def cache(
    record: StepRecord, contents: Mapping[int, object], mine: Ledger, step: Step, after: State
) -> tuple[Fact, ...]:
    """Rule 11: who took how many hits, what is published where, and what would be evicted first. ``contents`` is the
    engine's published blocks, each named by what it holds."""
    pairs: list[Pair] = []
    if record.plan.seated or step["admitted"]:
        starts = {chunk.request: chunk.start for chunk in record.plan.chunks}
        admitted = {request for request, *_ in step["admitted"]}
        hits = [(request, at) for request, _, at, *_ in step["chunks"] if request in admitted]
        pairs.append(("hits", [(seat.request, starts.get(seat.request)) for seat in record.plan.seated], hits))
    pairs.append(("cached", mine.cached, tuple(after.get("cached", ()))))
    published = after.get("published", {})
    if contents != published:
        pairs.append(("published", dict(sorted(contents.items())), dict(sorted(published.items()))))
    return differing(pairs)


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
    pairs: list[Pair] = [("vacated", plan.vacated, tuple(vacated))]
    if plan.grown or step["grown"]:
        pairs.append(("rows grown", [grow.row for grow in plan.grown], [old[request] for request, _ in step["grown"]]))
    if plan.moves or step["moves"]:
        moved = [(move.src, move.dst, move.swap) for move in plan.moves]
        pairs.append(("moves", moved, moves(step, old, vacated)))
    if plan.seated or step["admitted"]:
        pairs.append(("rows seated", [seat.row for seat in plan.seated], [row for _, row, _ in step["admitted"]]))
    if plan.chunks or step["chunks"]:
        pairs.append(("rows of chunks", [chunk.row for chunk in plan.chunks], [row for _, row, *_ in step["chunks"]]))
    if plan.decodes or step["decodes"]:
        decoding = [(decode.request, decode.row) for decode in plan.decodes]
        pairs.append(("rows of decodes", decoding, [(request, row) for request, row, _ in step["decodes"]]))
    pairs.append(("rows", mine.rows, after["rows"]))
    if record.sampled or step["sampled"]:
        order = [request for request, _ in record.sampled]
        pairs.append(("order of samples", order, [request for request, _ in step["sampled"]]))
    if record.finished or step["finished"]:
        order = [end.request for end in record.finished]
        pairs.append(("order of ends", order, [request for request, _ in step["finished"]]))
    return differing(pairs)


def moves(step: Step, old: Mapping[int, int], vacated: Sequence[int]) -> list[tuple[int, int, bool]]:
    """The model's moves, with the swap derived from who sat where: ``dst`` was taken."""
    if not step["moves"]:
        return []
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
    return () if mine == theirs else differing([("launch", mine, theirs)])


def tokens(record: StepRecord, step: Step, known: Mapping[int, Known]) -> tuple[Fact, ...]:
    """``known`` holds what the harness knows of each request before this step."""
    plan = record.plan
    pairs: list[Pair] = []
    seats = [seat for seat in plan.seated if seat.request in known] if plan.seated else []
    if seats:
        theirs = [(known[seat.request].prompt_len, tuple(known[seat.request].tokens)) for seat in seats]
        pairs.append(("tokens seated", [(seat.prompt_len, seat.tokens) for seat in seats], theirs))
    chunks = [chunk for chunk in plan.chunks if chunk.request in known] if plan.chunks else []
    if chunks:
        parts = [tuple(known[c.request].tokens[c.start : c.start + len(c.tokens)]) for c in chunks]
        pairs.append(("tokens of chunks", [chunk.tokens for chunk in chunks], parts))
    decodes = [decode for decode in plan.decodes if decode.request in known] if plan.decodes else []
    if decodes:
        last = [known[decode.request].tokens[-1] for decode in decodes]
        pairs.append(("tokens of decodes", [decode.token for decode in decodes], last))
    if record.sampled or step["sampled"]:
        sampled = sorted([(request, got.token) for request, got in record.sampled])
        pairs.append(("appended", sampled, sorted(step["sampled"])))
    return differing(pairs)


def text(told: Mapping[int, str], step: Step, known: Mapping[int, Listening]) -> tuple[Fact, ...]:
    """Told is exactly what is certain, and at the end exactly the text alone; an abort or an error adds nothing."""
    failed = {request for request, reason in step["finished"] if reason == "error"}
    sampled = {request for request, _ in step["sampled"]} - failed
    whole = {request for request, reason in step["finished"] if reason in ("stop", "length")}
    pairs: list[tuple[str, object, object]] = []
    for request, mine in told.items():
        if (caller := known.get(request)) is not None:
            generated = len(caller.tokens) - caller.prompt_len + (request in sampled)
            theirs = caller.text.text if request in whole else caller.text.told(generated)
            if mine != theirs:
                pairs.append((f"text of r{request}", ascii(mine), ascii(theirs)))
    return differing(pairs)
