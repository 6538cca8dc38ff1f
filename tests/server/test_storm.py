"""Storms of clients against the real engine on the tiny model and a tight pool: nothing is lost, and who stays is served as if
alone. And SIGTERM in the middle of one, against the real process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import uvicorn

from engine.build import assemble
from engine.config import EngineConfig
from engine.control.blocks import BlockPool
from engine.engine import Engine
from engine.loading.synthetic import synthetic_model
from server.app import create_app
from server.context import Context
from server.outlet import Abortable
from server.settings import ServerSettings
from server.sockets import bind
from tests.models import write_folder
from tests.server.storm import Outcome, alone, complaints, manner, storm
from tests.server.test_server_cli import Running, finish

SIZES: dict[str, Any] = {
    "device": "cpu", "threads": 1, "num_kv_blocks": 28, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "max_model_len": 512, "max_waiting": 1024,
}  # fmt: skip


@attrs.frozen
class Served:
    port: int
    engine: Engine
    context: Context

    def settle(self) -> None:
        deadline = time.monotonic() + 30
        while (self.context.bridge.num_open or self.engine.has_work) and time.monotonic() < deadline:
            time.sleep(0.01)

    def lost(self) -> list[str]:
        """What is still held by nobody, in words."""
        ledger = self.engine.ledger()
        held = [f"block {block} has {count} owners" for block, count in enumerate(ledger.references) if count]
        queued = [f"request {request} waits or runs" for request in (*ledger.waiting, *ledger.running)]
        return [*held, *queued, *self.engine.audit(), *[f"row {row} is held" for row in ledger.rows.values()]]


@pytest.fixture
def served() -> Iterator[Served]:
    engine = assemble(EngineConfig(**SIZES), synthetic_model())
    app = create_app(engine, ServerSettings(send_timeout=0.5, check="log", log_level="error"))
    sock = bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(uvicorn.Config(Abortable(app), log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    context = app.state.context
    deadline = time.monotonic() + 10
    while context.bridge.refusal() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    yield Served(sock.getsockname()[1], engine, context)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def rounds(served: Served, clients: int, count: int) -> tuple[list[int], int]:
    """Storms one after the other; the process's resident memory in bytes after each, and how many answers were as alone."""
    solo = asyncio.run(alone(served.port))
    memory, equal = [], 0
    for seed in range(count):
        outcomes = asyncio.run(storm(served.port, clients, seed))
        assert complaints(outcomes, solo) == []
        assert {outcome.manner for outcome in outcomes} == {"stays", "leaves", "stalls", "malformed"}
        served.settle()
        assert served.lost() == []
        assert not served.context.bridge._live
        gc.collect()
        memory.append(resident())
        equal += sum(outcome.manner == "stays" for outcome in outcomes)
    counters, outlet, checker = served.engine.counters, served.context.metrics.outlet, served.context.metrics.checker
    assert counters.preemptions > 0  # the pool was tight
    assert counters.finished["abort"] > 0  # and clients did leave; on a busy machine most do before they are read
    assert outlet.blocked_seconds > 0  # and did not read
    assert checker.checks > 0
    assert checker.violations == 0
    assert equal > 0
    return memory, equal


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(600)
def test_three_rounds(served: Served) -> None:
    rounds(served, 80, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_rounds_of_five_hundred(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    memory, equal = rounds(served, 500, 10)
    counters, outlet = served.engine.counters, served.context.metrics.outlet
    with capsys.disabled():
        print(
            f"\n10 rounds of 500 clients in {time.monotonic() - began:.0f} s: {equal} answers as alone, nothing lost;"
        )
        print(f"RSS in MiB after each round: {[round(size / 2**20, 1) for size in memory]}")
        print(f"sends were blocked for {outlet.blocked_seconds:.1f} s, {outlet.dropped} readers cut off,", end=" ")
        print(f"{counters.preemptions} preemptions, {counters.finished['abort']} aborts")
    assert memory[9] <= memory[1] * 1.02, memory


@pytest.mark.timeout(900)
@pytest.mark.parametrize("clients", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_sigterm_in_the_middle(tmp_path: Path, clients: int) -> None:
    """The audit runs after every iteration and would end the process with 3."""
    folder = write_folder(tmp_path / "model", "llama")
    server = Running(
        *("--model", str(folder), "--max-model-len", "512", "--check", "raise", "--log-level", "error"),
        *("--drain-timeout", "1", "--send-timeout", "0.5"),
        rows=8,
        blocks=28,
    )
    port = int(server.url.rpartition(":")[2])
    try:
        solo = asyncio.run(alone(port))

        async def main() -> list[Outcome]:
            storming = asyncio.create_task(storm(port, clients, 1))
            await asyncio.sleep(0.25)
            server.process.send_signal(signal.SIGTERM)
            return await storming

        outcomes = asyncio.run(main())
        status, _, err = finish(server.process)
    finally:
        server.process.kill()
        server.process.communicate()
    assert complaints(outcomes, solo, draining=True) == []
    assert status == 0, err
    assert "Traceback" not in err
    ends = Counter(outcome.error for outcome in outcomes if outcome.manner == "stays")
    assert ends["server_shutdown"] + ends["refused"] > 0, ends  # it was in the middle


def test_a_block_that_is_lost_is_seen(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlockPool.release

    def leaky(self: BlockPool, table: Any) -> None:
        real(self, table[:-1] if len(table) > 3 else table)

    monkeypatch.setattr(BlockPool, "release", leaky)
    asyncio.run(storm(served.port, 12, 0))
    served.settle()
    assert any("owner" in sentence for sentence in served.lost())


def test_what_a_storm_complains_about() -> None:
    solo = [[1, 2]]
    good = Outcome("stays", 0, 200, [1, 2], whole=True)
    cases = [
        (attrs.evolve(good, answer=[1, 3]), "another answer"),
        (attrs.evolve(good, whole=False), "no end"),
        (attrs.evolve(good, error="forgotten"), "forgotten"),
        (attrs.evolve(good, error="server_shutdown"), "server_shutdown"),
        (Outcome("malformed", status=500), "500"),
    ]
    assert complaints([good], solo) == []
    for outcome, words in cases:
        assert words in complaints([outcome], solo)[0]
    assert complaints([attrs.evolve(good, error="server_shutdown")], solo, draining=True) == []
    assert complaints([attrs.evolve(good, error="server_shutdown", whole=False)], solo, draining=True) != []
    assert Counter(map(manner, range(60))) == {"malformed": 3, "stalls": 6, "leaves": 17, "stays": 34}
