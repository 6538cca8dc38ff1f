"""The engine as a person watches it: who holds which block and row, and latencies as they happen, a few times a second.

    engine thread                                event loop                          watchers, any number of them
    -------------                                ----------                          ----------------------------
    between two steps: copy what is seen  <----  ask, at most every 0.2 s, and
    (no loop over blocks in Python)       ---->  only if a step was made;    ----->  what changed since the last frame,
                                                 encode on a worker thread           or everything for who missed one

While nobody watches, nothing is asked and a step costs one comparison. Only numbers travel: of requests their number,
never text, token ids or names. A block is one integer, and equal neighbours travel as one run:

    0 blank    -1 cached    -2 lost (neither held nor free, or both)    k + 1 held by request k    -1 - n shared by n requests
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs
from sse_starlette.event import ServerSentEvent

from engine.control.record import StepRecord
from server.answer import frame
from server.bridge import Bridge
from server.errors import ApiError
from server.metrics import Reading
from server.phase import Phase
from server.sinks import StepTimes

if TYPE_CHECKING:
    from engine.engine import Engine

INTERVAL = 0.2  # seconds between two looks
MAX_WATCHERS = 32
MAX_QUEUE = 100  # waiting requests that are named; all of them are counted
MAX_LATENCIES = 4096  # kept between two looks

BLANK, CACHED, LOST = 0, -1, -2
_LIVE = (Phase.READY, Phase.DRAINING)

_PING = ServerSentEvent(comment="ping", sep="\n").encode()


@attrs.frozen
class Seen:
    """One running request."""

    request: int
    status: str
    row: int | None
    computed: int
    num_tokens: int
    preemptions: int
    table: tuple[int, ...]


@attrs.frozen
class Glimpse:
    """Copies of what the engine holds between two iterations. Latencies in seconds, of the steps since the last one."""

    running: tuple[Seen, ...]
    queue: tuple[int, ...]
    references: tuple[int, ...]
    blank: tuple[int, ...]
    cached: tuple[int, ...]
    reading: Reading
    block_size: int
    first_tokens: tuple[float, ...] = ()
    between_tokens: tuple[float, ...] = ()

    @classmethod
    def of(cls, engine: Engine, first_tokens: Sequence[float] = (), between_tokens: Sequence[float] = ()) -> Glimpse:
        """Must be called on the engine thread."""
        scheduler = engine.scheduler
        return cls(
            running=tuple(
                [
                    Seen(r.id, str(r.status), r.row, r.computed, r.num_tokens, r.preemptions, tuple(r.table))
                    for r in scheduler.running
                ]
            ),
            queue=tuple([r.id for r in scheduler.waiting[:MAX_QUEUE]]),
            references=tuple(scheduler.pool.references),
            blank=scheduler.pool.blank(),
            cached=scheduler.pool.cached(),
            reading=Reading.of(engine),
            block_size=engine.limits.block_size,
            first_tokens=tuple(first_tokens),
            between_tokens=tuple(between_tokens),
        )

    def codes(self) -> list[int]:
        """One integer a block, as the head of this file says."""
        codes = [LOST] * len(self.references)
        for block in self.blank:
            codes[block] = BLANK
        for block in self.cached:
            codes[block] = CACHED
        free = frozenset(self.blank).union(self.cached)
        for seen in self.running:
            for block in seen.table:
                holders = self.references[block]
                if holders < 1 or block in free:
                    codes[block] = LOST
                else:
                    codes[block] = seen.request + 1 if holders == 1 else -1 - holders
        return codes


def runs(codes: Sequence[int], before: Sequence[int] | None = None) -> list[int]:
    """Flat (start, count, code) triples of what differs from ``before``; of everything without one."""
    if before is None:
        spans = groupby(range(len(codes)), key=lambda block: codes[block])
        found = [(next(blocks), sum(1 for _ in blocks) + 1, code) for code, blocks in spans]
        return [number for span in found for number in span]
    flat: list[int] = []
    for block in [at for at, (old, new) in enumerate(zip(before, codes, strict=True)) if old != new]:
        if flat and flat[-3] + flat[-2] == block and flat[-1] == codes[block]:
            flat[-2] += 1
        else:
            flat += (block, 1, codes[block])
    return flat


class Frame:
    """A glimpse as it is sent: the change since frame ``number - 1``, or everything. Each is written once."""

    def __init__(self, number: int, glimpse: Glimpse, before: Frame | None) -> None:
        self.number = number
        self.codes = glimpse.codes()
        self._facts = _facts(glimpse)
        self._shape = {
            "blocks": len(self.codes),
            "block_size": glimpse.block_size,
            "rows": glimpse.reading.rows,
        }
        self._latencies = _latencies(glimpse)
        self._whole: bytes | None = None
        self.change = b""
        if before is not None:
            changed = {**self._facts, **self._latencies, "runs": runs(self.codes, before.codes)}
            self.change = frame(changed)

    @property
    def whole(self) -> bytes:
        """For who has not seen the frame before, and for whom its latencies are not news."""
        if self._whole is None:
            self._whole = frame({**self._facts, "shape": self._shape, "runs": runs(self.codes)})
        return self._whole


def _facts(glimpse: Glimpse) -> dict[str, Any]:
    reading = glimpse.reading
    counters = reading.counters
    return {
        "requests": [
            [s.request, s.status, s.row, s.computed, s.num_tokens, len(s.table), s.preemptions] for s in glimpse.running
        ],
        "queue": list(glimpse.queue),
        "waiting": reading.waiting,
        "free": reading.free_blocks,
        "cached": reading.cached_blocks,
        "totals": {
            "iterations": counters.iterations,
            "decode_steps": counters.decode_steps,
            "replayed": counters.replayed,
            "eager": dict(sorted(counters.eager.items())),
            "sampled_tokens": counters.sampled_tokens,
            "prefill_tokens": counters.prefill_tokens,
            "recomputed_tokens": counters.recomputed_tokens,
            "prefix_hit_tokens": counters.prefix_hit_tokens,
            "preemptions": counters.preemptions,
            "row_moves": counters.row_moves,
            "padded_rows": counters.padded_rows,
            "failed_steps": counters.failed_steps,
        },
    }


def _latencies(glimpse: Glimpse) -> dict[str, Any]:
    """Milliseconds. ``first``: of each first token, at most 64 of them; ``between``: median, longest, number."""
    between = sorted(glimpse.between_tokens)
    found: dict[str, Any] = {"first": [round(1000 * seconds, 2) for seconds in glimpse.first_tokens[-64:]]}
    if between:
        median, longest = between[len(between) // 2], between[-1]
        found["between"] = [round(1000 * median, 2), round(1000 * longest, 2), len(between)]
    return found


class LiveView:
    """A sink of the bridge, and the place where watchers get their frames. ``interval``: seconds between two looks."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.interval = interval
        self.watchers = 0  # written on the event loop, read on both sides
        self.looks = 0
        self._steps = 0  # engine thread; the event loop only compares it
        self._first_tokens: list[float] = []  # engine thread only, as the next one
        self._between_tokens: list[float] = []
        self._frame: Frame | None = None  # event loop only, from here
        self._feed: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    # On the engine thread ------------------------------------------------------------------------------------------

    def step(self, engine: Engine, record: StepRecord, times: StepTimes) -> None:
        if not self.watchers:
            return
        self._steps += 1
        for kept, new in ((self._first_tokens, times.first_tokens), (self._between_tokens, times.between_tokens)):
            kept += new
            del kept[:-MAX_LATENCIES]

    def _look(self, answer: asyncio.Future[tuple[int, Glimpse]], engine: Engine) -> Callable[[], None]:
        """What is to be called on the event loop. Raises nothing: an error here must not end the engine."""
        try:
            glimpse = Glimpse.of(engine, self._first_tokens, self._between_tokens)
        except Exception as error:  # noqa: BLE001 - told to the watchers
            return partial(_settle, answer, error)
        self._first_tokens.clear()
        self._between_tokens.clear()
        return partial(_settle, answer, (self._steps, glimpse))

    # On the event loop ---------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, bridge: Bridge) -> Iterator[None]:
        """Frames are made while this is open. Raises a 429 for one watcher too many."""
        if self.watchers >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} watchers are served already", code="too_many_watchers")
        self.watchers += 1
        if self._feed is None:
            self._frame = None
            self._feed = asyncio.create_task(self._make_frames(bridge))
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._feed.cancel()
                self._feed = None

    async def frames(self, ping_interval: float) -> AsyncIterator[bytes]:
        """Server-sent events, the newest for who is slow; a comment after ``ping_interval`` silent seconds (0: never)."""
        number = 0
        feed = self._feed
        assert feed is not None, "frames are made while watching() is open"
        while True:
            news, latest = self._news, self._frame
            if latest is not None and latest.number != number:
                following = number and latest.number == number + 1
                number = latest.number
                yield latest.change if following else latest.whole
            elif feed.done():
                feed.result()  # raises what ended it; nothing when the server shuts down
                return
            else:
                try:
                    async with asyncio.timeout(ping_interval or None):
                        await news.wait()
                except TimeoutError:
                    yield _PING

    async def _make_frames(self, bridge: Bridge) -> None:
        """Ends when the last open request of a shutdown has ended, and with an engine that stops."""
        seen = -1
        try:
            while bridge.phase is Phase.READY or (bridge.phase is Phase.DRAINING and bridge.num_open):
                if seen != self._steps:
                    answer: asyncio.Future[tuple[int, Glimpse]] = asyncio.get_running_loop().create_future()
                    bridge.between_steps(partial(self._look, answer))
                    while not answer.done() and bridge.phase in _LIVE:
                        await asyncio.wait({answer}, timeout=0.5)
                    if not answer.done():
                        return
                    seen, glimpse = answer.result()
                    self.looks += 1
                    number = self._frame.number + 1 if self._frame else 1
                    self._frame = await asyncio.to_thread(Frame, number, glimpse, self._frame)
                    self._wake()
                await asyncio.sleep(self.interval)
        finally:
            asyncio.get_running_loop().call_soon(self._wake)  # when this task is done, so that watchers see it

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if answer.done():  # nobody waits any more
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
    else:
        answer.set_result(value)
