"""The engine under test, as the lockstep driver sees it. A rung says how much of the engine is real.

``ledger``: the real ``Engine`` with its real control (door, queues, blocks, rows, replay decision, audit) over a runner that
computes nothing. The runner keeps its own rows, exactly as compute would from the row operations of the plans, and a token
depends on who sits in the row and at which position: a plan that names a wrong row or position yields a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.control.counters import Counters
from engine.control.limits import Limits
from engine.control.plan import Chunk, Decode, Plan, Sampled
from engine.control.record import Ledger, StepRecord
from engine.control.scheduler import Submission
from engine.engine import Engine
from engine.trace import VOCAB, Shape, Submit, prompt_tokens
from properties import solo

INJECTED = "injected by the workload"


class Rung(Protocol):
    @property
    def has_work(self) -> bool: ...

    @property
    def counters(self) -> Counters: ...

    def submit(self, event: Submit, first_id: int) -> tuple[int, ...]:
        """One Submission of ``event.n`` choices, ids from ``first_id``. Raises ``Refusal``."""
        ...

    def abort(self, request: int) -> None: ...

    def step(self, *, fails: bool) -> StepRecord: ...

    def ledger(self) -> Ledger: ...

    def audit(self) -> list[str]: ...


class StepFailed(Exception):
    """What execute raises when the workload says that it fails."""


class BadPlan(Exception):
    """A plan that no runner could execute: it names a row that nobody has, or seats two requests in one."""


class StubRunner:
    """Rows and prompt lengths, nothing else: ``rows[row] = (request, prompt_len)``."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int]] = {}
        self.fails = False
        self.bad: BadPlan | None = None

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        try:
            self._apply(plan)
            if self.fails and plan.forwards:  # after the row operations; where nothing is computed, nothing can fail
                raise StepFailed(INJECTED)
            return [Sampled(self._token(entry)) for entry in plan.sampling]
        except BadPlan as bad:
            self.bad = bad  # the engine contains what execute raises; the harness wants to know
            raise

    def _apply(self, plan: Plan) -> None:
        for row in plan.vacated:
            if self.rows.pop(row, None) is None:
                raise BadPlan(f"the plan vacates row {row}, but nobody sits there")
        for move in plan.moves:
            if move.src not in self.rows:
                raise BadPlan(f"the plan moves row {move.src}, but nobody sits there")
            moved = self.rows.pop(move.src)
            if move.dst in self.rows:
                self.rows[move.src] = self.rows[move.dst]
            self.rows[move.dst] = moved
        for seat in plan.seated:
            if seat.row in self.rows:
                raise BadPlan(
                    f"the plan seats r{seat.request} in row {seat.row}, but r{self.rows[seat.row][0]} sits there"
                )
            self.rows[seat.row] = (seat.request, seat.prompt_len)

    def _token(self, entry: Chunk | Decode) -> int:
        if entry.row not in self.rows:
            raise BadPlan(f"the plan samples row {entry.row}, but nobody sits there")
        request, prompt_len = self.rows[entry.row]
        last = entry.position if isinstance(entry, Decode) else entry.start + len(entry.tokens) - 1
        return solo.token(request, last + 1 - prompt_len)


class LedgerRung:
    """The real engine over a stub runner."""

    def __init__(self, shape: Shape) -> None:
        self._runner = StubRunner()
        self._engine = Engine(limits(shape), self._runner)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    def submit(self, event: Submit, first_id: int) -> tuple[int, ...]:
        submission = Submission(
            prompt=prompt_tokens(event.prompt),
            max_tokens=event.max_tokens,
            priority=event.priority,
            stop_ids=solo.stop_ids(first_id, event),
            min_tokens=event.min_tokens,
            salt=event.salt or None,
        )
        return self._engine.scheduler.submit(submission, event.n)  # the door itself, which also judges max_tokens 0

    def abort(self, request: int) -> None:
        self._engine.abort(request)

    def step(self, *, fails: bool) -> StepRecord:
        """One iteration. Raises ``BadPlan``, and whatever the engine raises where it should not."""
        self._runner.fails = fails
        record = self._engine.step()
        if self._runner.bad is not None:
            raise self._runner.bad
        return record

    def ledger(self) -> Ledger:
        return self._engine.ledger()

    def audit(self) -> list[str]:
        return self._engine.audit()


RUNGS: dict[str, type[LedgerRung]] = {"ledger": LedgerRung}


def limits(shape: Shape) -> Limits:
    return Limits(
        num_blocks=shape.blocks,
        block_size=shape.block_size,
        max_num_seqs=shape.rows,
        max_num_batched_tokens=shape.budget,
        max_model_len=shape.max_model_len,
        vocab_size=VOCAB,
        watermark=shape.watermark,
        max_waiting=shape.max_waiting,
        persistent_batch=shape.persistent_batch,
        prefix_cache=shape.prefix_cache,
        captures=shape.captures,
    )
