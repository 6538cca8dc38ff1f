"""The application: an engine behind a bridge, endpoints in front of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from engine import __version__
from engine.engine import Engine
from server import debug_api, errors, generate_api, info_api, openai_api, page
from server.asgi import FrontDoor
from server.bridge import Bridge
from server.check import Checker
from server.context import Context
from server.fields import IGNORED_HEADER, FieldJudge
from server.hosts import Hosts
from server.live_view import LiveView
from server.metrics import Metrics
from server.outlet import Outlet
from server.prompts import Desk
from server.record import Recorder
from server.settings import ServerSettings
from server.tracing import Tracing

log = structlog.get_logger("lockstep.serve")


def create_app(engine: Engine, settings: ServerSettings | None = None) -> FastAPI:
    """An application for an engine that exists. From start-up to shutdown the app's own thread drives it.

    ``app.state.context`` leads to the bridge and the metrics. ``python -m server`` drains the bridge before it closes
    connections. An ASGI server of the caller's own says nothing before it has closed them, and waits for streams to end, of
    which ``/live`` has no end: so before stopping it, ``await app.state.context.bridge.drain(seconds)``, which ends every
    stream with a terminal event, or give it a limit of its own (uvicorn's ``timeout_graceful_shutdown``), which cuts them.

    ``settings.host`` and ``port`` say nothing here. On a loopback address, name the hosts in ``settings.allowed_hosts``, or web
    pages of others can reach it (server/hosts.py); ``python -m server`` does so by itself.
    """
    return create_lazy_app(lambda: engine, settings)


def create_lazy_app(
    make: Callable[[], Engine], settings: ServerSettings | None = None, hosts: Hosts | None = None
) -> FastAPI:
    """As ``create_app``, but ``make`` builds the engine after start-up, on its thread; until then requests get 503. ``hosts``:
    the names that it answers to, from whoever knows the address; without, those of ``settings`` if there are any, else all."""
    settings = settings or ServerSettings()
    checker = Checker(settings.check, settings.check_interval)
    outlet = Outlet(settings.send_timeout)
    tracing = Tracing(settings.otlp_endpoint) if settings.otlp_endpoint is not None else None
    metrics = Metrics(settings.metrics_prefix, checker=checker, outlet=outlet)
    live = LiveView()
    recorder: Recorder | None = None

    def make_and_measure() -> Engine:
        nonlocal recorder
        engine = make()
        if settings.record is not None:
            recorder = engine.tap = Recorder(engine.limits, settings.record)
        metrics.model_name = (*settings.served_model_name, engine.model.name)[0]
        metrics.start(engine)
        return engine

    context = Context(
        settings=settings,
        bridge=Bridge(make_and_measure, sinks=[metrics, live], checker=checker),
        metrics=metrics,
        desk=Desk(),
        judge=FieldJudge(),
        started=time.time(),
        live=live,
    )
    metrics.turned_away = lambda: context.turned_away
    metrics.told = lambda: context.bridge.told

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.bridge.start()
        yield
        await context.bridge.drain(0.0)
        await context.bridge.stop()
        context.desk.close()
        if recorder is not None:
            iterations = await asyncio.to_thread(recorder.write)
            log.info("recorded", iterations=iterations, file=str(recorder.path))
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="Lockstep",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # served by info_api; and without it no pages that load scripts from a foreign host
        telemetry={"tracing": False},
    )
    app.state.context = context
    errors.install(app)
    for router in (
        openai_api.router,
        generate_api.router,
        info_api.router,
        info_api.json_router,
        debug_api.router,
        page.router,
    ):
        app.include_router(router)
    app.add_middleware(FrontDoor, settings=settings, outlet=outlet, tracing=tracing, hosts=hosts)
    if settings.cors_origins:
        _open_to(app, settings.cors_origins)
    return app


def _open_to(app: FastAPI, origins: Sequence[str]) -> None:
    """CORS goes around the front door, since a browser's question beforehand brings no key."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
        expose_headers=["X-Request-Id", "Retry-After", IGNORED_HEADER],
    )
