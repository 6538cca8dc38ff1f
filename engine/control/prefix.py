"""What a full block holds, as a value: a hash chained over everything before it (rule 11).

Two blocks are the same exactly when they hold the same tokens after the same tokens under the same salt. The digest
finds candidates; a hit compares the tokens and the parent too, so that a collision costs a miss and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import attrs


@attrs.frozen
class BlockKey:
    digest: bytes
    parent: bytes  # digest of the block before; the salt's own digest for the first block
    tokens: tuple[int, ...]

    def same_content(self, other: BlockKey) -> bool:
        return self.parent == other.parent and self.tokens == other.tokens


def root(salt: str | None) -> bytes:
    """The parent of first blocks. Requests with different salts never share a block."""
    return blake2b(b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> BlockKey:
    held = tuple(tokens)
    text = b",".join(b"%d" % token for token in held)
    return BlockKey(blake2b(parent + text, digest_size=16).digest(), parent, held)


@attrs.define(eq=False)
class Chain:
    """The keys of one request's full blocks, extended as its tokens grow. Tokens never change, so keys never do."""

    block_size: int
    salt_root: bytes
    keys: list[BlockKey] = attrs.field(factory=list)

    def upto(self, tokens: Sequence[int], full_blocks: int) -> list[BlockKey]:
        """Keys of the first ``full_blocks`` blocks of ``tokens``."""
        while len(self.keys) < full_blocks:
            start = len(self.keys) * self.block_size
            parent = self.keys[-1].digest if self.keys else self.salt_root
            self.keys.append(block_key(parent, tokens[start : start + self.block_size]))
        return self.keys[:full_blocks]
