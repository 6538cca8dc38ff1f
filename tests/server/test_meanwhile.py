"""What a step made is told, turned into text and counted while the next one computes; a sink that fails there hurts nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.control.plan import Plan, Sampled
from server.app import create_app
from server.bridge import Bridge
from server.live import Generation
from server.metrics import Metrics
from tests.server.stub import StubRunner, stub_engine
from tests.server.test_bodies import wait_ready
from tests.server.test_failures import COMPLETIONS, STREAM
from tests.server.test_metrics import samples
from tests.server.world import World

TOKENS = 6


class Patient(StubRunner):
    """Each step but the first computes until everything of the steps before has been told and counted."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self._patience = patience
        self._heard = threading.Condition()
        self.told = self.counted = self.sampled = self.waited = 0
        self.missed: list[int] = []

    def heard(self, *, told: int = 0, counted: int = 0) -> None:
        with self._heard:
            self.told += told
            self.counted += counted
            self._heard.notify_all()

    def execute(self, plan: Plan) -> list[Sampled]:
        if plan.decodes:
            with self._heard:
                self.waited += 1
                if not self._heard.wait_for(lambda: self.told == self.counted == self.sampled, self._patience):
                    self.missed.append(plan.iteration)
        made = super().execute(plan)
        self.sampled += len(made)
        return made


def play(monkeypatch: pytest.MonkeyPatch, patience: float) -> Patient:
    """One answer of TOKENS tokens from a server with its own engine thread."""
    runner = Patient(patience)
    arrive, observe = Generation.arrive, Metrics._observe

    def arrived(self: Generation, choice: Any, token: Sampled | None, *rest: Any) -> None:
        arrive(self, choice, token, *rest)
        runner.heard(told=token is not None)

    def observed(self: Metrics, times: Any, asked: int) -> None:
        observe(self, times, asked)
        runner.heard(counted=len(times.first_tokens) + len(times.between_tokens))

    monkeypatch.setattr(Generation, "arrive", arrived)
    monkeypatch.setattr(Metrics, "_observe", observed)
    with TestClient(create_app(stub_engine(runner))) as client:
        wait_ready(client)
        answer = client.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": TOKENS, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == TOKENS
    return runner


def test_the_step_before_is_told_and_counted_while_the_next_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = play(monkeypatch, patience=60)
    assert runner.waited == TOKENS - 1
    assert runner.missed == []


def test_a_server_that_tells_only_between_steps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, when what a step made is handed over one turn late."""
    deliver, kept = Bridge._deliver, list[Callable[[], Any]]()

    def late(self: Bridge, *calls: Callable[[], Any]) -> None:
        due, kept[:] = kept[:], calls
        deliver(self, *due)
        assert self._engine is not None
        if not self._engine.has_work:
            deliver(self, *kept)
            kept.clear()

    monkeypatch.setattr(Bridge, "_deliver", late)
    assert play(monkeypatch, patience=0.2).missed != []


def test_the_reading_is_of_the_step_and_the_counting_comes_behind_its_tokens() -> None:
    async def main() -> None:
        world = World()
        metrics: Metrics = world.app.state.context.metrics
        order: list[str] = []

        def noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
            def both(*given: Any) -> None:
                order.append(name)
                call(*given)

            return both

        world.post(COMPLETIONS, STREAM)
        await world.submitted()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(metrics, "_observe", noted("counted", metrics._observe))
            patched.setattr(Generation, "arrive", noted("told", Generation.arrive))
            world.bridge.turn()
            assert metrics.reading.counters.sampled_tokens == 1
            assert order == []  # the engine thread has only handed it over
            await asyncio.sleep(0)
            assert order == ["told", "counted"]
            assert metrics.reading.counters is not world.engine.counters
            assert metrics.reading.counters == world.engine.counters

    asyncio.run(main())


def test_a_reading_does_not_change_afterwards() -> None:
    engine = stub_engine()
    metrics = Metrics()
    engine.counters.replays[1, 4] += 1
    metrics.start(engine)
    for name in ("decode_rows", "replays", "eager", "refused", "finished"):
        getattr(engine.counters, name)["new"] += 1
    engine.counters.iterations += 1
    kept = metrics.reading.counters
    assert (kept.iterations, kept.replays, kept.finished, kept.decode_rows) == (0, {(1, 4): 1}, {}, {})
    assert kept.refused["none"] == 0  # still a Counter


def test_a_sink_that_fails_on_the_event_loop_hurts_nobody() -> None:
    class Broken:
        calls = 0

        def step(self, engine: Any, record: Any, times: Any) -> Callable[[], None]:
            return self.fail

        def fail(self) -> None:
            self.calls += 1
            raise ValueError("counters can only be incremented")

    async def main() -> None:
        world, broken = World(), Broken()
        world.bridge._sinks = (broken, *world.bridge._sinks)
        exchange = world.post(COMPLETIONS, STREAM)
        await world.run(exchange)
        assert exchange.events()[-1] == "[DONE]"
        counted = samples(world.app.state.context.metrics.exposition().decode())
        assert counted["lockstep:time_to_first_token_seconds_count"] == {(): 1}
        assert broken.calls > 1
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())
