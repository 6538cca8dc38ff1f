"""A client and an engine thread that a test plays by hand: no sockets, no ports, no clock in the engine's way.

``World`` runs the application without its thread; ``step`` is one turn of the bridge. ``Exchange`` is one HTTP exchange
through the bare ASGI interface, whose client can stop reading or leave, under either meaning of ``send`` after leaving:
ASGI 2.3 swallows it, 2.4 raises ``OSError``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from server.app import create_app
from server.settings import ServerSettings
from tests.server.stub import StubRunner, stub_engine

SPECS = ("2.3", "2.4")
PATIENCE = 60.0  # seconds for worker threads on a busy machine; nothing in the engine waits for a clock


class World:
    def __init__(self, runner: StubRunner | None = None, settings: ServerSettings | None = None, **limits: Any) -> None:
        self.runner = runner or StubRunner()
        self.engine = stub_engine(self.runner, **limits)
        self.app = create_app(self.engine, settings)
        self.bridge = self.app.state.context.bridge
        self.bridge.bind(asyncio.get_running_loop())
        self.bridge.adopt()

    def post(self, path: str, body: Any, spec: str = "2.3", **options: Any) -> Exchange:
        return Exchange(self, path, json.dumps(body).encode(), spec, **options)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - what is waited for happens on other threads
                await asyncio.sleep(0.001)

    async def submitted(self, count: int = 1) -> None:
        """Waits until ``count`` requests are open, then applies their submits without a step for them."""
        await self.until(lambda: self.bridge.num_open == count)

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.bridge.turn()
            for _ in range(10):
                await asyncio.sleep(0)

    async def run(self, *exchanges: Exchange) -> None:
        """Steps until the exchanges are over."""
        async with asyncio.timeout(PATIENCE):
            while not all(exchange.task.done() for exchange in exchanges):
                await self.step()
                await asyncio.sleep(0.001)

    def nothing_held(self) -> bool:
        """Whether no block, row or queue entry belongs to anybody."""
        ledger = self.engine.ledger()
        empty = not ledger.waiting and not ledger.running and not any(ledger.references)
        return empty and not self.bridge._live and not self.bridge.num_open and self.engine.audit() == []


class Exchange:
    """Starts at once. ``stall``: the client stops reading, so ``send`` blocks until ``resume``."""

    def __init__(self, world: World, path: str, body: bytes, spec: str, headers: dict[str, str] | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = b""
        self.sends = 0
        self.ended = False
        self._body: bytes | None = body
        self._spec = spec
        self._gone = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        given = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(self._call(world.app, scope))

    async def _call(self, app: Any, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            if self._spec >= "2.4":
                raise OSError("the client is gone")
            return
        await self._reading.wait()
        self.sends += 1
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.data += message["body"]
            self.ended = not message.get("more_body", False)
            if self.ended:
                self._gone.set()  # servers say http.disconnect after the response, too

    def leave(self) -> None:
        self._gone.set()
        self._reading.set()

    def stall(self) -> None:
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def json(self) -> Any:
        return json.loads(self.data)

    def events(self) -> list[Any]:
        return parse_events(self.data)


def parse_events(data: bytes) -> list[Any]:
    """The events of a stream; ``[DONE]`` stays a string. Fails on anything that is not LF-framed ``data:`` or a
    comment."""
    events: list[Any] = []
    assert data.endswith(b"\n\n")
    for block in data[:-2].split(b"\n\n"):
        if block.startswith(b":"):
            continue
        assert block.startswith(b"data: "), block
        assert b"\n" not in block
        assert b"\r" not in block
        payload = block[6:].decode("ascii")
        events.append(payload if payload == "[DONE]" else json.loads(payload, parse_constant=_refuse))
    return events


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
