"""Our own engine as a subject: what an adapter looks like for a scheduler that plans, executes and commits inside one step.

It also shows what the promises are worth without a specification: some of our catalogue's faults are seen by them, and the rest
is what the lockstep is for. ``README.md`` beside this file has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.control.plan import NO_TOKEN, Plan, Sampled
from engine.control.request import Refusal
from engine.control.scheduler import Submission
from engine.engine import Engine
from engine.trace import Shape
from properties.rungs import limits
from properties.subject import Ask, Batch, Compute, Holdings, Promises, Refused, Told, Work


class Bridge:
    """The engine's runner: turns a plan into a batch. Tables are followed by what the plans say of them."""

    def __init__(self) -> None:
        self.compute: Compute | None = None
        self.names: dict[int, int] = {}  # engine's id -> the harness's
        self._tables: dict[int, tuple[int, ...]] = {}

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        for grow in plan.grown:
            self._tables[grow.request] += (grow.block,)
        for seat in plan.seated:
            self._tables[seat.request] = seat.table
        work = [self._work(c.request, c.row, c.start, c.tokens, c.samples) for c in plan.chunks]
        work += [self._work(d.request, d.row, d.position, (d.token,), True) for d in plan.decodes]
        if not work or self.compute is None:
            return []
        sampled = self.compute(Batch(tuple(work)))
        tokens = [sampled[self.names[entry.request]] for entry in plan.sampling]
        return [Sampled(NO_TOKEN, failure="no token") if token is None else Sampled(token) for token in tokens]

    def _work(self, request: int, row: int, start: int, tokens: tuple[int, ...], samples: bool) -> Work:
        return Work(self.names[request], row, start, tokens, self._tables[request], samples)


class Ours:
    def __init__(self, shape: Shape) -> None:
        self.promises = Promises(
            fifo=True, priorities=True, shares=shape.prefix_cache, survives=True, survives_rows=True
        )
        self._bridge = Bridge()
        self._engine = Engine(limits(shape), self._bridge)
        self._ids: dict[int, int] = {}  # the harness's name -> engine's id

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, ask: Ask) -> None:
        submission = Submission(
            prompt=ask.prompt,
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            stop_ids=ask.stop_ids,
            min_tokens=ask.min_tokens,
            salt=ask.salt,
        )
        try:
            (own,) = self._engine.scheduler.submit(submission, 1)
        except Refusal as refusal:
            raise Refused(refusal.reason) from None
        self._ids[ask.request] = own
        self._bridge.names[own] = ask.request

    def abort(self, request: int) -> None:
        self._engine.abort(self._ids[request])

    def step(self, compute: Compute) -> Told:
        self._bridge.compute = compute
        record = self._engine.step()
        ended = tuple((self._name(end.request), end.reason) for end in (*record.aborted, *record.finished))
        return Told(ended, tuple(map(self._name, record.preempted)))

    def ledger(self) -> Holdings:
        own = self._engine.ledger()
        return Holdings(
            waiting=tuple(map(self._name, own.waiting)),
            running=tuple(map(self._name, own.running)),
            tables={self._name(request): table for request, table in own.tables.items()},
            rows={self._name(request): row for request, row in own.rows.items()},
            free=(*own.blank, *own.cached),
            cached=own.cached,
        )

    def audit(self) -> list[str]:
        return self._engine.audit()

    def _name(self, own: int) -> int:
        return self._bridge.names[own]


def make(shape: Shape) -> Ours:
    return Ours(shape)
