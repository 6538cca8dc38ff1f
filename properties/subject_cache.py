"""The cache of a model that is played: each cell holds a digest of the whole sequence up to its position.

A cell's digest is chained over the one before it *as it is read back through the block table*, and the next token is a digest of
all cells read. So a wrong block, a wrong position, an overwritten or never written cell changes the token; and since each cell
also knows who wrote it, the wrong cell can be named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from engine.trace import VOCAB
from properties.subject import Ask, Batch, Work

_PRIME = (1 << 61) - 1


def chained(before: int, token: int) -> int:
    return (before * 1_000_003 + token * 7919 + 12_345) % _PRIME


def root(salt: str | None) -> int:
    """What stands before position 0: requests of different salts have nothing in common."""
    return chained(1, sum(ord(letter) * 257**place for place, letter in enumerate(salt or "")))


def next_token(request: int, digests: Iterable[int]) -> int:
    mixed = request
    for digest in digests:
        mixed = (mixed * 31 + digest) % _PRIME
    return mixed % VOCAB


@attrs.define
class Alone:
    """One request by itself, in one contiguous cache: the tokens that it is told, and the digest of each position."""

    ask: Ask
    tokens: list[int] = attrs.field(init=False)
    digests: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tokens, self.digests = [], []
        for token in self.ask.prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        self.digests.append(chained(self.digests[-1] if self.digests else root(self.ask.salt), token))
        self.tokens.append(token)

    def known(self, count: int) -> list[int]:
        """The first ``count`` tokens, generated ones included."""
        while len(self.tokens) < count:
            self._append(next_token(self.ask.request, self.digests))
        return self.tokens[:count]

    def digest(self, position: int) -> int:
        self.known(position + 1)
        return self.digests[position]

    def outcome(self) -> tuple[tuple[int, ...], str]:
        """Generated tokens and the reason of the end, undisturbed."""
        prompt = len(self.ask.prompt)
        for count in range(1, self.ask.max_tokens + 1):
            token = self.known(prompt + count)[-1]
            if token in self.ask.stop_ids and count >= self.ask.min_tokens:
                return tuple(self.known(prompt + count)[prompt:]), "stop"
        return tuple(self.known(prompt + self.ask.max_tokens)[prompt:]), "length"


@attrs.frozen
class Cell:
    digest: int
    request: int
    position: int

    def __str__(self) -> str:
        return f"position {self.position} of r{self.request}"


class Cache:
    """Cells by (block, offset), and what went wrong in the iteration that is computed."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._cells: dict[tuple[int, int], Cell] = {}

    def copy(self, batch: Batch) -> None:
        for source, target in batch.copies:
            for offset in range(self._size):
                cell = self._cells.get((source, offset))
                if cell is not None:
                    self._cells[target, offset] = cell
                else:
                    self._cells.pop((target, offset), None)

    def write(self, work: Work, alone: Alone) -> None:
        """Fills the cells of the work's positions, each chained over the one before it as it is read back."""
        for position, token in enumerate(work.tokens, work.start):
            before = root(alone.ask.salt) if position == 0 else self._digest(work, position - 1)
            place = (work.table[position // self._size], position % self._size)
            self._cells[place] = Cell(chained(before, token), work.request, position)

    def read(self, work: Work) -> int:
        """The next token of a request, from everything that it reads."""
        last = work.start + len(work.tokens)
        return next_token(work.request, (self._digest(work, position) for position in range(last)))

    def wrong(self, work: Work, alone: Alone) -> Iterator[str]:
        """Cells that the request reads and that do not hold its sequence."""
        for position in range(work.start + len(work.tokens)):
            block, offset = work.table[position // self._size], position % self._size
            cell = self._cells.get((block, offset))
            if cell is None or cell.digest != alone.digest(position):
                stands = "nothing was ever written" if cell is None else f"{cell} stands"
                yield f"r{work.request} reads position {position} in block {block} at offset {offset}, where {stands}"

    def _digest(self, work: Work, position: int) -> int:
        cell = self._cells.get((work.table[position // self._size], position % self._size))
        return 0 if cell is None else cell.digest
