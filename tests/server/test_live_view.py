"""GET /live: what watchers see is what the engine holds, frame by frame; and nobody pays while nobody watches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from engine.control.record import Ledger
from server import live_view
from server.errors import ApiError
from server.live_view import BLANK, CACHED, LOST, Glimpse, LiveView, runs
from server.phase import Phase
from server.sinks import StepTimes
from tests.server.stub import stub_engine
from tests.server.world import World

NOTHING = cast(Any, None)
ASK = {"prompt": [5, 6, 7, 8, 9, 10, 11, 12, 13], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


class Watcher:
    """Reads frames as the page does: the first holds everything, the others what changed."""

    def __init__(self, world: World, ping: float = 0.0) -> None:
        self.view: LiveView = world.app.state.context.live
        self._frames = self.view.frames(ping)
        self.codes: list[int] = []
        self.frames: list[dict[str, Any]] = []

    async def read(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            data = b":"
            while data.startswith(b":"):
                data = await anext(self._frames)
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        told: dict[str, Any] = json.loads(data[6:])
        if "shape" in told:
            self.codes = [99] * told["shape"]["blocks"]
        flat = told["runs"]
        for at in range(0, len(flat), 3):
            start, count, code = flat[at : at + 3]
            self.codes[start : start + count] = [code] * count
        self.frames.append(told)
        return told


@contextmanager
def watched(world: World) -> Iterator[LiveView]:
    view: LiveView = world.app.state.context.live
    view.interval = 0.001
    with view.watching(world.bridge):
        yield view


async def look(world: World, watcher: Watcher, steps: int = 1) -> dict[str, Any]:
    """Lets the engine make ``steps`` and answer the question that follows them."""
    reading = asyncio.ensure_future(watcher.read())
    await world.step(steps)
    while not reading.done():
        world.bridge.apply()
        await asyncio.sleep(0.001)
    return reading.result()


def as_held(ledger: Ledger) -> list[int]:
    """The codes of a sound ledger, told the other way round: block by block."""
    codes = []
    for block in range(len(ledger.references)):
        holders = [request for request, table in ledger.tables.items() if block in table]
        if len(holders) == 1:
            codes.append(holders[0] + 1)
        else:
            codes.append(-1 - len(holders) if holders else CACHED if block in ledger.cached else BLANK)
    return codes


async def watch_a_crowd() -> tuple[Watcher, list[list[int]]]:
    world = World()
    seen: list[list[int]] = []
    with watched(world):
        watcher = Watcher(world)
        assert (await look(world, watcher, 0))["shape"] == {"blocks": 16, "block_size": 4, "rows": 4}
        exchanges = [world.post("/v1/completions", ASK | {"n": 2}) for _ in range(3)]
        await world.until(lambda: world.bridge.num_open == 3)
        while not all(exchange.task.done() for exchange in exchanges):
            told = await look(world, watcher)
            ledger = world.engine.ledger()
            assert watcher.codes == as_held(ledger)
            assert [entry[0] for entry in told["requests"]] == list(ledger.running)
            assert told["queue"] == list(ledger.waiting)
            for request, status, row, computed, tokens, blocks, _ in told["requests"]:
                assert (status, row) == (ledger.status[request], ledger.rows[request])
                assert (computed, tokens) == (ledger.computed[request], ledger.num_tokens[request])
                assert blocks == len(ledger.tables[request])
            seen.append(list(watcher.codes))
        await look(world, watcher)
    return watcher, seen


def test_every_frame_is_the_ledger() -> None:
    watcher, seen = asyncio.run(watch_a_crowd())
    kinds = {"shared" if code < LOST else "held" if code > 0 else code for codes in seen for code in codes}
    assert {"shared", "held", BLANK, CACHED} <= kinds  # else the comparison saw nothing of interest
    last = watcher.frames[-1]
    assert last["totals"]["preemptions"] > 0
    assert (last["requests"], last["queue"], last["free"]) == ([], [], 16)
    assert last["totals"]["sampled_tokens"] >= 6 * ASK["max_tokens"]  # type: ignore[operator]
    assert last["totals"]["decode_steps"] == last["totals"]["replayed"] > 0
    first_tokens = [wait for frame in watcher.frames for wait in frame.get("first", [])]
    assert len(first_tokens) == 6
    between = [frame["between"] for frame in watcher.frames if "between" in frame]
    assert sum(count for _, _, count in between) == 6 * (ASK["max_tokens"] - 1)  # type: ignore[operator]
    assert all(0 <= median <= longest for median, longest, _ in between)


def test_only_what_changed_travels() -> None:
    watcher, _ = asyncio.run(watch_a_crowd())
    whole, *changes = watcher.frames
    assert "shape" in whole
    assert not any("shape" in change for change in changes)
    assert min(len(change["runs"]) for change in changes) <= 6


def test_no_text_and_no_token_travels() -> None:
    async def scenario() -> bytes:
        world = World()
        with watched(world) as view:
            frames = view.frames(0)
            told = b""
            exchange = world.post("/v1/completions", {"prompt": "SENTINEL", "max_tokens": 3, "cache_salt": "SECRET"})
            await world.submitted()
            while not exchange.task.done():
                reading = asyncio.ensure_future(anext(frames))
                await world.step()
                while not reading.done():
                    world.bridge.apply()
                    await asyncio.sleep(0.001)
                told += reading.result()
        return told

    told = asyncio.run(scenario())
    assert b"requests" in told
    assert b"SENTINEL" not in told
    assert b"SECRET" not in told
    allowed = {"requests", "queue", "waiting", "free", "cached", "totals", "first", "between", "runs", "shape"}
    assert {key for line in told.splitlines() if line for key in json.loads(line[6:])} == allowed


def test_a_lost_block_is_told_as_lost() -> None:
    engine = stub_engine()
    engine.scheduler.pool.take()  # by nobody
    assert Glimpse.of(engine).codes() == [LOST] + [BLANK] * 15


def test_a_block_that_is_held_and_free_is_told_as_lost() -> None:
    async def scenario() -> list[int]:
        world = World()
        world.post("/v1/completions", ASK)
        await world.submitted()
        await world.step()
        pool = world.engine.scheduler.pool
        pool._blank.append(world.engine.ledger().tables[0][1])
        return Glimpse.of(world.engine).codes()

    codes = asyncio.run(scenario())
    assert codes[:3] == [1, LOST, 1]


@pytest.mark.parametrize(
    ("before", "codes", "expected"),
    [
        (None, [0, 0, 0, 5, 5, -1], [0, 3, 0, 3, 2, 5, 5, 1, -1]),
        ([0, 0, 0, 0], [0, 0, 0, 0], []),
        ([0, 0, 0, 0, 0, 0], [3, 3, 0, 3, 4, 4], [0, 2, 3, 3, 1, 3, 4, 2, 4]),
    ],
)
def test_runs(before: list[int] | None, codes: list[int], expected: list[int]) -> None:
    assert runs(codes, before) == expected


def test_a_step_that_nobody_watches_is_not_looked_at() -> None:
    view = LiveView()
    view.step(NOTHING, NOTHING, NOTHING)  # would raise if it read anything
    view.watchers = 1
    with pytest.raises(AttributeError):
        view.step(NOTHING, NOTHING, NOTHING)


def test_latencies_between_two_looks_are_bounded() -> None:
    view = LiveView()
    view.watchers = 1
    for _ in range(3):
        view.step(NOTHING, NOTHING, StepTimes(first_tokens=[1.0], between_tokens=[0.5] * 3000))
    assert len(view._between_tokens) == live_view.MAX_LATENCIES


def test_an_idle_engine_is_asked_once_and_silence_is_broken_by_comments() -> None:
    async def scenario() -> int:
        world = World()
        with watched(world) as view:
            await look(world, watcher := Watcher(world, ping=0.01), 0)
            for _ in range(5):
                assert (await anext(watcher._frames)).startswith(b":")
            return view.looks

    assert asyncio.run(scenario()) == 1


def test_who_missed_a_frame_gets_everything() -> None:
    async def scenario() -> None:
        world = World()
        with watched(world):
            quick, slow = Watcher(world), Watcher(world)
            await look(world, quick, 0)
            await slow.read()
            world.post("/v1/completions", ASK)
            await world.submitted()
            for _ in range(3):
                await look(world, quick)
            told = await slow.read()
            assert "shape" in told
            assert slow.codes == quick.codes
            await look(world, quick)
            assert "shape" not in await slow.read()
            assert slow.codes == quick.codes
            late = Watcher(world)
            assert "first" not in await late.read()  # not news
            assert late.codes == quick.codes

    asyncio.run(scenario())


def test_watchers_are_counted_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MAX_WATCHERS", 2)

    async def scenario() -> None:
        world = World()
        with watched(world) as view, view.watching(world.bridge):
            with pytest.raises(ApiError, match="2 watchers"), view.watching(world.bridge):
                pass
            assert view.watchers == 2
        assert view.watchers == 0
        assert view._feed is None

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.STOPPED, Phase.DEAD])
def test_the_stream_ends_with_the_engine(phase: Phase) -> None:
    async def scenario() -> None:
        world = World()
        with watched(world):
            watcher = Watcher(world)
            await look(world, watcher, 0)
            world.bridge.phase = phase
            with pytest.raises(StopAsyncIteration):
                await watcher.read()

    asyncio.run(scenario())


def test_a_look_that_fails_ends_the_stream_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World()
        with watched(world):
            watcher = Watcher(world)
            await look(world, watcher, 0)
            monkeypatch.setattr(Glimpse, "of", staticmethod(lambda *_: 1 / 0))
            exchange = world.post("/v1/completions", ASK)
            await world.submitted()
            with pytest.raises(ZeroDivisionError):
                await look(world, watcher)
            await world.run(exchange)
            assert exchange.status == 200

    asyncio.run(scenario())


def test_a_large_pool_is_small_on_the_wire() -> None:
    """Ten thousand blocks, as scattered as they get: once everything, then only what 32 requests took since."""
    before = [1 + at % 32 for at in range(10_000)]
    codes = list(before)
    for at in range(0, 10_000, 300):
        codes[at] = 0
    assert len(json.dumps(runs(codes, before))) < 1000
    assert len(json.dumps(runs([7] * 5000 + [0] * 5000))) < 50
