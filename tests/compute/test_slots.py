"""Where K/V goes, recomputed in plain Python (B051), and what a step writes: exactly its own positions, in every layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.compute.kv import KVPool, kv_bytes_per_block
from engine.control.plan import Replay
from engine.loading.synthetic import synthetic_config
from tests.compute.driver import Driver, differences, shared_weights, text


def expected_rows(driver: Driver, row: int, positions: range) -> set[int]:
    """Cache rows of keys and values of ``positions``, from the block table alone."""
    size, heads = driver.runner.limits.block_size, driver.runner.pool.kv_heads
    half = (driver.runner.limits.num_blocks + 2) * heads * size
    keys = {
        (driver.tables[row][position // size] * heads + head) * size + position % size
        for position in positions
        for head in range(heads)
    }
    return keys | {key + half for key in keys}


def written_rows(driver: Driver) -> list[set[int]]:
    """By layer, the cache rows that are no longer NaN, the trash block's and the zero block's aside."""
    pool = driver.runner.pool
    aside = {
        (block * pool.kv_heads + head) * pool.block_size + offset + part
        for block in (pool.trash_block, pool.zero_block)
        for head in range(pool.kv_heads)
        for offset in range(pool.block_size)
        for part in (0, pool.value_offset)
    }
    return [set(torch.nonzero(~rows.isnan().any(1)).flatten().tolist()) - aside for rows in pool.rows]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 64])
def test_write_set(block_size: int, chunk: int) -> None:
    driver = Driver(
        shared_weights("llama"), rows=2, block_size=block_size, poison=math.nan, order=list(range(255, -1, -1))
    )
    driver.start({0: text(0, 13), 1: text(1, 8)}, chunk)
    expected = expected_rows(driver, 0, range(13)) | expected_rows(driver, 1, range(8))
    assert written_rows(driver) == [expected] * 2
    driver.decode({0: (13, 5)})
    assert written_rows(driver) == [expected | expected_rows(driver, 0, range(13, 14))] * 2


def test_write_set_of_a_replay() -> None:
    driver = Driver(shared_weights("llama"), rows=4, captures=((4, 40),), poison=math.nan)
    driver.start({0: text(0, 13), 1: text(1, 8)})
    driver.decode({0: (13, 5), 1: (8, 5)}, Replay(4, 40, 2))
    expected = expected_rows(driver, 0, range(14)) | expected_rows(driver, 1, range(9))
    assert written_rows(driver) == [expected] * 2


def test_slots_equal_plain_python() -> None:
    driver = Driver(shared_weights("llama"), rows=2, block_size=3)
    driver.start({0: text(0, 20), 1: text(1, 11)})
    rows, positions = np.array([0, 0, 1, 1, 0]), np.array([0, 19, 3, 10, 7])
    plain = [
        driver.tables[row][position // 3] * driver.runner.pool.kv_heads * 3 + position % 3
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
    ]
    assert driver.runner.slots(rows, positions).tolist() == plain


def test_a_wrong_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset that forgets the modulus writes into the next block: the write set and the content both say so."""
    driver = Driver(shared_weights("llama"), rows=1, poison=math.nan)
    slots = KVPool.slots
    monkeypatch.setattr(KVPool, "slots", lambda pool, blocks, offsets: slots(pool, blocks, (offsets + 1) % 4))
    driver.start({0: text(0, 10)})
    assert written_rows(driver)[0] != expected_rows(driver, 0, range(10))
    assert differences(driver, "llama", {0: (text(0, 10), 10)}) != []


@pytest.mark.parametrize("block_size", [1, 16])
def test_memory_is_what_the_capacity_table_says(block_size: int) -> None:
    config = synthetic_config("qwen3", head_dim=32)
    pool = KVPool(config, 10, block_size, torch.device("cpu"), torch.float32)
    assert pool.nbytes == 12 * kv_bytes_per_block(config, block_size, torch.float32)  # trash and zeros included
    assert kv_bytes_per_block(config, block_size, torch.bfloat16) * 2 == kv_bytes_per_block(
        config, block_size, torch.float32
    )
