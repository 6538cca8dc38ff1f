"""The native tape: addresses frozen, values live, nothing run while recording; and threads that come and go."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.control.plan import Eager, Replay
from engine.native.kernels import BadCall, Kernels
from engine.native.library import RECORD
from engine.native.runner import library
from engine.native.tape import NativeGraphs, NativeTape
from tests.compute.driver import Driver, differences, shared_weights, text
from tests.native.kit import kernels, numbers, same_bytes, weight


def test_addresses_are_frozen_and_values_live() -> None:
    gate_up, out = torch.zeros(1, 8), torch.full((1, 4), 7.0)
    graphs = NativeGraphs()
    graphs.record((1, 1), lambda do: do(kernels().silu_mul, gate_up, out))
    assert out.tolist() == [[7.0] * 4]  # recording executes nothing
    gate_up += 100
    graphs.replay((1, 1))
    assert out.tolist() == [[10000.0] * 4]
    kept = out
    gate_up -= 50
    graphs.replay((1, 1))
    assert kept.tolist() == [[2500.0] * 4]  # an output is valid until the next replay
    gate_up = torch.zeros(1, 8)  # another tensor under the same name is not what was recorded
    graphs.replay((1, 1))
    assert out.tolist() == [[2500.0] * 4]
    assert (1, 1) in graphs
    with pytest.raises(KeyError):
        graphs.replay((2, 1))


def test_what_was_recorded_stays_alive() -> None:
    tape, out = NativeTape(), torch.zeros(1, 64)
    tape.do(kernels().silu_mul, torch.full((1, 128), 100.0), out)
    gc.collect()
    rubbish = [torch.full((1, 128), float("nan")) for _ in range(64)]
    tape.replay()
    assert (out == 10000).all()
    assert len(rubbish) == 64


def test_only_native_calls_are_recorded() -> None:
    tape = NativeTape()
    with pytest.raises(TypeError, match="native kernels only"):
        tape.do(torch.add, torch.zeros(1), torch.zeros(1))
    with pytest.raises(BadCall):
        tape.do(kernels().silu_mul, torch.zeros(1, 7), torch.zeros(1, 4))
    tape.do(kernels(1).silu_mul, torch.zeros(1, 8), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="one pool"):
        tape.do(kernels(2).silu_mul, torch.zeros(1, 8), torch.zeros(1, 4))
    assert len(tape) == 1
    NativeTape().replay()  # nothing recorded, nothing to do


def test_one_native_call_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(shared_weights("native llama"), rows=2, captures=((2, 40),))
    calls: list[int] = []
    run = driver.runner.threads.run
    monkeypatch.setattr(driver.runner.threads, "run", lambda records: (calls.append(records.count), run(records)))
    driver.start({0: text(0, 9)})
    driver.decode({0: (9, 5)}, Replay(2, 40, 1))
    driver.decode({0: (10, 5)}, Eager("test"))
    layers = len(shared_weights("native llama").layers)
    assert calls == [3 + 9 * layers] * 3  # prefill of one span, a replay, an eager step
    tape = driver.runner.network.graphs.tapes[2, 40]
    assert tape.nbytes == len(tape) * RECORD < 20_000


def test_cost_follows_the_context_not_the_width() -> None:
    """One captured width does for every length: lengths are read when the step runs."""
    driver = Driver(shared_weights("native llama"), rows=1, captures=((1, 40),), poison=float("nan"))
    tokens = text(0, 30)
    driver.start({0: tokens[:3]})
    for position in range(3, 30):
        driver.decode({0: (position, tokens[position])}, Replay(1, 40, 0))
    assert differences(driver, "native llama", {0: (tokens, 3)}) == []


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_thread_counts(threads: int) -> None:
    tokens = text(0, 80)
    driver = Driver(shared_weights("native qwen3"), rows=2, threads=threads, captures=((2, 40),))
    driver.start({0: tokens[:70], 1: tokens[:3]}, chunk=17)
    for step in range(10):
        driver.decode({0: (70 + step, tokens[70 + step]), 1: (3 + step, tokens[3 + step])}, Replay(2, 40, 0))
    assert differences(driver, "native qwen3", {0: (tokens, 70), 1: (tokens, 3)}) == []


def test_pools_start_and_stop() -> None:
    before = threading.active_count()
    packed, _ = weight("F32", 200, 608)
    x, out, wanted = numbers(0, 3, 608), torch.empty(3, 200), torch.empty(3, 200)
    kernels().linear(packed, None, x, wanted)
    for _ in range(20):
        pool = library().pool(4)
        out.zero_()
        Kernels(pool).linear(packed, None, x, out)
        assert same_bytes(out, wanted)
        pool.close()
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/task")) < 200


def test_two_callers_take_turns() -> None:
    packed, _ = weight("F32", 200, 608)
    x, wanted = numbers(0, 3, 608), torch.empty(3, 200)
    kernels().linear(packed, None, x, wanted)

    def work(_: int) -> bool:
        out = torch.empty(3, 200)
        for _ in range(50):
            kernels(3).linear(packed, None, x, out)
            if not same_bytes(out, wanted):
                return False
        return True

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(work, range(4)))


def _child(queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    packed, _ = weight("F32", 200, 608)
    out = torch.empty(3, 200)
    kernels(3).linear(packed, None, numbers(0, 3, 608), out)
    queue.put(out.numpy().tobytes())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_child_after_fork_works_alone() -> None:
    """The child has no helper threads; nobody waits for them."""
    packed, _ = weight("F32", 200, 608)
    out = torch.empty(3, 200)
    kernels(3).linear(packed, None, numbers(0, 3, 608), out)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == out.numpy().tobytes()
    child.join(60)
    assert child.exitcode == 0
