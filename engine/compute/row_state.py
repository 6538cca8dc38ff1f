"""Block tables by cache row, as compute knows them: what the row operations of each plan say, and nothing else.

A row's whole state is one line here and one object in the sampler; both follow a move. Cells without a block hold the
trash block, so a table that is read beyond its length leads to no request's memory.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from engine.control.plan import Grow, Move, Plan, Seat


class RowOwner(Protocol):
    """Other state that follows the rows: the sampler's."""

    def vacate(self, row: int) -> None: ...
    def move(self, move: Move) -> None: ...
    def seat(self, seat: Seat) -> None: ...


@attrs.frozen
class RowView:
    """One occupied row, for those who check: who sits there and on which blocks."""

    row: int
    request: int
    table: tuple[int, ...]


class RowState:
    """``epoch`` changes with every operation but growth: while it stands, a row has the request that it had, and the blocks that
    it had stand where they stood."""

    def __init__(self, rows: int, width: int, trash_block: int) -> None:
        self.tables: npt.NDArray[np.int64] = np.full((rows, width), trash_block, dtype=np.int64)
        self.lengths = [0] * rows  # blocks in each table
        self.epoch = 0
        self.requests: list[int | None] = [None] * rows
        self._trash = trash_block

    def apply(self, plan: Plan, follower: RowOwner) -> None:
        """The row operations of a plan, in the plan's order: the tables first, which cannot fail, then ``follower``."""
        if plan.vacated or plan.moves or plan.seated:
            self.epoch += 1
        for row in plan.vacated:
            self._clear(row)
        for grow in plan.grown:
            self._grow(grow)
        for move in plan.moves:
            self._move(move)
        for seat in plan.seated:
            self._seat(seat)
        for row in plan.vacated:
            follower.vacate(row)
        for move in plan.moves:
            follower.move(move)
        for seat in plan.seated:
            follower.seat(seat)

    def view(self) -> tuple[RowView, ...]:
        return tuple(
            RowView(row, request, tuple(int(block) for block in self.tables[row, : self.lengths[row]]))
            for row, request in enumerate(self.requests)
            if request is not None
        )

    def _clear(self, row: int) -> None:
        self.tables[row] = self._trash
        self.lengths[row] = 0
        self.requests[row] = None

    def _grow(self, grow: Grow) -> None:
        length = self.lengths[grow.row]
        self.tables[grow.row, length] = grow.block
        self.lengths[grow.row] = length + 1

    def _move(self, move: Move) -> None:
        src, dst = move.src, move.dst
        if move.swap:
            self.tables[[src, dst]] = self.tables[[dst, src]]
            self.lengths[src], self.lengths[dst] = self.lengths[dst], self.lengths[src]
            self.requests[src], self.requests[dst] = self.requests[dst], self.requests[src]
        else:
            self.tables[dst] = self.tables[src]
            self.lengths[dst] = self.lengths[src]
            self.requests[dst] = self.requests[src]
            self._clear(src)

    def _seat(self, seat: Seat) -> None:
        self._clear(seat.row)
        self.tables[seat.row, : len(seat.table)] = seat.table
        self.lengths[seat.row] = len(seat.table)
        self.requests[seat.row] = seat.request
