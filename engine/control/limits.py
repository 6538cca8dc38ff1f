"""The numbers that bound a run. Frozen at start; every decision refers to them."""

from __future__ import annotations

import attrs


@attrs.frozen
class Limits:
    """Sizes of the pool, of the batch and of one iteration.

    ``captures`` are the recorded shapes, pairs of (rows, width in blocks), in ascending order. An empty tuple
    means that nothing is recorded and every decode step runs eagerly.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    watermark: int = 0
    max_waiting: int = 1024
    persistent_batch: bool = True
    prefix_cache: bool = False
    captures: tuple[tuple[int, int], ...] = ()

    def __attrs_post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "vocab_size", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if not 0 <= self.watermark < self.num_blocks:
            raise ValueError(
                f"watermark is {self.watermark} blocks, but must be 0..{self.num_blocks - 1} (num_blocks - 1)"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:  # rule 9: every decoding row must run in every iteration
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least "
                f"max_num_seqs = {self.max_num_seqs}: each running request decodes one token per iteration"
            )
        if list(self.captures) != sorted(set(self.captures)):
            raise ValueError(f"captures must be ascending and unique, got {self.captures}")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions: ``ceil(tokens / block_size)`` (rule 5)."""
        return -(-tokens // self.block_size)
