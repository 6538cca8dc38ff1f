"""The KV pool: where a position's keys and values lie.

One tensor per layer holds keys, then values, each as [blocks, kv_heads, block_size, head_dim]:

    block   0 .. num_blocks - 1   num_blocks   num_blocks + 1
            requests' blocks      trash        zeros

Padded rows write to the trash block and nobody reads it. The zero block is never written: attention reads it wherever a
lane lies outside the context, so that neither stale nor poisoned memory ever meets a zero weight (0 x NaN is NaN).

A *cache row* is one head of one position, ``head_dim`` numbers: row ``(block * kv_heads + head) * block_size +
offset``. The *slot* of a position is the cache row of its head 0.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from engine.loading.model import ModelConfig

_ALIGNMENT = 64  # bytes of a cache line


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """On the CPU from pages that the system zeroes when they are first touched: a pool costs what was used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8))
    skip = -memory.data_ptr() % _ALIGNMENT
    return memory[skip : skip + nbytes].view(dtype).view(shape)


class KVPool:
    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        self.kv_heads = config.num_kv_heads
        self.trash_block = num_blocks
        self.zero_block = num_blocks + 1
        blocks = num_blocks + 2
        shape = (2, blocks, config.num_kv_heads, block_size, config.head_dim)
        self.layers = [_zeros(shape, device, dtype) for _ in range(config.num_layers)]
        self.rows = [layer.view(-1, config.head_dim) for layer in self.layers]
        self.value_offset = blocks * config.num_kv_heads * block_size  # from a key's cache row to its value's
        self.zero_row = self.slot(self.zero_block, 0)

    def slot(self, block: int, offset: int) -> int:
        return block * self.kv_heads * self.block_size + offset

    def slots(self, blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """``slot`` of many positions."""
        return blocks * (self.kv_heads * self.block_size) + offsets

    @property
    def trash_slot(self) -> int:
        return self.slot(self.trash_block, 0)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)
