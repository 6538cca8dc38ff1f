"""P2 over logits, to the byte: whatever surrounds a request, its logits are those of its solo run.

Each test varies one thing that must not matter. That the comparison can fail is shown at the end, with a linear layer
whose bits depend on the row count.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.compute.linear import Linear
from engine.compute.weights import Weights, load_weights
from engine.control.plan import Eager, Move, Plan, Replay
from engine.loading.synthetic import synthetic_model
from tests.compute.driver import MODELS, NATIVE, Driver, differences, shared_weights, solo, text

PROMPT, TOTAL = 61, 68  # decoding crosses the first tile's end


def requests_for(rows: int) -> dict[int, tuple[tuple[int, ...], int]]:
    """Prompts of different lengths; the first is the one that decodes across a tile."""
    lengths = [PROMPT, 1, 5, 64, 17, 33]
    return {row: (text(row, lengths[row % 6] + TOTAL - PROMPT), lengths[row % 6]) for row in range(rows)}


def run(
    driver: Driver, requests: dict[int, tuple[tuple[int, ...], int]], launch: Any = None, chunk: int = 10**6
) -> None:
    driver.start({row: tokens[:prompt] for row, (tokens, prompt) in requests.items()}, chunk)
    for step in range(TOTAL - PROMPT):
        driver.decode(
            {row: (prompt + step, tokens[prompt + step]) for row, (tokens, prompt) in requests.items()}, launch
        )


@pytest.mark.parametrize("name", [*MODELS, *NATIVE])
def test_batch_size_and_replay(name: str) -> None:
    shapes = tuple((rows, width) for rows in (1, 2, 4, 8, 16, 17) for width in (18, 33))
    for rows in (1, 2, 3, 4, 5, 7, 9, 13, 16, 17) if not name.endswith("llama") else range(1, 18):
        captured = next(r for r in (1, 2, 4, 8, 16, 17) if r >= rows)
        driver = Driver(shared_weights(name), rows=17, captures=shapes, num_blocks=400)
        requests = requests_for(rows)
        run(driver, requests, Replay(captured, 18 if rows % 2 else 33, captured - rows))
        assert differences(driver, name, requests) == []


@pytest.mark.parametrize("name", ["llama", "window", "odd", "native llama", "native window", "native odd"])
@pytest.mark.parametrize("chunk", [*range(1, 20), 31, 32, 33, 60, 61])
def test_chunk_size(name: str, chunk: int) -> None:
    driver = Driver(shared_weights(name), rows=2)
    requests = requests_for(2)
    run(driver, requests, chunk=chunk)
    assert (0, PROMPT) in driver.spy.logits
    assert differences(driver, name, requests) == []


@pytest.mark.parametrize("name", ["llama", "window", "odd", "native llama", "native window", "native odd"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 48, 64, 100, 256])
def test_block_size_and_ids(name: str, block_size: int) -> None:
    driver = Driver(shared_weights(name), rows=3, block_size=block_size, order=list(range(255, -1, -1)))
    requests = requests_for(3)
    run(driver, requests)
    assert differences(driver, name, requests) == []


@pytest.mark.parametrize("width", [17, 18, 31, 32, 33, 40])
@pytest.mark.parametrize("name", ["window", "native window"])
def test_table_width(name: str, width: int) -> None:
    driver = Driver(shared_weights(name), rows=2, captures=((2, width),))
    requests = requests_for(2)
    run(driver, requests, Replay(2, width, 0))
    assert differences(driver, name, requests) == []


@pytest.mark.parametrize("name", [*MODELS, *NATIVE])
def test_recompute_after_preemption(name: str) -> None:
    """Tokens that were decoded one by one are prefilled as one chunk, in other blocks and another row."""
    tokens = text(0, TOTAL)
    driver = Driver(shared_weights(name), rows=4)
    for kept in (PROMPT + 1, PROMPT + 4, TOTAL):
        driver.start({3: tokens[:kept]})
        assert driver.spy.logits[3, kept] == solo(name, tokens, PROMPT)[kept]


@pytest.mark.parametrize("name", [*MODELS, *NATIVE])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_poisoned_pool(name: str, poison: float) -> None:
    """B039: memory that nobody wrote yet, trash included, never reaches anybody, replayed and eager."""
    driver = Driver(shared_weights(name), rows=4, captures=((4, 40),), poison=poison)
    requests = requests_for(3)
    run(driver, requests, Replay(4, 40, 1), chunk=7)
    assert differences(driver, name, requests) == []
    driver.spy.logits.clear()
    run(driver, requests, Eager("test"), chunk=9)
    assert differences(driver, name, requests) == []


def test_rows_scattered_and_permuted() -> None:
    """B073: any rows, in any arrangement; only ``Eager`` can do scattered ones."""
    for order in ([0, 1, 2], [5, 0, 3], [2, 7, 4]):
        driver = Driver(shared_weights("llama"), rows=8)
        requests = {row: requests_for(3)[index] for index, row in enumerate(order)}
        run(driver, requests)
        assert differences(driver, "llama", requests) == []


def test_neighbours_content() -> None:
    """B069 (1): the same shapes and blocks, only the neighbours' tokens differ."""
    seen = []
    for seed in (1, 2):
        driver = Driver(shared_weights("llama"), rows=3)
        run(driver, {0: (text(0, TOTAL), PROMPT), 1: (text(seed, TOTAL), PROMPT), 2: (text(seed + 5, TOTAL), PROMPT)})
        seen.append({position: logits for (row, position), logits in driver.spy.logits.items() if row == 0})
    assert seen[0] == seen[1]


def test_move_and_swap_keep_content() -> None:
    """A row that is relabelled decodes on as before; a swap takes the prefilling request the other way."""
    tokens, prefilling = text(0, TOTAL), text(9, 40)
    driver = Driver(shared_weights("llama"), rows=4)
    driver.start({2: tokens[:PROMPT]})
    table = driver.tables.pop(2)
    driver.tables[0] = table
    driver.execute(moves=(Move(2, 2, 0, False),))
    driver.decode({0: (PROMPT, tokens[PROMPT])})
    driver.start({1: prefilling[:40]})
    driver.execute(moves=(Move(0, 0, 1, True),))
    driver.tables[0], driver.tables[1] = driver.tables[1], driver.tables[0]
    driver.decode({1: (PROMPT + 1, tokens[PROMPT + 1])})
    assert driver.spy.logits[1, PROMPT + 2] == solo("llama", tokens, PROMPT)[PROMPT + 2]
    assert [view.table for view in driver.runner.rows_state()] == [tuple(driver.tables[0]), tuple(driver.tables[1])]


def test_long_prefill_is_cut() -> None:
    """More tokens in one plan than one batch of prefill takes."""
    prompts = {row: text(row, 150) for row in range(3)}
    whole, cut = Driver(shared_weights("llama"), rows=3), Driver(shared_weights("llama"), rows=3)
    cut.runner._prefill_tokens = 47
    whole.start(prompts)
    cut.start(prompts)
    assert whole.spy.logits == cut.spy.logits
    assert len(whole.spy.logits) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """What a GPU computes in, run here: close to fp32, replay equal to eager. Attention and norms are fp32 in any type."""
    with torch.inference_mode():
        weights = load_weights(synthetic_model(), torch.device("cpu"), dtype)
    requests = requests_for(3)
    seen = []
    for launch in (None, Replay(4, 40, 1)):
        driver = Driver(weights, rows=4, captures=((4, 40),), poison=float("nan"))
        run(driver, requests, launch)
        seen.append(driver.spy.logits)
    assert seen[0] == seen[1]
    for (row, position), logits in seen[0].items():
        exact = np.frombuffer(solo("llama", *requests[row])[position], np.float32)
        assert np.abs(np.frombuffer(logits, np.float32) - exact).max() < (0.5 if dtype == torch.bfloat16 else 0.1)


def test_another_thread() -> None:
    """A server computes on a thread of its own; torch sets up the number of its workers by thread."""
    driver, requests = Driver(shared_weights("llama"), rows=2), requests_for(2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, driver, requests).result()
    assert differences(driver, "llama", requests) == []


def row_count_dependent(weights: Weights) -> Weights:
    """The same weights with a qkv product of the first layer that is off by a few bits for large batches."""
    layer = weights.layers[0]
    inner = layer.qkv.kernel

    def kernel(x: Tensor, weight: Any, bias: Tensor | None, out: Tensor) -> None:
        inner(x, weight, bias, out)
        if len(x) > 4:
            out.mul_(1 + 2**-22)

    broken = attrs.evolve(layer, qkv=Linear(kernel, layer.qkv.weight, layer.qkv.bias, layer.qkv.ladder))
    return attrs.evolve(weights, layers=(broken, *weights.layers[1:]))


def test_the_comparison_can_fail() -> None:
    weights = row_count_dependent(shared_weights("llama"))
    small, large = Driver(weights, rows=2), Driver(weights, rows=9)
    run(small, requests_for(2), chunk=2)
    run(large, requests_for(9), chunk=2)
    assert differences(small, "llama", requests_for(2)) == []
    assert differences(large, "llama", requests_for(9)) != []


def test_the_poison_test_can_fail() -> None:
    """If the zero block is not zero, the poison arrives: it is this block that keeps unwritten memory out."""
    driver = Driver(shared_weights("llama"), rows=1)
    for layer in driver.runner.pool.layers:
        layer[:, driver.runner.pool.zero_block] = float("nan")
    requests = requests_for(1)
    run(driver, requests)
    assert differences(driver, "llama", requests) != []


def test_failed_step_leaves_row_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(shared_weights("llama"), rows=2)
    driver.start({0: text(0, 5)})

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(driver.spy, "sample", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        driver.start({1: text(1, 9)})
    assert [(view.row, view.table) for view in driver.runner.rows_state()] == [(0, (0, 1)), (1, (2, 3, 4))]
    assert driver.spy.events[-1] == ("seat", 1)


def test_plan_without_work_applies_row_operations() -> None:
    driver = Driver(shared_weights("llama"), rows=2)
    driver.start({0: text(0, 5)})
    assert driver.runner.execute(Plan(9, vacated=(0,))) == ()
    assert driver.runner.rows_state() == ()
    assert driver.spy.events[-1] == ("vacate", 0)
