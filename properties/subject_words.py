"""What the harness knows of a foreign scheduler's requests, and its iterations told in the words of timeline, page and trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from engine.trace import VOCAB, Shape, Submit, prompt_tokens
from properties.lockstep import most_tokens
from properties.subject import Ask, Batch, Holdings, Told, Work
from properties.subject_cache import Alone


@attrs.define
class Known:
    """One accepted request, as the harness knows it."""

    ask: Ask
    alone: Alone
    tokens: list[int]
    computed: int = 0
    started: bool = False
    ends: list[str] = attrs.field(factory=list)
    aborted: bool = False
    fails_at: int | None = None  # at which generated token (from 1) it has none
    dead: bool = False  # that has come

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.ask.prompt) :])


def asked(event: Submit, request: int, shape: Shape) -> Ask | None:
    """One choice of a submission, or None for what no scheduler need take: those are for the door of an engine."""
    prompt = prompt_tokens(event.prompt)
    most = most_tokens(shape, len(prompt))
    wanted = max(1, most) if event.max_tokens is None else event.max_tokens
    fits = wanted >= 1 and len(prompt) + wanted <= shape.max_model_len
    if not prompt or not fits or any(not 0 <= token < VOCAB for token in prompt):
        return None
    ask = Ask(request, prompt, wanted, event.priority, frozenset(), event.min_tokens, event.salt or None)
    if event.stop_at is None:
        return ask
    stop = Alone(ask).known(len(prompt) + event.stop_at)[-1]
    return attrs.evolve(ask, stop_ids=frozenset({stop}))


def step_of(
    held: Holdings, before: Holdings, batch: Batch | None, told: Told, known: Mapping[int, Known]
) -> dict[str, Any]:
    """What an iteration did. A decode is one token, the last one known, behind the prompt."""
    work = () if batch is None else tuple(work for work in batch.work if work.request in known)
    decodes = [item for item in work if _decodes(item, known[item.request])]
    new = {item.request: (item.row, item.table) for item in work if item.request not in before.rows}
    new |= {r: (row, held.tables.get(r, ())) for r, row in held.rows.items() if r not in before.rows}
    return {
        "aborted": [request for request, reason in told.ended if reason == "abort"],
        "preempted": list(told.preempted),
        "admitted": [(request, row, tuple(table)) for request, (row, table) in new.items()],
        "chunks": [(w.request, w.row, w.start, len(w.tokens), w.samples) for w in work if w not in decodes],
        "decodes": [(w.request, w.row, w.start) for w in decodes],
        "launch": None,
        "finished": [(request, reason) for request, reason in told.ended if reason != "abort"],
    }


def _decodes(work: Work, known: Known) -> bool:
    return len(work.tokens) == 1 and work.samples and work.start >= len(known.ask.prompt)


def state_of(held: Holdings, known: Mapping[int, Known]) -> dict[str, Any]:
    """What holds after it."""
    live = (*held.waiting, *held.running)
    after: dict[str, Any] = {
        "waiting": list(held.waiting),
        "running": list(held.running),
        "rows": dict(held.rows),
        "tables": {request: tuple(table) for request, table in held.tables.items()},
        "status": dict.fromkeys(held.waiting, "waiting") | {r: _status(known.get(r)) for r in held.running},
        "computed": {r: known[r].computed if r in known else 0 for r in live},
        "num_tokens": {r: len(known[r].tokens) if r in known else 0 for r in live},
        "blank": [block for block in held.free if block not in held.cached],
    }
    return after | ({"cached": list(held.cached)} if held.cached else {})


def _status(known: Known | None) -> str:
    if known is None or not known.generated:
        return "prefilling"
    return "finished" if known.ends else "decoding"
