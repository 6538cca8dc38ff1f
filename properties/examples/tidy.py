"""The contiguous slots once more, but a head that fails only because the free blocks lie in pieces has the pool tidied.

Everybody's range moves down to the first free block, in the order of the pool, and the content is copied along:

    blocks    0 1 2 3 4 5 6 7 8 9
    held      r0r0. . . r2r2. . .      r3 needs 5, 6 are free, but in two pieces of 3
    held      r0r0r2r2r3r3r3r3r3.      r2 has moved to 2 and 3

A copy must not overwrite what is still to be copied. Moving down in ascending order it cannot; ``backwards`` is the fault.
"""

from __future__ import annotations

from engine.trace import Shape
from properties.examples.slots import Gaps, Slots
from properties.subject import Batch


class Tidy(Slots):
    def _batch(self) -> Batch:
        copies = self._tidied() if self._in_pieces() else ()
        return Batch(super()._batch().work, copies)

    def _in_pieces(self) -> bool:
        """Whether the head of the queue would fit if all free blocks lay together."""
        if not self._waiting or len(self._running) == self._shape.rows:
            return False
        sizes, need = self._gaps.free.values(), self._need(self._waiting[0])
        return max(sizes, default=0) < need <= sum(sizes)

    def _tidied(self) -> tuple[tuple[int, int], ...]:
        """Moves everybody down; returns which block went where."""
        copies: list[tuple[int, int]] = []
        start = 0
        for running in sorted(self._running, key=lambda one: one.table[0]):
            table = tuple(range(start, start + len(running.table)))
            copies += [(old, new) for old, new in zip(running.table, table, strict=True) if old != new]
            running.table = table
            start += len(table)
        self._gaps.free = {start: self._shape.blocks - start}
        return tuple(copies)


class Backwards(Tidy):
    """Copies in descending order: a range that moves by less than its length overwrites its own end."""

    def _tidied(self) -> tuple[tuple[int, int], ...]:
        return super()._tidied()[::-1]


def make(shape: Shape) -> Tidy:
    return Tidy(shape, Gaps(shape.blocks))


def backwards(shape: Shape) -> Tidy:
    return Backwards(shape, Gaps(shape.blocks))
