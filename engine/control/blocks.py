"""The block pool: which KV blocks are blank and how many tables name each of the others.

Free order (rule 10) is part of the specification, because the block ids that a request gets are compared in every
iteration: blank blocks are a stack that first hands out 0, 1, 2, ...; a released block is pushed, and a release goes
from the tail of a table to its head, so the head of the table is handed out next:

    blank (top first)   0 1 2 3 4 5      take, take, take  -> table [0 1 2]
    blank               3 4 5            release [0 1 2]: push 2, push 1, push 0
    blank               0 1 2 3 4 5

Blocks carry a reference count, not an owner: a block may stand in several tables once prefixes are shared. Nothing here
knows about requests, so nothing here can be tempted to look at one.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """``num_blocks`` blocks, ids 0..num_blocks-1. The trash block of the kernels is not one of them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # top of the stack at the end
        self.references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that a request could be given now."""
        return len(self._blank)

    def blank(self) -> tuple[int, ...]:
        """Blank blocks, the next to be handed out first."""
        return tuple(reversed(self._blank))

    def take(self) -> int:
        """A blank block with one reference. Raises ``RuntimeError`` when none is left: the caller checks first."""
        if not self._blank:
            raise RuntimeError(f"no free block: all {self.num_blocks} are held")
        block = self._blank.pop()
        self.references[block] = 1
        return block

    def release(self, table: Sequence[int]) -> None:
        """Drops one reference of each block of ``table``, tail first; a block without references is blank again.

        Raises ``RuntimeError`` on a block that nobody holds, before it could enter the stack a second time.
        """
        for block in reversed(table):
            if self.references[block] < 1:
                raise RuntimeError(f"block {block} is released, but no table holds it")
            self.references[block] -= 1
            if self.references[block] == 0:
                self._blank.append(block)
