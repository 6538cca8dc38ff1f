"""One iteration's decisions as a short digest: who was ended, moved, seated, computed and launched, and on which blocks.

Token ids and texts are left out, so that a recording gives nothing of them away, and so that the same decisions have the
same digest whatever model made the tokens. Two runs with equal digests in every iteration made the same decisions.
"""

from __future__ import annotations

import hashlib

from engine.control.plan import Eager, Replay
from engine.control.record import Finished, StepRecord

DIGITS = 12


def digest(record: StepRecord) -> str:
    """``DIGITS`` hex digits of BLAKE2b over the decisions of ``record``; a stable text form is hashed."""
    plan = record.plan
    launch: object = None
    if isinstance(plan.launch, Replay):
        launch = ("replay", plan.launch.rows, plan.launch.width, plan.launch.padding)
    elif isinstance(plan.launch, Eager):
        launch = ("eager", plan.launch.reason)
    decisions = (
        _ends(record.aborted),
        record.reaped,
        record.preempted,
        plan.vacated,
        [(grow.request, grow.row, grow.block) for grow in plan.grown],
        [(move.request, move.src, move.dst, move.swap) for move in plan.moves],
        [(seat.request, seat.row, len(seat.tokens), seat.prompt_len, seat.table) for seat in plan.seated],
        [(chunk.request, chunk.row, chunk.start, len(chunk.tokens), chunk.samples) for chunk in plan.chunks],
        [(decode.request, decode.row, decode.position) for decode in plan.decodes],
        launch,
        [request for request, _ in record.sampled],
        _ends(record.finished),
        record.error is not None,
    )
    return hashlib.blake2b(repr(decisions).encode(), digest_size=DIGITS // 2).hexdigest()


def _ends(ends: tuple[Finished, ...]) -> list[tuple[int, str]]:
    """An answer that stopped and one that reached its length ended alike: which it was is the tokens' doing."""
    return [(end.request, "answered" if end.reason in ("stop", "length") else end.reason) for end in ends]
