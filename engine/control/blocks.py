"""The block pool: which KV blocks are blank, which hold content worth keeping, and how many tables name each one.

A block is in one of three states, and only the reference count tells the first from the others:

    owned     stands in at least one table (``references`` counts the tables)
    cached    in no table, but its content is published: a later request may take it over as it is (rule 11)
    blank     in no table and not published

Free order (rule 10) is part of the specification, because the block ids that a request gets are compared in every
iteration. Blank blocks are a stack that first hands out 0, 1, 2, ...; a release goes from the tail of a table to its head:

    blank (top first)   0 1 2 3 4 5      take, take, take  -> table [0 1 2], of which 0 and 1 are published
    blank               3 4 5            release [0 1 2]: push 2; then 1, then 0 become cached
    blank               2 3 4 5          cached, least recently freed first: 1 0

Cached blocks are taken only when no blank one is left, least recently freed first, so the tail of a prefix goes before
its head: a head without its tail is still a shorter prefix, a tail without its head is unreachable.

Nothing here knows about requests, so nothing here can be tempted to look at one.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.control.prefix import BlockKey


class BlockPool:
    """``num_blocks`` blocks, ids 0..num_blocks-1. The trash block of the kernels is not one of them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # top of the stack at the end
        self._cached: dict[
            int, None
        ] = {}  # without owner, least recently freed first; a dict for O(1) removal from within
        self._published: dict[int, BlockKey] = {}  # block -> what it holds
        self._index: dict[bytes, int] = {}  # digest -> the block that was published first
        self.references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that a request could be given now: blank, or cached without owner."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Of the free ones, those whose content is published."""
        return len(self._cached)

    def blank(self) -> tuple[int, ...]:
        """Blank blocks, the next to be handed out first."""
        return tuple(reversed(self._blank))

    def cached(self) -> tuple[int, ...]:
        """Cached blocks without owner, the next to be evicted first."""
        return tuple(self._cached)

    def published(self) -> dict[int, BlockKey]:
        """What every published block holds, owned or not."""
        return dict(self._published)

    def take(self) -> int:
        """A block with one reference and no content: blank if there is one, else the least recently freed cached one.

        Raises ``RuntimeError`` when none is left: the caller checks first.
        """
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            block = next(iter(self._cached))
            del self._cached[block]
            del self._index[self._published.pop(block).digest]
        else:
            raise RuntimeError(f"no free block: all {self.num_blocks} are held")
        self.references[block] = 1
        return block

    def find(self, key: BlockKey) -> int | None:
        """The block that holds exactly this content, tokens compared and not only their hash. Changes nothing."""
        block = self._index.get(key.digest)
        return block if block is not None and self._published[block].same_content(key) else None

    def share(self, block: int) -> None:
        """One more table names a published block; a cached one is owned again."""
        if block not in self._published:
            raise RuntimeError(f"block {block} is shared, but its content is not published")
        self._cached.pop(block, None)
        self.references[block] += 1

    def publish(self, block: int, key: BlockKey) -> None:
        """Announces what an owned block holds. If an equal block is published already, that one stays the one to hit."""
        if self.references[block] < 1:
            raise RuntimeError(f"block {block} is published, but no table holds it")
        if key.digest not in self._index:
            self._published[block] = key
            self._index[key.digest] = block

    def release(self, table: Sequence[int]) -> None:
        """Drops one reference of each block of ``table``, tail first; one without references is cached or blank again.

        Raises ``RuntimeError`` on a block that nobody holds, before it could become free a second time.
        """
        for block in reversed(table):
            if self.references[block] < 1:
                raise RuntimeError(f"block {block} is released, but no table holds it")
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._published:
                    self._cached[block] = None
                else:
                    self._blank.append(block)
