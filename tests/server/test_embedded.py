"""The application inside a server that somebody else made and stops: what create_app's docstring says about its end."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request

import pytest
import uvicorn

from server.app import create_app
from server.sockets import bind
from tests.server.stub import stub_engine


@pytest.mark.parametrize("way", ["drain", "limit"])
def test_a_stream_without_end_does_not_hold_up_the_stop(way: str) -> None:
    """By a drain the watcher is told the end; by uvicorn's own limit its connection is cut."""
    app = create_app(stub_engine())
    bridge = app.state.context.bridge
    sock = bind("127.0.0.1", 0)
    limit = 1 if way == "limit" else None
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=limit))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    deadline = time.monotonic() + 60
    while bridge.refusal() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    watched = urllib.request.urlopen(f"http://127.0.0.1:{sock.getsockname()[1]}/live", timeout=60)
    assert watched.readline().startswith(b"data: {")
    if way == "drain":
        asyncio.run_coroutine_threadsafe(bridge.drain(0.0), bridge._loop).result(60)
        assert watched.read().endswith(b"data: [DONE]\n\n")
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
    assert not bridge.alive
