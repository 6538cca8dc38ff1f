"""Digests of cache rows: what a position holds on the ``rows`` rung, and the token that follows.

    digest of p    a hash of the token at p, p itself, and the digests of all positions before p, in their order
    token after p  a hash of the digests of all positions up to p

So a digest is a function of the tokens up to its position, and a row that was misread, miswritten or never written changes
every digest and token after it. Here stand the hash, and the two values as a pure function of a list of tokens. The kernels
compute the same from rows that they read through a block table (properties/digest_network.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.trace import VOCAB

MASK = 2**64 - 1
FACTOR = 0xD6E8FEB86659FD93  # odd, so that multiplying loses nothing
PLACE = 0x9E3779B97F4A7C15
TOKEN = 0xA24BAED4963EE407
NEXT = 0x9FB21C651E98DF25


def mix(x: int) -> int:
    """A bijection of 64-bit numbers in which every bit of ``x`` reaches every bit of the result."""
    x ^= x >> 32
    x = x * FACTOR & MASK
    x ^= x >> 29
    x = x * FACTOR & MASK
    return x ^ (x >> 32)


def read(digest: int, position: int) -> int:
    """What a row adds to everything that reads it; another one at every position, so that the order counts."""
    return mix(digest ^ (position * PLACE & MASK))


def digest(token: int, position: int, before: int) -> int:
    """``before`` is the sum of ``read`` over all earlier positions, modulo 2**64."""
    return mix(token * TOKEN + position * PLACE + before & MASK)


def following(total: int) -> int:
    """The likeliest token after rows whose ``read`` add up to ``total``."""
    return mix(total ^ NEXT) % VOCAB


def allowed(likeliest: int, masked: Sequence[int]) -> int:
    """The likeliest token that is not ``masked``: likelihood falls from ``likeliest`` upwards, and around."""
    return min((token for token in range(VOCAB) if token not in masked), key=lambda token: (token - likeliest) % VOCAB)


class Chain:
    """The digests of a growing list of tokens, without a cache."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.digests: list[int] = []
        self._total = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        position = len(self.digests)
        self.digests.append(digest(token, position, self._total))
        self._total = self._total + read(self.digests[-1], position) & MASK

    @property
    def following(self) -> int:
        return following(self._total)
