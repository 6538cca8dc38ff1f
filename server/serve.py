"""One server process from the socket to the exit status.

    the port is taken -> answer /health with 503 -> load the model on the engine thread -> ready
    SIGTERM or Ctrl-C -> refuse new requests -> let running ones finish -> end the rest -> exit 0

Probes get an answer while the model loads, since the engine thread loads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import structlog
import uvicorn
from fastapi import FastAPI

from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from server import console, hosts
from server.app import create_lazy_app
from server.context import Context
from server.facts import shortfall
from server.outlet import Abortable
from server.phase import Phase
from server.settings import ServerSettings
from server.sockets import BACKLOG, StartError, url_of

FAREWELL = 1.0  # seconds for open requests to be told that they end, when a second signal came
CLOSE_TIMEOUT = 5  # seconds for connections to close after the last answer
EXIT_DEAD = 3

log = structlog.get_logger("lockstep.serve")


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: a signal first drains the engine, here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    sock: socket.socket,
    progress: console.StartProgress,
    early: Sequence[int] = (),
) -> int:
    """Runs until a signal or the engine's death, and returns the exit status. Raises ``StartError`` for a setting or a
    model that cannot work. ``sock`` listens already; logs are configured; ``progress`` goes on with what loads the model;
    ``early`` grows by signals that come before this takes them over."""
    seconds = 0.0

    def make() -> Engine:
        nonlocal seconds
        progress.begin("importing torch")
        import engine.build  # noqa: F401 - what from_config imports, told as a stage of its own

        progress.begin("reading the model")
        made = Engine.from_config(config, progress)
        set_aside()
        seconds = progress.stop()
        return made

    app = create_lazy_app(make, settings, hosts.allowed(settings.allowed_hosts, sock.getsockname()[0]))
    context: Context = app.state.context
    server = _Server(
        uvicorn.Config(
            Abortable(app),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            backlog=BACKLOG,
            http=_protocol(),
            timeout_graceful_shutdown=CLOSE_TIMEOUT,
        )
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        status = runner.run(_run(app, server, sock, url_of(settings.host, sock), lambda: seconds, early))
    progress.stop()  # of a start that came to no end
    failure = context.bridge.failure
    if context.bridge.phase is Phase.FAILED and failure is not None:
        if isinstance(failure, _settings_errors()):
            raise StartError(str(failure)) from failure
        log.critical("the engine could not be started", exc_info=failure)
    if context.bridge.alive:  # still loading, or stuck in a step: it cannot be ended, and must not hold up the exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def set_aside() -> None:
    """What exists now stays until the end, so the garbage collector need not look through it again and again: that would stop
    every answer for as long as it takes, 130 ms for the quarter of a million objects of the default model's server."""
    gc.collect()
    gc.freeze()


def _settings_errors() -> tuple[type[Exception], ...]:
    """What says in one sentence that a setting or a model is wrong; anything else is a failure of the engine."""
    from engine.loading.model import LoadError

    return (LoadError, ConfigError)


def _protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """The quick parser where its package is installed, with bounds on heads; h11 has them itself."""
    try:
        from server.heads import BoundedHeads
    except ImportError:
        return "h11"
    return BoundedHeads


def _farewell(requests: int, seconds: float) -> str:
    if not requests:
        return "shutting down"
    return f"shutting down: waiting up to {seconds:g} s for {requests} requests; again to stop now"


async def _run(
    app: FastAPI,
    server: _Server,
    sock: socket.socket,
    url: str,
    seconds: Callable[[], float],
    early: Sequence[int],
) -> int:
    """Serves until told to stop; returns the exit status. ``seconds``: what the start took, once it is over."""
    context: Context = app.state.context
    bridge = context.bridge
    loop = asyncio.get_running_loop()
    bridge.bind(loop)
    stop = asyncio.Event()
    hurry = asyncio.Event()
    signals = 0

    def leave() -> None:
        """Whoever asks twice does not want to wait, nor to read what was cut short."""
        server.force_exit = server.should_exit = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals == 2:
            hurry.set()
            loop.call_later(FAREWELL, leave)  # until then open streams are told how they end
        elif signals > 2:
            leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    for _ in tuple(early):
        on_signal()
    serving = asyncio.create_task(server.serve([sock]))
    stopped = asyncio.create_task(stop.wait())
    try:
        started = asyncio.create_task(bridge.wait_phase(Phase.READY, Phase.FAILED, Phase.DEAD))
        await asyncio.wait({started, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        ended = asyncio.create_task(bridge.wait_phase(Phase.FAILED, Phase.DEAD))
        if bridge.phase is Phase.READY:
            engine = bridge.engine
            rows = [*engine.capacity(), *shortfall(engine.limits)]
            console.print_ready(url, rows, context.names, engine.model.template is not None, seconds())
            await asyncio.wait({ended, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            log.info(_farewell(bridge.num_open, context.settings.drain_timeout))
            draining = asyncio.create_task(bridge.drain(context.settings.drain_timeout))
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait({draining, serving, hurried}, return_when=asyncio.FIRST_COMPLETED)
            if hurry.is_set():
                draining.cancel()
                draining = asyncio.create_task(bridge.drain(0.0))
                await asyncio.wait({draining, serving}, timeout=FAREWELL, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            hurried.cancel()
        started.cancel()
        ended.cancel()
    finally:
        server.should_exit = True
        stopped.cancel()
        await serving
    return EXIT_DEAD if bridge.failure is not None else 0
