"""A real server on a real socket for foreign clients, and its own count of what they sent.

The calls are counted here, at the server's door, so that a client that never called cannot report success. ``between``
puts something between door and application: a test of the tests plants a fault there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.build import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading.synthetic import synthetic_model
from server.app import create_app
from server.bridge import Bridge
from server.settings import ServerSettings
from server.sockets import bind

MODEL = "tiny"


@attrs.frozen
class Call:
    """One exchange as the server saw it; ``status`` 0: the client was gone before the answer began."""

    method: str
    path: str
    status: int
    agent: str


@attrs.frozen
class Served:
    """``url`` has no path. ``calls`` grows when an exchange is over."""

    url: str
    engine: Engine
    bridge: Bridge
    calls: list[Call] = attrs.field(factory=list)
    begun: list[str] = attrs.field(factory=list)  # paths, in order; as many as ``calls`` when no exchange is open

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @contextmanager
    def counted(self) -> Iterator[Counter[tuple[str, int]]]:
        """The calls made within, by path and status; filled in when the block ends."""
        tally: Counter[tuple[str, int]] = Counter()
        self.wait_idle()  # a client has its answer a moment before the exchange is over and counted
        before = len(self.calls)
        yield tally
        self.wait_idle()
        tally.update((call.path, call.status) for call in self.calls[before:])

    def wait_idle(self, seconds: float = 30) -> None:
        """Nobody is being answered, and no block or row belongs to anybody."""
        deadline = time.monotonic() + seconds
        while self._busy() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not self.engine.has_work
        assert self.engine.audit() == []
        assert not any(self.engine.ledger().references)

    def _busy(self) -> bool:
        return bool(self.bridge.num_open or self.engine.has_work or len(self.begun) > len(self.calls))


def tiny_engine(context: int = 512, **config: Any) -> Engine:
    """The random model of the tests with real kernels; eight rows, and a pool in which many requests meet."""
    sizes: dict[str, Any] = {"num_kv_blocks": 256, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    model = synthetic_model(max_position_embeddings=context)
    return assemble(EngineConfig(device="cpu", threads=1, **(sizes | config)), model)


@contextmanager
def serve(
    engine: Engine | None = None,
    settings: ServerSettings | None = None,
    between: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Iterator[Served]:
    """uvicorn in a thread of this process, on a free port of the loopback address."""
    engine = engine or tiny_engine()
    app = create_app(engine, settings or ServerSettings(served_model_name=(MODEL,), log_level="error"))
    sock = bind("127.0.0.1", 0)
    served = Served(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, app.state.context.bridge)
    door = _counting(between(app), served)
    server = uvicorn.Server(uvicorn.Config(door, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not (server.started and served.bridge.refusal() is None) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert served.bridge.refusal() is None
        yield served
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def _counting(app: ASGIApp, served: Served) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = dict(scope["headers"])
        served.begun.append(scope["path"])
        try:
            await app(scope, receive, noted)
        finally:
            agent = headers.get(b"user-agent", b"").decode("latin-1")
            served.calls.append(Call(scope["method"], scope["path"], status, agent))

    return counted
