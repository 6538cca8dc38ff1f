"""One server process from the socket to the exit status.

    bind the port -> answer /health with 503 -> load the model on the engine thread -> ready
    SIGTERM or Ctrl-C -> refuse new requests -> let running ones finish -> end the rest -> exit 0

The port is taken before the model is loaded, so that a port in use is told at once, and probes get an answer meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from server import console, logs
from server.app import create_lazy_app
from server.bridge import Phase
from server.context import Context
from server.settings import ServerSettings

BACKLOG = 2048
CLOSE_TIMEOUT = 5  # seconds for connections to close after the last answer
EXIT_DEAD = 3

log = structlog.get_logger("lockstep.serve")


class StartError(Exception):
    """Why the server cannot start, in one sentence."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: a signal first drains the engine, here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Runs until a signal or the engine's death. Raises ``StartError`` for a port, setting or model that cannot work."""
    logs.configure(settings.log_level, settings.log_format)
    sock = bind(settings.host, settings.port)
    progress = console.StartProgress()

    def make() -> Engine:
        try:
            return Engine.from_config(config, progress)
        finally:
            progress.stop()

    app = create_lazy_app(make, settings)
    context: Context = app.state.context
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            backlog=BACKLOG,
            timeout_graceful_shutdown=CLOSE_TIMEOUT,
        )
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        status = runner.run(_run(app, server, sock, url_of(settings.host, sock)))
    failure = context.bridge.failure
    if context.bridge.phase is Phase.FAILED and failure is not None:
        if not isinstance(failure, (*_expected_errors(), ConfigError)):
            log.error("the engine could not be started", exc_info=failure)
        raise StartError(str(failure) or type(failure).__name__) from failure
    if context.bridge.alive:  # still loading, or stuck in a step: it cannot be ended, and must not hold up the exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _expected_errors() -> tuple[type[Exception], ...]:
    from engine.loading.model import LoadError

    return (LoadError, ValueError, OSError, ImportError)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``StartError`` when the address is taken, not ours or not an address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise StartError(f"--host {host}: {_reason(error)}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)  # here, not later: only now it is certain that nobody else listens
    except OSError as error:
        sock.close()
        raise StartError(f"port {port} on {host} cannot be used: {_reason(error)}") from None
    sock.setblocking(False)
    return sock


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def url_of(host: str, sock: socket.socket) -> str:
    port = sock.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


async def _run(app: FastAPI, server: _Server, sock: socket.socket, url: str) -> int:
    """Serves until told to stop; returns the exit status."""
    context: Context = app.state.context
    bridge = context.bridge
    loop = asyncio.get_running_loop()
    bridge.bind(loop)
    stop = asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:  # whoever asks twice does not want to wait
            server.force_exit = server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve([sock]))
    stopped = asyncio.create_task(stop.wait())
    try:
        started = asyncio.create_task(bridge.wait_phase(Phase.READY, Phase.FAILED, Phase.DEAD))
        await asyncio.wait({started, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        ended = asyncio.create_task(bridge.wait_phase(Phase.FAILED, Phase.DEAD))
        if bridge.phase is Phase.READY:
            model = bridge.engine.model
            console.print_ready(url, bridge.engine.capacity(), context.names[0], model.template is not None)
            await asyncio.wait({ended, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            log.info("shutting down", open=bridge.num_open)
            draining = asyncio.create_task(bridge.drain(context.settings.drain_timeout))
            await asyncio.wait({draining, serving}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        ended.cancel()
    finally:
        server.should_exit = True
        stopped.cancel()
        await serving
    return EXIT_DEAD if bridge.failure is not None else 0
