"""The ledger rung: the real ``Engine`` with its real control (door, queues, blocks, rows, replay decision, audit) over a
runner that computes nothing.

The runner keeps its own rows, exactly as compute would from the row operations of the plans, and a token depends on who sits
in the row and at which position: a plan that names a wrong row or position yields a wrong token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.control.plan import NO_TOKEN, Chunk, Decode, Plan, Sampled
from engine.control.record import StepRecord
from engine.trace import Shape, answer_token
from properties import solo
from properties.row_failures import INJECTED
from properties.rungs import EngineRung, StepFailed


class BadPlan(Exception):
    """A plan that no runner could execute: it names a row that nobody has, or seats two requests in one."""


class StubRunner:
    """Rows and prompt lengths, nothing else: ``rows[row] = (request, prompt_len)``. ``dead``: see ``EngineRung``."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, int]] = {}
        self.dead: Mapping[int, int] = {}
        self.fails = False
        self.bad: BadPlan | None = None

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        try:
            self._apply(plan)
            if self.fails and plan.forwards:  # after the row operations; where nothing is computed, nothing can fail
                raise StepFailed(INJECTED)
            return [self._sample(entry) for entry in plan.sampling]
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

    def _sample(self, entry: Chunk | Decode) -> Sampled:
        if entry.row not in self.rows:
            raise BadPlan(f"the plan samples row {entry.row}, but nobody sits there")
        request, prompt_len = self.rows[entry.row]
        last = entry.position if isinstance(entry, Decode) else entry.start + len(entry.tokens) - 1
        if self.dead.get(request) == last + 1:
            return Sampled(NO_TOKEN, failure=INJECTED)
        return Sampled(answer_token(request, last + 1 - prompt_len))


class LedgerRung(EngineRung):
    """The real engine over a stub runner."""

    def __init__(self, shape: Shape) -> None:
        self._runner = StubRunner()
        super().__init__(shape, self._runner, solo.AffineOracle())
        self._runner.dead = self.dead

    def step(self, *, fails: bool) -> StepRecord:
        """One iteration. Raises ``BadPlan``, and whatever the engine raises where it should not."""
        self._runner.fails = fails
        record = self._engine.step()
        if self._runner.bad is not None:
            raise self._runner.bad
        return record
