"""A scheduler of another shape: every request gets one contiguous range of blocks, for all it may ever need, and keeps it.

Nothing is paged, grown, shared or preempted. A request that was admitted is sure to finish; the price is that the pool
holds reservations instead of tokens, and that free blocks may lie in gaps too small for anybody:

    blocks    0 1 2 3 4 5 6 7 8 9
    held      r0r0. . . r2r2. . .      gaps [2..5) and [7..10)
    r3 needs 4: it waits, although 6 are free; when r2 ends, its two blocks join both gaps into one of 8

Queue: first come, first served, nobody overtakes. Prompts are chunked by the iteration's budget, decoding rows first.
The last two classes are faults to hunt for; ``README.md`` beside this file shows how.
"""

from __future__ import annotations

import attrs

from engine.trace import Shape
from properties.subject import Ask, Batch, Compute, ComputeFailed, Holdings, Promises, Refused, Told, Work


@attrs.define
class Gaps:
    """The free ranges of the pool, ``start -> length``, in ascending order and never touching."""

    blocks: int
    free: dict[int, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.free = {0: self.blocks}

    def take(self, length: int) -> int | None:
        """The start of the first gap that is long enough, shortened by what was taken; None if there is none."""
        for start, size in self.free.items():
            if size >= length:
                del self.free[start]
                if size > length:
                    self.put(start + length, size - length)
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """A range comes back and joins the gaps on both sides of it."""
        after = start + length
        length += self.free.pop(after, 0)
        for before, size in list(self.free.items()):
            if before + size == start:
                del self.free[before]
                start, length = before, size + length
        self.put(start, length)

    def put(self, start: int, length: int) -> None:
        self.free = dict(sorted({**self.free, start: length}.items()))


@attrs.define(eq=False)
class Running:
    ask: Ask
    row: int
    table: tuple[int, ...]
    tokens: list[int]
    computed: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def decodes(self) -> bool:
        return self.generated > 0

    def ended(self) -> str | None:
        if self.tokens[-1] in self.ask.stop_ids and self.generated >= max(1, self.ask.min_tokens):
            return "stop"
        return "length" if self.generated == self.ask.max_tokens else None


class Slots:
    promises = Promises(fifo=True, preempts=False, survives=True, survives_rows=True)

    def __init__(self, shape: Shape, gaps: Gaps) -> None:
        self._shape = shape
        self._gaps = gaps
        self._waiting: list[Ask] = []
        self._running: list[Running] = []
        self._aborted: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._aborted)

    def submit(self, ask: Ask) -> None:
        if self._need(ask) > self._shape.blocks:
            raise Refused(f"{self._need(ask)} blocks needed, the pool has {self._shape.blocks}")
        if len(self._waiting) >= self._shape.max_waiting:
            raise Refused(f"{len(self._waiting)} requests wait already")
        self._waiting.append(ask)

    def abort(self, request: int) -> None:
        known = [*(ask.request for ask in self._waiting), *(running.ask.request for running in self._running)]
        if request in known:
            self._aborted.add(request)

    def step(self, compute: Compute) -> Told:
        ended = [(request, "abort") for request in sorted(self._aborted)]
        self._waiting = [ask for ask in self._waiting if ask.request not in self._aborted]
        self._leave(self._aborted)
        self._aborted = set()
        batch = self._batch()
        if batch.work:
            ended += self._compute(batch, compute)
        self._leave({request for request, _ in ended})
        return Told(tuple(ended))

    def ledger(self) -> Holdings:
        return Holdings(
            waiting=tuple(ask.request for ask in self._waiting),
            running=tuple(running.ask.request for running in self._running),
            tables={running.ask.request: running.table for running in self._running},
            rows={running.ask.request: running.row for running in self._running},
            free=tuple(block for start, size in self._gaps.free.items() for block in range(start, start + size)),
        )

    def audit(self) -> list[str]:
        return [
            f"gap {s} of {n} blocks leaves the pool" for s, n in self._gaps.free.items() if s + n > self._shape.blocks
        ]

    def _need(self, ask: Ask) -> int:
        return -(-(len(ask.prompt) + ask.max_tokens - 1) // self._shape.block_size)  # the last token is never computed

    def _batch(self) -> Batch:
        return Batch(tuple(self._plan()))

    def _plan(self) -> list[Work]:
        decoding = [running for running in self._running if running.decodes]
        left = self._shape.budget - len(decoding)
        work = [self._work(running, 1) for running in decoding]
        for running in [running for running in self._running if not running.decodes]:
            work.append(self._work(running, min(left, len(running.tokens) - running.computed)))
            left -= len(work[-1].tokens)
        while left > 0 and self._waiting and (admitted := self._admit()) is not None:
            work.append(self._work(admitted, min(left, len(admitted.tokens))))
            left -= len(work[-1].tokens)
        return [item for item in work if item.tokens]

    def _admit(self) -> Running | None:
        """The head of the queue, if there is a row and a gap for it; nobody else."""
        rows = sorted(set(range(self._shape.rows)) - {running.row for running in self._running})
        need = self._need(self._waiting[0])
        start = self._gaps.take(need) if rows else None
        if start is None:
            return None
        ask = self._waiting.pop(0)
        self._running.append(Running(ask, rows[0], tuple(range(start, start + need)), list(ask.prompt)))
        return self._running[-1]

    def _work(self, running: Running, count: int) -> Work:
        start = running.computed
        tokens = tuple(running.tokens[start : start + count])
        samples = start + count == len(running.tokens)
        return Work(running.ask.request, running.row, start, tokens, running.table, samples)

    def _compute(self, batch: Batch, compute: Compute) -> list[tuple[int, str]]:
        try:
            sampled = compute(batch)
        except ComputeFailed:
            return [(work.request, "error") for work in batch.work]
        dead = {request for request, token in sampled.items() if token is None}
        planned = {work.request: work for work in batch.work}
        for running in self._running:
            if (work := planned.get(running.ask.request)) is not None:
                running.computed += len(work.tokens)
                running.tokens += [token] if (token := sampled.get(work.request)) is not None else []
        alive = [running for running in self._running if running.ask.request in sampled.keys() - dead]
        told = [(running.ask.request, running.ended()) for running in alive]
        return [(r, "error") for r in sorted(dead)] + [(r, reason) for r, reason in told if reason is not None]

    def _leave(self, gone: set[int]) -> None:
        for running in [running for running in self._running if running.ask.request in gone]:
            self._running.remove(running)
            self._gaps.give(running.table[0], len(running.table))


def make(shape: Shape) -> Slots:
    """The scheduler as it should be."""
    return Slots(shape, Gaps(shape.blocks))


class Unjoined(Gaps):
    """A range that comes back joins the gap behind it, never the one before it: gaps stay small, and somebody waits for ever."""

    def give(self, start: int, length: int) -> None:
        self.put(start, length + self.free.pop(start + length, 0))


class Greedy(Gaps):
    """Joining with the gap before it, a range comes out one block longer: that block is free and held, or beyond the pool."""

    def give(self, start: int, length: int) -> None:
        joins = any(before + size == start for before, size in self.free.items())
        super().give(start, length + joins)


def unjoined(shape: Shape) -> Slots:
    return Slots(shape, Unjoined(shape.blocks))


def greedy(shape: Shape) -> Slots:
    return Slots(shape, Greedy(shape.blocks))
