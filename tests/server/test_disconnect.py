"""A client that leaves: its request is gone one iteration later, under either ASGI version, streamed or not, and nobody
else notices. A client that reads slowly costs itself only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.answer import Answer
from tests.server.world import SPECS, World

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
CONTROL: dict[str, Any] = {"prompt": "the water", "max_tokens": 20, "seed": 5, "stream": True}

both = pytest.mark.parametrize("spec", SPECS)
streams = pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event != "[DONE]" and event.get("choices"))


async def solo(body: dict[str, Any]) -> str:
    world = World()
    exchange = world.post("/v1/completions", body)
    await world.run(exchange)
    return text_of(exchange.events())


@both
@streams
@pytest.mark.parametrize("steps", [0, 1, 3, 10])
def test_released_within_one_iteration(spec: str, stream: bool, steps: int) -> None:
    async def main() -> None:
        world = World()
        exchange = world.post("/v1/completions", LONG | {"stream": stream}, spec)
        await world.submitted()
        await world.step(steps)
        exchange.leave()
        await asyncio.wait_for(exchange.task, 2)
        assert world.bridge.num_open == 0
        world.bridge.turn()  # the abort is applied and reaped in this iteration
        assert world.nothing_held()
        assert not exchange.ended
        assert world.engine.counters.finished["abort"] == 1

    asyncio.run(main())


@both
@streams
def test_leaving_while_queued_and_while_prefilling(spec: str, stream: bool) -> None:
    """Neither has a token yet, so there is nothing to send that could fail."""

    async def main() -> None:
        world = World(max_num_seqs=1, max_num_batched_tokens=2)
        first = world.post(
            "/v1/completions", LONG | {"prompt": list(range(3, 23)), "max_tokens": 5, "stream": stream}, spec
        )
        await world.submitted()
        await world.step()
        assert set(world.engine.ledger().status.values()) == {"prefilling"}
        queued = world.post("/v1/completions", LONG | {"stream": stream}, spec)
        await world.submitted(2)
        await world.step()
        assert len(world.engine.ledger().waiting) == 1
        queued.leave()
        await asyncio.wait_for(queued.task, 2)
        await world.step()
        assert not world.engine.ledger().waiting
        first.leave()
        await asyncio.wait_for(first.task, 2)
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


@both
@streams
def test_leaving_before_the_submit_is_applied(spec: str, stream: bool) -> None:
    async def main() -> None:
        world = World()
        exchange = world.post("/v1/completions", LONG | {"stream": stream, "n": 3}, spec)
        await world.submitted()
        exchange.leave()
        await asyncio.wait_for(exchange.task, 2)
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


@both
def test_neighbours_do_not_notice(spec: str) -> None:
    async def main() -> None:
        world = World()
        control = world.post("/v1/completions", CONTROL, spec)
        others = [world.post("/v1/completions", LONG | {"stream": index % 2 == 0}, spec) for index in range(3)]
        await world.submitted(4)
        await world.step(4)
        for other in others:
            other.leave()
        await world.run(control)
        assert text_of(control.events()) == await solo(CONTROL)
        assert control.events()[-1] == "[DONE]"
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


@both
def test_leaving_twice_and_after_the_end(spec: str) -> None:
    async def main() -> None:
        world = World()
        exchange = world.post("/v1/completions", LONG | {"stream": True, "max_tokens": 3}, spec)
        await world.run(exchange)
        exchange.leave()
        exchange.leave()
        await world.step(2)
        assert exchange.events().count("[DONE]") == 1
        assert world.engine.counters.finished["abort"] == 0
        assert world.nothing_held()

    asyncio.run(main())


@both
def test_slow_reader_merges_and_costs_nobody_else(spec: str) -> None:
    async def main() -> None:
        world = World()
        slow = world.post("/v1/completions", LONG | {"stream": True, "seed": 5}, spec)
        control = world.post("/v1/completions", CONTROL, spec)
        await world.submitted(2)
        await world.step(2)
        slow.stall()
        before = slow.sends
        await world.run(control)  # done although the other one does not read
        await world.step(40)
        assert world.engine.ledger().running == ()  # and the slow one's blocks are free long before it reads
        assert slow.sends <= before + 1
        slow.resume()
        await world.run(slow)
        assert slow.sends <= before + 5  # everything since came merged
        assert text_of(slow.events()) == await solo(LONG | {"stream": True, "seed": 5})
        assert text_of(control.events()) == await solo(CONTROL)

    asyncio.run(main())


@both
def test_a_reader_that_stalls_and_leaves_leaves_nothing(spec: str) -> None:
    async def main() -> None:
        world = World()
        slow = world.post("/v1/completions", LONG | {"stream": True}, spec)
        await world.submitted()
        await world.step(2)
        slow.stall()
        await world.step(5)
        slow.leave()
        await asyncio.wait_for(slow.task, 2)
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


@both
@streams
def test_the_check_fires_without_a_watcher(spec: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the race taken out, a client that left is served on, and the checks above would see it."""

    async def unwatched(self: Answer, scope: Any, receive: Any, send: Any) -> None:
        await self.work(send)

    monkeypatch.setattr(Answer, "__call__", unwatched)

    async def main() -> None:
        world = World()
        exchange = world.post("/v1/completions", LONG | {"stream": stream}, spec)
        await world.submitted()
        await world.step(1)
        exchange.leave()
        await asyncio.wait({exchange.task}, timeout=0.05)
        world.bridge.turn()
        assert not world.nothing_held()
        exchange.task.cancel()

    asyncio.run(main())
