"""What goes wrong inside: a step that raises, a dead or stuck engine, a full queue, a broken metrics sink, a shutdown.

Always: those concerned get one terminal answer that says so, the others go on, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.control.scheduler import Scheduler
from engine.text.stops import StopSet
from server import generate_api, openai_api, prompts
from server.app import create_app, create_lazy_app
from server.bridge import Bridge
from server.context import Context
from server.live import Choice, Generation
from server.phase import Phase
from server.settings import ServerSettings
from tests.server.stub import StubRunner, stub_engine
from tests.server.test_bodies import assert_error, wait_ready
from tests.server.world import World

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
STREAM = BODY | {"stream": True}


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def test_a_step_that_raises_ends_its_requests_and_no_others() -> None:
    """B115: an event and [DONE] after the first byte, a 500 before; the request that came later is unharmed."""

    async def main() -> None:
        world = World(max_num_seqs=2)
        stream = world.post(COMPLETIONS, STREAM)
        plain = world.post(COMPLETIONS, BODY)
        await world.submitted(2)
        queued = world.post(COMPLETIONS, BODY)
        await world.submitted(3)
        await world.step(2)
        world.runner.fail_at = {world.engine.scheduler.iteration}
        await world.run(stream, plain, queued)
        assert stream.status == 200
        *chunks, error, done = stream.events()
        assert chunks
        assert done == "[DONE]"
        assert error["error"]["code"] == "engine_error"
        assert plain.status == 500
        assert plain.json()["error"]["code"] == "engine_error"
        assert b"secret" not in stream.data + plain.data
        assert queued.status == 200
        assert queued.json()["usage"]["completion_tokens"] == 8
        await world.step()
        assert world.nothing_held()

    run(main)


@pytest.mark.parametrize("stream", [True, False])
def test_one_failing_choice_ends_the_request_and_frees_the_others(stream: bool) -> None:
    """Only one of three prompts is in the step that fails; the other two must not run on for nobody."""

    async def main() -> None:
        world = World(max_num_seqs=1)
        exchange = world.post(COMPLETIONS, BODY | {"prompt": ["a", "b", "c"], "stream": stream})
        await world.submitted()
        world.runner.fail_requests = {1}
        await world.run(exchange)
        if stream:
            events = exchange.events()
            assert "error" in events[-2]
            assert events.count("[DONE]") == 1
        else:
            assert exchange.status == 500
        await world.step(2)
        assert world.nothing_held()

    run(main)


def test_text_that_raises_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = World()
        bad = world.post(COMPLETIONS, BODY | {"stop": "zzz"})
        good = world.post(COMPLETIONS, BODY | {"stop": "yyy"})
        await world.submitted(2)
        await world.step()
        (_, choice), _ = world.bridge._live.values()

        def broken() -> str:
            raise RuntimeError("text is broken")

        monkeypatch.setattr(choice.text, "take", broken)
        await world.run(bad, good)
        assert sorted((bad.status, good.status)) == [200, 500]
        await world.step(2)
        assert world.nothing_held()

    run(main)


def no_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every request come to the engine's door."""
    monkeypatch.setattr(Context, "glance", lambda self, answers=1: None)


def test_queue_full_is_429_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    no_glance(monkeypatch)

    async def main() -> None:
        world = World(max_num_seqs=1, max_waiting=2)
        first = [world.post(COMPLETIONS, BODY) for _ in range(1)]
        await world.submitted(1)
        await world.step()
        waiting = [world.post(COMPLETIONS, BODY) for _ in range(2)]
        await world.submitted(3)
        await world.step()
        refused = world.post(COMPLETIONS, STREAM)
        pair = world.post(COMPLETIONS, BODY | {"prompt": ["a", "b"]})
        await world.submitted(5)
        await world.step()
        await world.run(refused, pair)
        for exchange in (refused, pair):
            assert exchange.status == 429
            assert exchange.headers["retry-after"].isdecimal()
            assert exchange.json()["error"]["code"] == "queue_full"
            assert exchange.json()["error"]["type"] == "rate_limit_error"
        await world.run(*first, *waiting)
        assert [exchange.status for exchange in (*first, *waiting)] == [200] * 3
        await world.step()
        assert world.nothing_held()

    run(main)


def test_a_full_queue_and_a_shutdown_are_told_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a prompt read nor are stop strings compiled for who is turned away; the metrics count them all the same."""
    worked: list[str] = []
    for module, name in ((openai_api, "read_prompts"), (openai_api, "read_messages"), (generate_api, "read_prompts")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, **k: worked.append("reads") or real(*a, **k))
    monkeypatch.setattr(prompts, "StopSet", lambda stops: worked.append("compiles") or StopSet(stops))
    full = {"stop": ["x"], "max_tokens": 8, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    generate = {"text": "a", "sampling_params": {"stop": ["x"]}}

    async def main() -> None:
        world = World(max_num_seqs=1, max_waiting=2)
        kept = [world.post(COMPLETIONS, {"prompt": "a", **full}) for _ in range(2)]
        await world.submitted(2)  # on their way: the engine has seen neither
        assert sorted(worked) == ["compiles"] * 2 + ["reads"] * 2
        worked.clear()
        late = [
            world.post(*ask) for ask in ((COMPLETIONS, {"prompt": "a", **full}), (CHATS, chat), (GENERATE, generate))
        ]
        await asyncio.gather(*(exchange.task for exchange in late))
        assert [exchange.status for exchange in late] == [429] * 3
        assert "2 requests are waiting, and the queue holds 2" in late[0].json()["error"]["message"]
        assert worked == []
        await world.step()  # one of them runs now
        assert world.bridge.num_waiting == 1
        pair = world.post(COMPLETIONS, {"prompt": ["a", "b"], **full})  # one alone would fit
        await pair.task
        assert (pair.status, worked) == (429, ["reads"])
        metrics = world.app.state.context.metrics
        assert metrics.refused() == {"queue_full": 5}
        assert b'reason="queue_full"} 5.0' in metrics.exposition()
        many = world.post(COMPLETIONS, {"prompt": "a", "n": 3})  # never fits, however long one waits
        await many.task
        assert many.status == 400
        worked.clear()
        await world.run(*kept)
        await world.bridge.drain(0)
        gone = world.post(COMPLETIONS, {"prompt": "a", **full})
        await gone.task
        assert (gone.status, gone.json()["error"]["code"], worked) == (503, "server_shutdown", [])
        await world.step(2)
        assert world.bridge.num_waiting == 0
        assert world.nothing_held()

    run(main)


def test_half_a_list_is_not_kept_when_the_rest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    no_glance(monkeypatch)

    async def main() -> None:
        world = World(max_num_seqs=1, max_waiting=3)
        first = world.post(COMPLETIONS, BODY)
        await world.submitted(1)
        await world.step()
        one = world.post(COMPLETIONS, BODY | {"prompt": ["a", "b"]})
        await world.submitted(2)
        await world.step()
        two = world.post(COMPLETIONS, BODY | {"prompt": ["c", "d"]})  # one of them would fit
        await world.submitted(3)
        await world.step()
        await world.run(two)
        assert two.status == 429
        await world.run(first, one)
        await world.step()
        assert world.nothing_held()

    run(main)


def test_a_broken_metrics_sink_hurts_nobody() -> None:
    """B129."""

    class Broken:
        def step(self, engine: Any, record: Any, times: Any) -> None:
            raise ValueError("counters can only be incremented")

    async def main() -> None:
        world = World()
        world.bridge._sinks = (Broken(), *world.bridge._sinks)
        exchange = world.post(COMPLETIONS, STREAM)
        await world.run(exchange)
        assert exchange.events()[-1] == "[DONE]"
        assert world.app.state.context.metrics.reading.counters.sampled_tokens == 8  # and the next sink still hears

    run(main)


@pytest.mark.parametrize("stream", [True, False])
def test_engine_death_is_told_everywhere(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """B127: the loop's own error is fatal. Open requests end, /health says 503, new requests are refused."""
    app = create_app(stub_engine())
    bridge: Bridge = app.state.context.bridge
    with TestClient(app) as client:
        wait_ready(client)
        real = Scheduler.commit
        calls = 0

        def dying(self: Scheduler, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise AssertionError("the state is not what it should be")
            return real(self, *arguments)

        monkeypatch.setattr(Scheduler, "commit", dying)
        response = client.post(COMPLETIONS, json=BODY | {"stream": stream})
        assert "engine_dead" in response.text
        assert response.status_code == (200 if stream else 503)
        assert response.text.endswith("data: [DONE]\n\n") == stream
        assert bridge.phase is Phase.DEAD
        assert bridge.num_open == 0
        for path in ("/health", "/ready"):
            assert_error(client.get(path), 503)
        assert_error(client.post(COMPLETIONS, json=BODY), 503)


def test_health_while_loading_and_when_loading_fails() -> None:
    """B127: 503 until the model can answer, and for ever when it cannot."""
    gate = threading.Event()

    def make() -> Any:
        gate.wait(10)
        raise ValueError("no such model")

    app = create_lazy_app(make)
    with TestClient(app) as client:
        for path in ("/health", "/ready", "/v1/models", "/server_info"):
            assert assert_error(client.get(path), 503)["code"] == "loading"
        response = client.post(COMPLETIONS, json=BODY)
        assert assert_error(response, 503)["code"] == "loading"
        assert response.headers["retry-after"].isdecimal()
        assert client.get("/version").status_code == 200
        assert client.get("/metrics").status_code == 503
        gate.set()
        bridge = app.state.context.bridge
        deadline = time.monotonic() + 5
        while bridge.phase is not Phase.FAILED and time.monotonic() < deadline:
            time.sleep(0.002)
        assert assert_error(client.get("/health"), 503)["code"] == "engine_dead"


def test_health_with_a_stuck_step() -> None:
    """B127: the loop lives, but one iteration does not end. And /health itself answers at once."""
    runner = StubRunner()
    runner.gate = threading.Event()
    app = create_app(stub_engine(runner), ServerSettings(stall_timeout=0.05))
    with TestClient(app) as client:
        wait_ready(client)
        sender = threading.Thread(target=lambda: client.post(COMPLETIONS, json=BODY))
        sender.start()
        deadline = time.monotonic() + 5
        while client.get("/health").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
        assert assert_error(client.get("/health"), 503)["code"] == "engine_stalled"
        assert time.monotonic() - began < 0.5
        assert client.get("/ready").status_code == 200
        runner.gate.set()
        sender.join(5)
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_drain_lets_requests_finish_or_ends_them(stream: bool) -> None:
    async def main() -> None:
        world = World(max_num_seqs=1)
        exchange = world.post(COMPLETIONS, BODY | {"stream": stream})
        waiting = world.post(COMPLETIONS, BODY | {"stream": stream})
        await world.submitted(2)
        await world.step(3)
        draining = asyncio.create_task(world.bridge.drain(5.0))
        await asyncio.sleep(0)
        late = world.post(COMPLETIONS, BODY)
        await world.run(late)
        assert late.status == 503
        assert late.json()["error"]["code"] == "server_shutdown"
        await world.run(exchange, waiting)
        await asyncio.wait_for(draining, 1)
        assert "error" not in str(exchange.data + waiting.data)

        world = World(max_num_seqs=1)
        exchange = world.post(COMPLETIONS, BODY | {"stream": stream})
        waiting = world.post(COMPLETIONS, BODY | {"stream": stream})
        await world.submitted(2)
        await world.step(3)
        draining = asyncio.create_task(world.bridge.drain(0.0))
        await asyncio.sleep(0.01)
        await world.run(exchange, waiting)
        await asyncio.wait_for(draining, 1)
        for one in (exchange, waiting):
            assert b"server_shutdown" in one.data
            assert one.status == (200 if stream else 503)
            assert one.data.endswith(b"data: [DONE]\n\n") == stream
        await world.step()
        assert world.nothing_held()

    run(main)


def test_an_idle_engine_thread_sleeps() -> None:
    """No polling: the thread's own CPU clock stands still while there is nothing to do."""
    with TestClient(create_app(stub_engine())) as client:
        wait_ready(client)
        client.post(COMPLETIONS, json=BODY)
        bridge: Bridge = client.app.state.context.bridge  # type: ignore[attr-defined]
        time.sleep(0.1)
        assert bridge._thread is not None
        assert bridge._thread.ident is not None
        clock = time.pthread_getcpuclockid(bridge._thread.ident)
        before = time.clock_gettime(clock)
        time.sleep(0.3)
        assert time.clock_gettime(clock) - before < 0.005


def test_nothing_stays_in_memory() -> None:
    """B148: after requests of every kind, no object of a request is left."""

    async def main() -> None:
        world = World()
        for index in range(40):
            exchange = world.post(COMPLETIONS, [BODY, STREAM, BODY | {"stop": "x", "n": 2}, {"prompt": 5}][index % 4])
            if index % 4 != 3:
                await world.submitted()
                await world.step(2)
            if index % 3 == 0:
                exchange.leave()
            await world.run(exchange)
        await world.step(2)
        assert world.nothing_held()
        del exchange
        await asyncio.sleep(0)
        gc.collect()
        left = [thing for thing in gc.get_objects() if type(thing) in kinds and id(thing) not in before]
        assert left == []

    kinds = (Choice, Generation)  # by type(): isinstance would wake lazy modules
    before = {id(thing) for thing in gc.get_objects() if type(thing) in kinds}
    run(main)


def test_silence_is_filled_with_comments() -> None:
    async def main() -> None:
        world = World(settings=ServerSettings(ping_interval=0.01))
        exchange = world.post(COMPLETIONS, STREAM)
        await world.submitted()
        await world.step()
        await asyncio.sleep(0.05)
        await world.run(exchange)
        assert exchange.data.count(b": ping\n\n") >= 2
        assert exchange.events()[-1] == "[DONE]"

    run(main)


def test_a_flood_of_tokens_is_read_in_slices() -> None:
    """A choice that was not read for long does not hold up the event loop when it is."""

    async def main() -> None:
        from engine.control.plan import Sampled
        from engine.text.stream import TextStream
        from server.live import SLICE

        choice = Choice(0, 0, TextStream(None), stops_in_commit=False)
        for _ in range(4 * SLICE):
            choice.arrive(Sampled(5), "", None)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        delta = await choice.take()
        ticker.cancel()
        assert delta is not None
        assert len(delta.tokens) == 4 * SLICE
        assert ticks >= 3

    run(main)
