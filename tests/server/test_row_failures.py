"""A request that cannot go on (rules 13.7 and 13.8), seen by clients: its own answer is an error, everybody else's is whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from engine.control.plan import NO_TOKEN, Plan, Sampled
from engine.text.stream import TextStream
from engine.trace import Submit
from server.record import Recorder
from server.shapes import CompletionShape
from tests.server.stub import StubRunner
from tests.server.test_failures import BODY, CHATS, COMPLETIONS, GENERATE
from tests.server.test_record import replayed
from tests.server.world import World

WHY = "the logits for position 9 hold 3 NaN among 512"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
SGLANG = {"text": "hello", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}}
BODIES = {COMPLETIONS: BODY, CHATS: CHAT, GENERATE: SGLANG}


class DeadRows(StubRunner):
    """``dead``: requests, and at which of their tokens (from 1) the row has none."""

    def __init__(self, dead: dict[int, int]) -> None:
        super().__init__()
        self.dead = dead
        self.told: dict[int, int] = {}

    def execute(self, plan: Plan) -> list[Sampled]:
        sampled = super().execute(plan)
        for at, entry in enumerate(plan.sampling):
            self.told[entry.request] = self.told.get(entry.request, 0) + 1
            if self.dead.get(entry.request) == self.told[entry.request]:
                sampled[at] = Sampled(NO_TOKEN, failure=WHY)
        return sampled


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def alone(path: str, body: dict[str, Any]) -> bytes:
    """What the request is sent when nothing fails, but for what names the answer."""

    async def main() -> bytes:
        world = World()
        exchange = world.post(path, body)
        await world.run(exchange)
        return bytes(exchange.data)

    return asyncio.run(main())


def error_of(body: Any) -> dict[str, Any]:
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == ("server_error", "engine_error", None)
    return error


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("at", [1, 4])
def test_a_row_without_a_token_is_a_500_or_an_error_event(path: str, at: int) -> None:
    """Beside it three are served as they are alone; its row and blocks come back; metrics count the ends."""

    async def main() -> None:
        runner = DeadRows({0: at, 2: at})
        world = World(runner)
        body = BODIES[path]
        asked = [body, body, body | {"stream": True}, body | {"stream": True}]
        exchanges = [world.post(path, each) for each in asked]
        await world.run(*exchanges)
        whole, good, stream, flow = exchanges
        assert whole.status == 500
        assert error_of(whole.json())["message"] == f"this request could not go on: {WHY}"
        *chunks, error, done = stream.events()
        assert (stream.status, done) == (200, "[DONE]")
        assert WHY in error_of(error)["message"]
        assert len(stream.events()) < len(flow.events())
        assert (good.status, flow.status, flow.events()[-1]) == (200, 200, "[DONE]")
        assert text_of(good.json()) == text_of(plain)
        assert not any("error" in chunk for chunk in chunks)
        await world.step(2)
        assert world.nothing_held()
        counters = world.engine.counters
        assert (counters.finished["error"], counters.finished["length"], counters.failed_steps) == (2, 2, 0)
        told = world.app.state.context.metrics.exposition().decode()
        assert [line for line in told.splitlines() if 'finished_reason="error"' in line and line.endswith(" 2.0")]

    plain = json.loads(alone(path, BODIES[path]))
    run(main)


def text_of(body: Any) -> Any:
    if "choices" in body:
        return [choice.get("text") or choice.get("message") for choice in body["choices"]]
    return body["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_one_choice_without_a_token_ends_the_answer_and_frees_the_others(stream: bool) -> None:
    async def main() -> None:
        world = World(DeadRows({1: 3}))
        exchange = world.post(COMPLETIONS, BODY | {"n": 3, "temperature": 1.0, "stream": stream})
        neighbour = world.post(COMPLETIONS, BODY)
        await world.run(exchange, neighbour)
        if stream:
            *_, error, done = exchange.events()
            assert (WHY in error_of(error)["message"], done) == (True, "[DONE]")
        else:
            assert exchange.status == 500
        assert neighbour.status == 200
        await world.step(2)
        assert world.nothing_held()
        finished = world.engine.counters.finished
        assert (finished["error"], finished["abort"], finished["length"]) == (1, 2, 1)

    run(main)


@pytest.mark.parametrize("stop", [None, "never comes"])
def test_a_text_that_raises_is_told_to_its_own_client(stop: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine thread, where there are stop strings, and on the event loop. The token itself is not sent."""
    push, first = TextStream.push, []

    def broken(text: TextStream, token: int, may_stop: bool = True, last: bool = False) -> bool:
        first.append(text)
        if text is first[0] and first.count(text) == 3:
            raise LookupError("no such piece")
        return push(text, token, may_stop, last)

    async def main() -> None:
        monkeypatch.setattr(TextStream, "push", broken)
        world = World()
        body = BODY | {"stop": stop, "stream": True, "return_token_ids": True}
        bad, good = world.post(COMPLETIONS, body), world.post(COMPLETIONS, body)
        await world.run(bad, good)
        *chunks, error, done = bad.events()
        assert (error["error"]["type"], done) == ("server_error", "[DONE]")
        assert sum(len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"]) == 2
        assert not any("error" in event for event in good.events()[:-1])
        await world.step(2)
        assert world.nothing_held()

    run(main)


@pytest.mark.parametrize("how", ["streamed", "late", "whole"])
def test_a_text_that_raises_without_stop_strings_ends_its_request_at_once(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made before is told, also in one delta with it; the engine does not run on; who runs it reads the cause."""
    push, first = TextStream.push, []

    def broken(text: TextStream, token: int, may_stop: bool = True, last: bool = False) -> bool:
        first.append(text)
        if text is first[0] and first.count(text) == 3:
            raise LookupError("no such piece")
        return push(text, token, may_stop, last)

    async def main() -> None:
        monkeypatch.setattr(TextStream, "push", broken)
        world = World()
        body = BODY | {"max_tokens": 24, "return_token_ids": True}
        bad = world.post(COMPLETIONS, body | {"stream": how != "whole"})
        if how == "late":
            await world.until(lambda: world.bridge.num_open == 1)
            await world.step()
            bad.stall()
            await world.step(6)
            bad.resume()
        with structlog.testing.capture_logs() as logs:
            await world.run(bad)
            await world.step(2)
        told = bad.json() if how == "whole" else bad.events()[-2]
        assert error_of(told)["message"] == "this request could not go on: the text of output token 3 failed"
        if how != "whole":
            chunks = bad.events()[:-2]
            assert sum(len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"]) == 2
        (entry,) = [entry for entry in logs if entry["log_level"] == "error"]
        assert (entry["event"], entry["cause"]) == ("a request failed", "LookupError: no such piece")
        assert world.engine.counters.finished["abort"] == 1
        assert world.engine.counters.sampled_tokens < 24
        assert world.nothing_held()

    run(main)


@pytest.mark.parametrize("stop", [None, "never comes"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_end_of_a_text_that_raises_is_an_error_of_its_request(
    stop: str | None, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: TextStream) -> None:
        raise LookupError("no such piece")

    async def main() -> None:
        monkeypatch.setattr(TextStream, "finish", broken)
        world = World()
        bad = world.post(COMPLETIONS, BODY | {"stop": stop, "stream": stream})
        await world.run(bad)
        told = bad.events()[-2] if stream else bad.json()
        assert "the text of output token" in error_of(told)["message"]
        await world.step(2)
        assert world.nothing_held()

    run(main)


BROKEN = {
    "push": (TextStream, "push"),
    "take": (TextStream, "take"),
    "finish": (TextStream, "finish"),
    "shape": (CompletionShape, "whole"),
    "event": (CompletionShape, "events"),
}


WHOLE, STREAMED = ("push", "take", "finish", "shape"), ("push", "take", "finish", "event")


@pytest.mark.parametrize("stop", [None, "never comes"])
@pytest.mark.parametrize(("where", "stream"), [*((at, False) for at in WHOLE), *((at, True) for at in STREAMED)])
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_fails_in_the_server_counts_as_an_error(
    where: str, stop: str | None, stream: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the engine aborts it for that, or had ended it; and no count goes back on the way."""

    def broken(*_: object, **__: object) -> None:
        raise LookupError("no such piece")

    async def main() -> None:
        world = World()
        metrics = world.app.state.context.metrics
        bad = world.post(COMPLETIONS, BODY | {"stop": stop, "stream": stream, "n": n, "temperature": 1.0})
        await world.until(lambda: world.bridge.num_open == 1)
        with monkeypatch.context() as patch:
            patch.setattr(*BROKEN[where], broken)
            before: dict[str, int] = {}
            while not bad.task.done():
                await world.step()
                ended = metrics.ended()
                assert all(ended.get(reason, 0) >= count for reason, count in before.items()), (before, ended)
                before = dict(ended)
        assert (bad.events()[-2] if stream else bad.json())["error"]["type"] == "server_error"
        await world.step(2)
        assert dict(metrics.ended()) == {"error": n}
        good, gone = world.post(COMPLETIONS, BODY), world.post(COMPLETIONS, BODY | {"stream": True, "max_tokens": 24})
        await world.until(lambda: world.bridge.num_open == 2)
        await world.step(2)
        gone.leave()
        await world.run(good, gone)
        await world.step(2)
        assert dict(metrics.ended()) == {"error": n, "length": 1, "abort": 1}
        told = metrics.exposition().decode().splitlines()
        assert [line for line in told if "requests_aborted_total{" in line and line.endswith(" 1.0")]
        assert [line for line in told if 'finished_reason="error"' in line and line.endswith(f" {n}.0")]

    run(main)


def test_a_recording_keeps_who_could_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay meets the same decisions, by either failure."""
    push, pushes = TextStream.push, []

    def broken(text: TextStream, token: int, may_stop: bool = True, last: bool = False) -> bool:
        pushes.append(text)
        if len(pushes) == 5:
            raise LookupError("no such piece")
        return push(text, token, may_stop, last)

    async def main() -> Recorder:
        world = World(DeadRows({0: 3, 2: 1}))
        recorder = world.engine.tap = Recorder(world.engine.limits, Path("unused"))
        await world.run(*(world.post(COMPLETIONS, BODY | {"prompt": name}) for name in ("one", "two", "three")))
        monkeypatch.setattr(TextStream, "push", broken)
        await world.run(world.post(COMPLETIONS, BODY | {"prompt": "four", "stop": "never comes"}))
        await world.step(2)
        return recorder

    workload = asyncio.run(main()).workload()
    fails = [(e.fail_at, e.fail_by) for e in workload.events if isinstance(e, Submit)]
    assert fails == [(3, "sampling"), (None, "sampling"), (1, "sampling"), (5, "text")]
    assert replayed(workload) == list(workload.digests)
    healed = replace(workload, events=tuple(replace(e, fail_at=None) for e in workload.events if isinstance(e, Submit)))
    assert replayed(healed) != list(workload.digests)
