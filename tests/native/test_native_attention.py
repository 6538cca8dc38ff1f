"""Paged attention: close to fp64, and the same bytes in decode, in chunks, in one piece, in any blocks, beside NaN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.native.kernels import HeadLayout
from tests.native.kit import Cache, attention_in_fp64, kernels, numbers, same_bytes

LENGTH = 150  # crosses two borders of tiles

CASES = {
    "one head": (1, 1, 64, None),
    "grouped": (9, 3, 64, None),
    "wide group": (14, 2, 32, None),
    "whole": (4, 4, 128, None),
    "256": (2, 1, 256, None),
    "tail": (5, 1, 8, None),
    "tail 40": (4, 2, 40, None),
    "80": (3, 1, 80, None),
    "window": (4, 2, 32, 9),
    "window over tiles": (4, 2, 32, 100),
    "window of one": (2, 1, 32, 1),
}


class Scene:
    """One request of LENGTH positions in blocks of ``block_size``, at the end of a pool full of NaN."""

    def __init__(self, case: str, block_size: int = 16, dtype: torch.dtype = torch.float32, order: int = -1) -> None:
        heads, kv_heads, dim, self.window = CASES[case]
        blocks = -(-LENGTH // block_size)
        self.layout = HeadLayout(heads, kv_heads, dim, block_size, blocks + 3)
        self.q = numbers(1, LENGTH, heads, dim)
        self.keys, self.values = numbers(2, LENGTH, kv_heads, dim), numbers(3, LENGTH, kv_heads, dim)
        self.cache = Cache(self.layout, dtype)
        self.table = list(range(blocks))[::order]
        self.cache.write(self.table, self.keys, self.values)

    def run(self, start: int, count: int, *, threads: int = 1, width: int | None = None) -> Tensor:
        """The queries at positions start .. start + count - 1 as one span; [count, heads * dim]."""
        table = torch.full((1, width or len(self.table)), 0, dtype=torch.int64)
        table[0, : len(self.table)] = torch.tensor(self.table)
        return self._attend(torch.arange(start, start + count), table, threads)

    def decode(self, positions: Sequence[int], *, threads: int = 1, width: int = 64, segments: int = 0) -> Tensor:
        """One row for each position, each with its own copy of the table, padded by the trash block.

        ``segments``: into how many units the tiles of each row are spread; 0 is not at all.
        """
        tables = torch.full((len(positions), width), self.layout.blocks - 1, dtype=torch.int64)
        tables[:, : len(self.table)] = torch.tensor(self.table)
        split = None
        if segments:
            tiles, dim = -(-width * self.layout.block_size // 64), -(-self.layout.dim // 16) * 16
            split = torch.full((len(positions), self.layout.heads, tiles, 2 + dim), float("nan")), segments
        return self._attend(torch.tensor(positions), tables, threads, split)

    def _attend(
        self, positions: Tensor, tables: Tensor, threads: int, split: tuple[Tensor, int] | None = None
    ) -> Tensor:
        q = self.q[positions % LENGTH].reshape(len(positions), -1)
        out = torch.full_like(q, 7.0)
        kernels(threads).attend(self.layout, q, positions, tables, self.cache.pool, self.window, out, split)
        return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_against_fp64(case: str, dtype: torch.dtype) -> None:
    scene = Scene(case, dtype=dtype)
    out = scene.run(0, LENGTH).reshape(LENGTH, scene.layout.heads, -1)
    keys, values = scene.keys.to(dtype).float(), scene.values.to(dtype).float()
    for position in range(LENGTH):
        wanted = attention_in_fp64(scene.q[position], keys, values, position, scene.window)
        np.testing.assert_allclose(out[position].numpy(), wanted, atol=3e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_chunks_and_recompute_agree(case: str, dtype: torch.dtype) -> None:
    scene = Scene(case, dtype=dtype)
    whole = scene.run(0, LENGTH)
    assert whole.isfinite().all()
    for chunk in (1, 7, 16, 64, 100):
        for start in range(0, LENGTH, chunk):
            count = min(chunk, LENGTH - start)
            assert same_bytes(scene.run(start, count, threads=2), whole[start : start + count])
    for positions in ([149], [0, 63, 64, 127, 128, 149], list(range(LENGTH))[::-1]):
        assert same_bytes(scene.decode(positions, threads=2), whole[positions])
        for segments in (1, 2, 3, 9):
            assert same_bytes(scene.decode(positions, threads=3, segments=segments), whole[positions])


@pytest.mark.parametrize("case", ["grouped", "window", "tail 40"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 17, 48, 64, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_change_nothing(case: str, block_size: int, dtype: torch.dtype) -> None:
    wanted = Scene(case, dtype=dtype).run(0, LENGTH)
    for order in (1, -1):
        scene = Scene(case, block_size, dtype, order)
        assert same_bytes(scene.run(0, LENGTH), wanted)
        assert same_bytes(scene.decode([0, 70, 149], width=160), wanted[[0, 70, 149]])


@pytest.mark.parametrize("dim", [8, 16, 18, 40])
@pytest.mark.parametrize("block_size", [3, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_last_cell_of_a_pool(dim: int, block_size: int, dtype: torch.dtype) -> None:
    """Every cell is a position's, to the end of the memory: under sanitizers a read of one number more is seen."""
    length, heads = 96, 3
    layout = HeadLayout(heads, 1, dim, block_size, length // block_size)
    q, keys, values = numbers(1, length, heads, dim), numbers(2, length, 1, dim), numbers(3, length, 1, dim)
    cache = Cache(layout, dtype)
    table = torch.arange(layout.blocks)[None]
    cache.write(table[0].tolist(), keys, values)
    assert cache.pool.isfinite().all()
    for start, window in ((0, None), (0, 5), (length - 1, None), (length - 1, 5)):  # for many query rows and for few
        positions = torch.arange(start, length)
        out = torch.empty(len(positions), heads * dim)
        kernels(2).attend(layout, q[start:].reshape(len(positions), -1), positions, table, cache.pool, window, out)
        wanted = attention_in_fp64(q[-1], keys.to(dtype).float(), values.to(dtype).float(), length - 1, window)
        np.testing.assert_allclose(out[-1].reshape(heads, dim).numpy(), wanted, atol=3e-6)


@pytest.mark.parametrize("case", ["grouped", "window over tiles"])
def test_what_lies_beyond_the_query_is_not_read(case: str) -> None:
    """NaN and infinity in later positions of the same block, and in positions that have left the window."""
    scene = Scene(case)
    wanted = scene.run(0, LENGTH)
    for position in (5, 63, 70):
        poisoned = Scene(case)
        keys, values = poisoned.keys.clone(), poisoned.values.clone()
        keys[position + 1 :], values[position + 1 :] = float("nan"), float("inf")
        if poisoned.window is not None and position >= poisoned.window:
            values[: position - poisoned.window + 1] = float("nan")
        poisoned.cache.write(poisoned.table, keys, values)
        assert same_bytes(poisoned.run(position, 1), wanted[position : position + 1])
        assert same_bytes(poisoned.decode([position]), wanted[position : position + 1])


def test_rows_of_different_requests() -> None:
    """Each row reads its own table; rows in any order give the same bytes."""
    scene = Scene("grouped")
    keys, values = numbers(8, LENGTH, 3, 64), numbers(9, LENGTH, 3, 64)
    layout = HeadLayout(9, 3, 64, 16, 24)
    cache = Cache(layout)
    tables = torch.tensor([[*range(10)], [*range(19, 9, -1)]])
    cache.write(tables[0].tolist(), scene.keys, scene.values)
    cache.write(tables[1].tolist(), keys, values)
    positions = torch.tensor([100, 37])
    q = scene.q[positions].reshape(2, -1).contiguous()
    out, turned = torch.empty_like(q), torch.empty_like(q)
    kernels(2).attend(layout, q, positions, tables, cache.pool, None, out)
    kernels(1).attend(layout, q.flip(0), positions.flip(0), tables.flip(0), cache.pool, None, turned)
    assert same_bytes(out, turned.flip(0))
    assert same_bytes(out[:1], scene.run(100, 1))
    wanted = attention_in_fp64(scene.q[37], keys, values, 37, None)
    np.testing.assert_allclose(out[1].reshape(9, 64).numpy(), wanted, atol=3e-6)


def test_table_that_leads_out_of_the_pool_reads_nothing() -> None:
    scene = Scene("grouped")
    good = scene.decode([70])
    for bad in (-1, scene.layout.blocks, 2**62):
        scene.table[2] = bad
        assert scene.decode([70]).isnan().all()
        assert scene.decode([70], segments=2).isnan().all()
        assert scene.run(60, 20).isnan().all()
        assert same_bytes(scene.decode([20]), Scene("grouped").decode([20]))  # it never gets there
    assert good.isfinite().all()
    assert scene.decode([64 * 16]).isnan().all()
    assert scene.decode([-1]).isnan().all()


@pytest.mark.parametrize("positions", [[0, 19, 1], [0, 2**62, 1], [0, -1, 1], [3, 2, 4]])
def test_positions_of_one_table_that_descend_read_nothing(positions: list[int]) -> None:
    scene = Scene("grouped")
    for threads in (1, 2):
        out = scene._attend(torch.tensor(positions), torch.tensor([scene.table[:1]]), threads)
        assert out.isnan().all()


@pytest.mark.parametrize("segments", [17, 10**6, 2**31 - 1])
def test_more_segments_than_tiles_are_as_many_as_tiles(segments: int) -> None:
    scene = Scene("grouped")
    assert same_bytes(scene.decode([149, 70], segments=segments), scene.decode([149, 70]))
