"""Servers for the tests of the server's page, on a real socket, and people who keep them busy.

A runner that waits for permits lets a test say how far an answer has come while the page is looked at.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import attrs
import uvicorn
from playwright.sync_api import Page

from engine.control.plan import Plan
from engine.engine import Engine
from server.app import create_lazy_app
from server.context import Context
from server.phase import Phase
from server.settings import ServerSettings
from server.sockets import bind
from tests.server.stub import StubRunner


class PermitRunner(StubRunner):
    """Each decode step takes a permit. ``drift`` makes answers depend on what they must not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.free = threading.Event()
        self.free.set()
        self.drift = False

    def execute(self, plan: Plan) -> Any:
        if plan.decodes:
            while not self.free.is_set() and not self.permits.acquire(timeout=0.01):
                pass
        sampled = super().execute(plan)
        if self.drift:
            sampled = [attrs.evolve(one, token=3 + (one.token + plan.iteration) % 90) for one in sampled]
        return sampled


class SlowRunner(StubRunner):
    def execute(self, plan: Plan) -> Any:
        time.sleep(0.02)
        return super().execute(plan)


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@attrs.frozen
class Served:
    url: str
    context: Context
    runner: PermitRunner

    def hold(self) -> None:
        """From now on decode steps wait."""
        while self.runner.permits.acquire(blocking=False):
            pass
        self.runner.free.clear()

    def drip(self, page: Page, ready: Callable[[], bool]) -> None:
        """One decode step after another: the engine is looked at between two of them."""
        for _ in range(60):
            if ready():
                return
            self.runner.permits.release()
            page.wait_for_timeout(50)
        raise AssertionError("60 steps were not enough")


@contextmanager
def serving(make: Callable[[], Engine], settings: ServerSettings | None = None) -> Iterator[tuple[str, Context]]:
    app = create_lazy_app(make, settings)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: app.state.context.bridge.phase is Phase.READY, 90)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", app.state.context
    except BaseException:
        server.force_exit = True
        raise
    finally:
        server.should_exit = True
        thread.join(15)


@contextmanager
def crowd(url: str, people: int, bodies: list[dict[str, Any]]) -> Iterator[None]:
    """``people`` who ask one thing after another until the end. Not from the page: a browser opens six connections."""
    gone = threading.Event()

    def person(number: int) -> None:
        for k in itertools.count(number):
            if gone.is_set():
                return
            data = json.dumps({"seed": k, "priority": 1} | bodies[k % len(bodies)]).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
            urllib.request.urlopen(request, timeout=60).read()

    with ThreadPoolExecutor(people) as pool:
        asking = [pool.submit(person, number) for number in range(people)]
        try:
            yield
        finally:
            gone.set()
    for one in asking:
        one.result()


def chat(text: str, max_tokens: int, system: str | None = None) -> dict[str, Any]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*head, {"role": "user", "content": text}], "max_tokens": max_tokens}
