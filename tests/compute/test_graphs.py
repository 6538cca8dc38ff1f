"""Recorded steps: frozen addresses, live values, padded rows that nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from engine.compute.arena import Arena
from engine.compute.graphs import CudaGraphs, Do, Tape, TapeGraphs, graphs_for
from engine.compute.inputs import StaticInputs, declare
from engine.compute.kernels import copy
from engine.control.plan import Replay
from tests.compute.driver import Driver, differences, shared_weights, text

SHAPES = tuple((rows, width) for rows in (1, 2, 4, 8) for width in (16, 40))
HOSTILE = (np.iinfo(np.int64).max, -1)


def test_tape_freezes_addresses_and_reads_live_values() -> None:
    source, out = torch.zeros(3), torch.full((3,), 7.0)
    graphs = TapeGraphs()
    graphs.record((1, 1), lambda do: do(copy, source, out))
    assert out.tolist() == [7.0, 7.0, 7.0]  # recording executes nothing
    source += 2
    graphs.replay((1, 1))
    assert out.tolist() == [2.0, 2.0, 2.0]
    kept = out
    source += 1
    graphs.replay((1, 1))
    assert kept.tolist() == [3.0, 3.0, 3.0]  # an output is valid until the next replay
    source = torch.full((3,), 9.0)  # another tensor under the same name is not what was recorded
    graphs.replay((1, 1))
    assert out.tolist() == [3.0, 3.0, 3.0]
    assert (1, 1) in graphs
    with pytest.raises(KeyError):
        graphs.replay((2, 1))


def test_replay_runs_nothing_but_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step that replays does not walk through the decoder again."""
    driver = Driver(shared_weights("llama"), rows=2, captures=SHAPES[:4])
    driver.start({0: text(0, 9)})
    monkeypatch.setattr(driver.runner.network, "decode", None)
    driver.decode({0: (9, 5)}, Replay(2, 40, 1))


def test_tapes_of_one_shape_are_small() -> None:
    driver = Driver(shared_weights("llama"), rows=2, captures=((2, 16),))
    tape = driver.runner._graphs._tapes[2, 16]  # type: ignore[attr-defined]
    assert isinstance(tape, Tape)
    layers = len(shared_weights("llama").layers)
    assert len(tape.calls) <= 10 + 25 * layers
    # One step's scratch serves all layers: only weights and the pool belong to one layer.
    buffers = driver.runner.network.arena._buffers
    assert buffers is not None
    scratch = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
    plain = [t for _, arguments in tape.calls for t in arguments if isinstance(t, torch.Tensor) and not t.is_mkldnn]
    others = {t.untyped_storage().data_ptr() for t in plain} - scratch
    assert len(others) <= 8 + 10 * layers


def test_unrecorded_shape_is_refused() -> None:
    driver = Driver(shared_weights("llama"), rows=2, captures=((2, 40),))
    driver.start({0: text(0, 9)})
    with pytest.raises(ValueError, match=r"\(1, 40\), which was not recorded"):
        driver.decode({0: (9, 5)}, Replay(1, 40, 0))


def test_shape_that_is_too_small_is_refused() -> None:
    """A graph narrower than a block table would read past its end."""
    driver = Driver(shared_weights("llama"), rows=2, captures=((1, 16), (2, 16)))
    driver.start({0: text(0, 70), 1: text(1, 3)})
    with pytest.raises(ValueError, match="tables of up to 18 blocks do not fit"):
        driver.decode({0: (70, 5)}, Replay(1, 16, 0))
    with pytest.raises(ValueError, match="2 rows"):
        driver.decode({0: (70, 5), 1: (3, 3)}, Replay(1, 40, 0))


@pytest.mark.parametrize("rows", range(1, 9))
def test_hostile_padding(rows: int) -> None:
    """B036, B037: every static buffer is poisoned whole before each step; a sequence lives in the pool's last block."""
    driver = Driver(shared_weights("qwen2"), rows=8, captures=SHAPES, num_blocks=200, order=list(range(199, -1, -1)))
    requests = {row: (text(row, 30 + row), 25 + row) for row in range(rows)}
    driver.start({row: tokens[:prompt] for row, (tokens, prompt) in requests.items()})
    captured = next(r for r in (1, 2, 4, 8) if r >= rows)
    for step in range(5):
        for buffer in driver.runner.inputs.host.values():
            buffer.fill_(HOSTILE[step % 2])
        before = checksum(driver)
        work = {row: (prompt + step, tokens[prompt + step]) for row, (tokens, prompt) in requests.items()}
        driver.decode(work, Replay(captured, 16 if step % 2 else 40, captured - rows))
        changed = {block for block, value in checksum(driver).items() if value != before[block]}
        written = {driver.tables[row][(requests[row][1] + step) // 4] for row in requests}
        assert changed - {driver.runner.pool.trash_block} == written
        assert captured > rows or driver.runner.pool.trash_block not in changed
    assert differences(driver, "qwen2", requests) == []


def test_hostile_padding_is_noticed() -> None:
    """The same check with padded rows that write to a live block instead of the trash block."""
    driver = Driver(shared_weights("qwen2"), rows=4, captures=((4, 40),))
    tokens = text(0, 12)
    driver.start({0: tokens[:9]})
    inputs = driver.runner.inputs
    inputs.padding = tuple(
        attrs.evolve(entry, fill=driver.runner.pool.slot(driver.tables[0][0], 1)) if entry.name == "slots" else entry
        for entry in inputs.padding
    )
    before = checksum(driver)
    driver.decode({0: (9, tokens[9])}, Replay(4, 40, 3))
    driver.decode({0: (10, tokens[10])}, Replay(4, 40, 3))
    assert checksum(driver)[driver.tables[0][0]] != before[driver.tables[0][0]]
    assert differences(driver, "qwen2", {0: (tokens, 9)}) != []


def checksum(driver: Driver) -> dict[int, bytes]:
    """Each block's bytes over all layers."""
    stacked = torch.stack(driver.runner.pool.layers)  # [layers, 2, blocks, ...]
    return {block: stacked[:, :, block].numpy().tobytes() for block in range(stacked.shape[2])}


@pytest.mark.parametrize("name", ["tokens", "positions", "slots", "tables"])
def test_each_declared_padding_is_needed(name: str) -> None:
    """The table is complete: ``fill`` overwrites every cell of the shape, and it names every buffer of the step."""
    pool = Driver(shared_weights("llama"), rows=1).runner.pool
    inputs = StaticInputs(8, 12, pool, torch.device("cpu"))
    assert name in {entry.name for entry in declare(pool)}
    for buffer in inputs.host.values():
        buffer.fill_(-77)
    one = np.array([5, 6], dtype=np.int64)
    inputs.fill({"tokens": one, "positions": one, "slots": one, "tables": np.full((2, 20), 3)}, 4, 10)
    fill = next(entry.fill for entry in inputs.padding if entry.name == name)
    buffer = inputs.host[name]
    if name == "tables":
        assert (buffer[:2, :10] == 3).all()
        assert (buffer[2:4, :10] == fill).all()
        assert fill == pool.trash_block
        assert (buffer[:, 10:] == -77).all()  # outside the shape nothing is touched, and nothing is read
    else:
        assert buffer[:4].tolist() == [5, 6, fill, fill]
    assert (buffer[4:] == -77).all()


def test_more_rows_than_the_shape() -> None:
    inputs = StaticInputs(2, 4, Driver(shared_weights("llama"), rows=1).runner.pool, torch.device("cpu"))
    three = np.zeros(3, dtype=np.int64)
    with pytest.raises(ValueError, match="tokens has 3 rows, but the step has 2"):
        inputs.fill({"tokens": three, "positions": three, "slots": three, "tables": np.zeros((3, 4), np.int64)}, 2, 4)


def test_padding_lengths_agree() -> None:
    """B049: every buffer of a step is padded to the same number of rows."""
    inputs = StaticInputs(8, 12, Driver(shared_weights("llama"), rows=1).runner.pool, torch.device("cpu"))
    for shape in SHAPES:
        if shape[1] <= 12:
            tokens, tables = inputs.step(*shape)
            assert {len(tokens.tokens), len(tokens.positions), len(tokens.slots), len(tables)} == {shape[0]}


def test_arena_measures_then_shares() -> None:
    arena = Arena(torch.device("cpu"))
    assert arena.take("x", 4, 5).is_meta
    arena.take("x", 2, 3)
    arena.allocate()
    large, small = arena.take("x", 4, 5), arena.take("x", 3, 2)
    assert large.data_ptr() == small.data_ptr()
    assert arena.nbytes == 80
    with pytest.raises(RuntimeError, match=r"'x' holds 20 elements, but \(3, 7\) needs 21"):
        arena.take("x", 3, 7)


class FakeGraph:
    def __init__(self) -> None:
        self.replays = 0

    def pool(self) -> str:
        return "shared pool"

    def replay(self) -> None:
        self.replays += 1


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        self.waited.append(stream)


def test_cuda_recorder_warms_up_outside_and_captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be said without a GPU: the order of events, and that all graphs are given the first one's pool."""
    log: list[Any] = []

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        log.append("side stream")
        yield
        log.append("back")

    @contextmanager
    def capture(graph: Any, pool: Any = None) -> Iterator[None]:
        log.append(("capture", pool))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    free = iter([1000, 900, 900, 930])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 2000))
    graphs = CudaGraphs(torch.device("cuda"))

    def step(do: Do) -> None:
        do(lambda: log.append("kernel"))

    graphs.record((2, 1), step)
    graphs.record((1, 1), step)
    once = ["side stream", "kernel", "kernel", "back"]
    assert log == [*once, ("capture", None), "kernel", *once, ("capture", "shared pool"), "kernel"]
    graphs.replay((1, 1))
    assert graphs._graphs[1, 1].replays == 1  # type: ignore[attr-defined]
    assert (1, 1) in graphs
    assert (3, 1) not in graphs
    assert graphs.nbytes == 100  # what the first took; the second fitted into the pool, and somebody else freed memory
    assert isinstance(graphs_for(torch.device("cuda")), CudaGraphs)


def test_largest_shape_is_recorded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(shared_weights("llama"), rows=8, captures=SHAPES)
    order: list[tuple[int, int]] = []
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(driver.runner._graphs, "record", lambda shape, step: order.append(shape))
    driver.runner.warm(lambda *progress: seen.append(progress))
    assert order[0] == (8, 40)
    assert sorted(order) == list(SHAPES)
    assert seen[-1] == ("recording graphs", len(SHAPES), len(SHAPES))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_replay_equals_eager() -> None:
    from engine.compute.weights import load_weights
    from engine.loading.synthetic import synthetic_model

    with torch.inference_mode():
        weights = load_weights(synthetic_model(), torch.device("cuda"), torch.float32)
    seen = []
    for launch in (Replay(4, 40, 2), None):
        driver = Driver(weights, rows=4, captures=((4, 40),))
        driver.start({0: text(0, 70), 1: text(1, 9)})
        driver.decode({0: (70, 5), 1: (9, 8)}, launch)
        seen.append(driver.spy.logits)
    assert seen[0] == seen[1]
