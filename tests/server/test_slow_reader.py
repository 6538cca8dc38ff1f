"""A client that does not read: it costs itself only, is counted, and is cut off; a request that takes too long is ended.

With a client that a test plays by hand, and with real sockets whose buffers are small.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import structlog
import uvicorn

from engine.engine import Engine
from server.app import create_app
from server.bridge import Bridge
from server.outlet import Abortable, ClientLeft, Outlet
from server.settings import ServerSettings
from server.sockets import bind
from tests.server.stub import stub_engine
from tests.server.test_metrics import samples
from tests.server.world import SPECS, World, parse_events

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
PATH = "/v1/completions"

both = pytest.mark.parametrize("spec", SPECS)


def outlet_of(world: World) -> Outlet:
    outlet: Outlet = world.app.state.context.metrics.outlet
    return outlet


@both
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_who_does_not_read_is_cut_off(spec: str, stream: bool) -> None:
    async def main() -> None:
        world = World(settings=ServerSettings(send_timeout=0.1))
        slow = world.post(PATH, LONG | {"stream": stream}, spec)
        reader = world.post(PATH, LONG | {"seed": 4}, spec)
        await world.submitted(2)
        await world.step(3)
        slow.stall()
        await world.run(slow, reader)
        assert not slow.ended
        assert parse_events(reader.data)[-1] == "[DONE]"
        await world.step(2)
        assert world.nothing_held()
        outlet = outlet_of(world)
        assert (outlet.dropped, outlet.blocked) == (1, 0)
        assert outlet.blocked_seconds >= 0.1

    asyncio.run(main())


def test_back_pressure_shows_while_it_lasts() -> None:
    async def main() -> None:
        world = World(settings=ServerSettings(send_timeout=0))  # for ever
        slow = world.post(PATH, LONG, "2.3")
        await world.submitted()
        await world.step(3)
        outlet = outlet_of(world)
        assert (outlet.blocked, outlet.blocked_seconds) == (0, 0.0)
        slow.stall()
        await world.step(3)
        await asyncio.sleep(0.03)
        assert outlet.blocked == 1
        first = outlet.blocked_seconds
        await asyncio.sleep(0.02)
        told = samples(world.app.state.context.metrics.exposition().decode())
        (seconds,), (sends,) = (
            told[f"lockstep:{name}"].values() for name in ("send_blocked_seconds_total", "sends_blocked")
        )
        assert 0 < first < seconds
        assert sends == 1
        slow.resume()
        await world.run(slow)
        assert (outlet.blocked, outlet.dropped) == (0, 0)
        assert outlet.blocked_seconds > first

    asyncio.run(main())


@both
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_a_request_that_takes_too_long_ends_with_an_error(spec: str, stream: bool) -> None:
    """Running or waiting; others that are quick enough do not notice."""

    async def main() -> None:
        world = World(settings=ServerSettings(request_timeout=0.15), max_num_seqs=1)
        running = world.post(PATH, LONG | {"stream": stream}, spec)
        waiting = world.post(PATH, LONG | {"stream": stream}, spec)
        await world.submitted(2)
        await world.step(3)
        for exchange in (running, waiting):
            await asyncio.wait_for(exchange.task, 2)
            if stream:
                *chunks, error, done = exchange.events()
                assert (exchange.status, done) == (200, "[DONE]")
                assert bool(chunks) == (exchange is running)
            else:
                error = exchange.json()
                assert exchange.status == 504
            assert error["error"]["code"] == "request_timeout"
            assert error["error"]["type"] == "timeout_error"
        await world.step(2)
        assert world.nothing_held()
        assert outlet_of(world).timed_out == 2
        quick = world.post(PATH, LONG | {"max_tokens": 1, "stream": False}, spec)
        await world.run(quick)
        await asyncio.sleep(0.2)
        assert (quick.status, outlet_of(world).timed_out) == (200, 2)

    asyncio.run(main())


def test_the_log_says_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """499 for a stream whose client left after the first byte, and what was answered otherwise."""

    async def main() -> list[int]:
        world = World()
        with structlog.testing.capture_logs() as lines:
            left = world.post(PATH, LONG)
            await world.submitted()
            await world.step(3)
            left.leave()
            await asyncio.wait_for(left.task, 2)
            await world.run(stayed := world.post(PATH, LONG), refused := world.post(PATH, {"prompt": 5}))
        assert (left.status, stayed.status, refused.status) == (200, 200, 400)
        return [line["status"] for line in lines if line["event"] == "request"]

    assert sorted(asyncio.run(main())) == [200, 400, 499]


@attrs.frozen
class Served:
    port: int
    engine: Engine
    bridge: Bridge
    outlet: Outlet
    errors: list[str]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def served() -> Iterator[Served]:
    """Behind a socket whose send buffer is small; a client is cut off after 0.3 seconds."""
    engine = stub_engine(num_blocks=2048, max_num_seqs=8, max_model_len=4000, captures=((8, 1000),))
    app = create_app(engine, ServerSettings(send_timeout=0.3, log_level="error"))
    sock = bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted sockets inherit it
    server = uvicorn.Server(uvicorn.Config(Abortable(app), log_config=None, access_log=False, lifespan="on"))
    handler = _Lines()
    logging.getLogger("uvicorn.error").addHandler(handler)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    context = app.state.context
    until(lambda: str(context.bridge.phase) == "ready")
    yield Served(sock.getsockname()[1], engine, context.bridge, context.metrics.outlet, handler.lines)
    server.should_exit = True
    thread.join(10)
    logging.getLogger("uvicorn.error").removeHandler(handler)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def connect(port: int, body: dict[str, Any]) -> socket.socket:
    """Sends a request over a socket with a small receive buffer, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def read_to_the_end(client: socket.socket) -> None:
    while client.recv(65536):
        pass


def test_on_real_sockets(served: Served) -> None:
    """An answer larger than all buffers: the connection is reset, not closed behind bytes that nobody reads."""
    body = LONG | {"max_tokens": 3000, "logprobs": 5}
    slow = [connect(served.port, body) for _ in range(2)]
    until(lambda: served.outlet.blocked_seconds > 0)
    until(lambda: served.outlet.dropped == 2)
    for client in slow:
        client.settimeout(5)
        with pytest.raises(ConnectionError):
            read_to_the_end(client)
        client.close()
    until(lambda: not served.bridge.num_open and not served.engine.has_work)
    assert served.engine.audit() == []
    assert not any(served.engine.ledger().references)
    with connect(served.port, LONG) as client:  # who reads gets all of it
        data = b""
        while b"[DONE]" not in data:
            data += client.recv(65536)
    assert served.errors == []


class _Cycle:
    """As uvicorn's, over a transport that raises as uvloop's do when they are closed."""

    def __init__(self, closed: bool) -> None:
        self.transport = _Transport(closed)

    async def send(self, message: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


class _Transport(asyncio.Transport):
    def __init__(self, closed: bool) -> None:
        super().__init__()
        self.closed = closed

    def is_closing(self) -> bool:
        return self.closed


@pytest.mark.parametrize("closed", [True, False])
def test_a_send_on_a_closed_transport_is_a_client_that_left(closed: bool) -> None:
    """A ``RuntimeError`` while the connection stands stays what it is."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def main() -> None:
        with pytest.raises(ClientLeft if closed else RuntimeError):
            await Abortable(app)({"type": "http"}, None, _Cycle(closed).send)  # type: ignore[arg-type]

    asyncio.run(main())


def test_a_client_that_left_is_no_unexpected_error() -> None:
    async def main() -> None:
        world = World(settings=ServerSettings(log_level="info"))

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            raise ClientLeft("closed")

        scope = {"type": "http", "method": "GET", "path": "/version", "headers": [], "query_string": b""}
        with structlog.testing.capture_logs() as logs:
            await world.app(scope, receive, send)
        assert [entry for entry in logs if entry["log_level"] == "error"] == []

    asyncio.run(main())
