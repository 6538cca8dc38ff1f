"""The KV pool: where a position's keys and values lie.

One tensor per layer holds keys, then values, each as [blocks, kv_heads, block_size, head_dim] (``parts``):

    block   0 .. num_blocks - 1   num_blocks   num_blocks + 1
            requests' blocks      trash        zeros

Padded rows write to the trash block and nobody reads it. The zero block is never written: attention reads it wherever a
lane lies outside the context, so that neither stale nor poisoned memory ever meets a zero weight (0 x NaN is NaN).

A *cache row* is one head of one position, ``head_dim`` numbers: row ``(block * kv_heads + head) * block_size +
offset``. The *slot* of a position is the cache row of its head 0.

Native kernels want the keys of a block *turned*, [head_dim, block_size], so that the same number of sixteen positions is one
vector. Slots and cache rows are counted alike; only the numbers of a block's keys lie in another order.
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


def by_position(layer: torch.Tensor, block_size: int, turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, views [blocks, kv_heads, block_size, head_dim]."""
    keys, values = layer.flatten(3).unbind()
    shape = keys.shape[:2]
    keys = keys.view(*shape, -1, block_size).transpose(-1, -2) if turned else keys.view(*shape, block_size, -1)
    return keys, values.view(*shape, block_size, -1)


class KVPool:
    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        turned: bool = False,
    ) -> None:
        self.block_size = block_size
        self.kv_heads = config.num_kv_heads
        self.trash_block = num_blocks
        self.zero_block = num_blocks + 1
        blocks = num_blocks + 2
        cells = (block_size * config.head_dim,) if turned else (block_size, config.head_dim)
        shape = (2, blocks, config.num_kv_heads, *cells)
        self.layers = [_zeros(shape, device, dtype) for _ in range(config.num_layers)]
        self.rows = [] if turned else [layer.view(-1, config.head_dim) for layer in self.layers]
        self._turned = turned
        self.value_offset = blocks * config.num_kv_heads * block_size  # from a key's cache row to its value's
        self.zero_row = self.slot(self.zero_block, 0)

    @property
    def parts(self) -> list[torch.Tensor]:
        """Keys, values, keys, ... of all layers: views [blocks, kv_heads, block_size, head_dim], however they lie."""
        return [part for layer in self.layers for part in by_position(layer, self.block_size, self._turned)]

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
