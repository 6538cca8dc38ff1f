"""Between asyncio and the engine: one thread owns the engine, two queues connect it with the event loop.

    event loop --commands (SimpleQueue)--> engine thread: commands, then one step, and again
    event loop <--one call_soon_threadsafe per batch-- engine thread

Kernels run without the interpreter lock, so the event loop works while they do: what one step made is told, turned into text
and counted while the next one computes. The engine thread does for it only what needs the engine between two iterations.

The engine thread sleeps in the queue's ``get`` while there is nothing to do, so an idle server uses no CPU. What a step
made crosses to the event loop in one batch, whatever the number of requests. Commands are applied in the order in which
they were sent, so an abort that follows its submit always finds it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from engine.control.plan import Sampled
from engine.control.record import Finished, StepRecord
from engine.request import InvalidRequest, SamplingParams
from engine.text.stream import TextStream
from server.check import Checker
from server.errors import ApiError
from server.live import Choice, Generation, broken_text, failure
from server.phase import Phase, refusal_in
from server.sinks import Sink, StepTimes

if TYPE_CHECKING:
    from engine.engine import Engine

log = structlog.get_logger("lockstep.engine")
T = TypeVar("T")
_GOOD = ("stop", "length")  # the engine's reasons of an end after which an answer may still fail


class _TimedText:
    """A text whose pushes are measured, since they happen between two iterations of everybody."""

    def __init__(self, text: TextStream, bridge: Bridge) -> None:
        self._text, self._bridge = text, bridge

    @property
    def matched(self) -> str | None:
        return self._text.matched

    def push(self, token: int, may_stop: bool = True, last: bool = False) -> bool:
        began = time.perf_counter()
        try:
            return self._text.push(token, may_stop, last)
        finally:
            self._bridge.text_seconds += time.perf_counter() - began


class Bridge:
    """``make`` builds the engine on the engine thread; ``bind`` and ``start`` are called on the event loop.

    A test may leave out ``start`` and call ``turn`` itself: then the test is the engine thread, and the schedule is
    its.
    """

    def __init__(
        self, make: Callable[[], Engine], *, sinks: Sequence[Sink] = (), checker: Checker | None = None
    ) -> None:
        self._make = make
        self._checker = checker or Checker()
        self._sinks = tuple(sinks)
        self._broken_sinks: set[int] = set()
        self._engine: Engine | None = None
        self.phase = Phase.LOADING
        self.failure: Exception | None = None  # why FAILED or DEAD
        self.step_began: float | None = None  # monotonic; None between steps

        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.told: Counter[str] = Counter()  # how ends that the server judges were told; event loop only
        self._failed: set[int] = set()  # aborted since the server failed on their answer; engine thread only
        self.text_seconds = 0.0  # since the latest step was published; engine thread only
        self._live: dict[int, tuple[Generation, Choice]] = {}  # engine thread only
        self._lock = threading.Lock()
        self._outbox: list[Callable[[], None]] = []
        self._scheduled = False
        self._sent = 0  # choices on their way to the door: event loop only
        self._taken = 0  # of those, told to the door: engine thread only

        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._open: set[Generation] = set()  # event loop only
        self._changed: asyncio.Event | None = None

    # On the event loop ---------------------------------------------------------------------------------------------

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop to which everything is delivered."""
        self._loop = loop
        self._changed = asyncio.Event()

    def start(self) -> None:
        if self._loop is None:
            self.bind(asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """Raises a 503 while there is none. From the event loop, only what never changes may be read, and lengths."""
        if self._engine is None:
            raise self.refusal() or ApiError(503, "the engine has stopped", code="engine_dead")
        return self._engine

    def refusal(self) -> ApiError | None:
        """Why no request is taken now."""
        return refusal_in(self.phase)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue and on their way to it."""
        return len(self.engine.scheduler.waiting) + self._sent - self._taken

    @property
    def num_open(self) -> int:
        """HTTP requests that have been submitted and not yet answered."""
        return len(self._open)

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread is not None and self._thread.is_alive()

    async def submit(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        choices: Sequence[Choice],
        priority: int = 0,
        salt: str | None = None,
        each: Sequence[SamplingParams] = (),
    ) -> Generation:
        """Queues every choice or none; ``each``: see ``Generation``. Raises ``ApiError`` 503 or the door's ``InvalidRequest``.
        Must be closed."""
        if (refusal := self.refusal()) is not None:
            raise refusal
        arrived = time.monotonic()
        generation = Generation(prompts, params, choices, priority=priority, salt=salt, arrived=arrived, each=each)
        self._open.add(generation)
        self._sent += len(choices)
        self._commands.put(partial(self._submit, generation))
        try:
            await generation.settled
        except BaseException:
            self.close(generation)
            raise
        return generation

    def close(self, generation: Generation) -> None:
        """The client has its answer or is gone: what still runs is aborted. Never waits; twice is once."""
        if generation.closed:
            return
        if not generation.ended:
            self._commands.put(partial(self._abort, generation, generation.failed))
        for choice in generation.choices:
            self._tell(generation, choice)
        generation.closed = True  # after its abort was sent: the audit counts on that
        self._open.discard(generation)
        self._wake()

    def between_steps(self, look: Callable[[Engine], Callable[[], None]]) -> None:
        """Has ``look`` called on the engine thread, between two iterations, and on the event loop what it returns.
        ``look`` must not raise. It is never called if the engine ends before."""

        def command() -> None:
            assert self._engine is not None
            self._deliver(look(self._engine))

        self._commands.put(command)

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, lets open ones finish for ``seconds``, then ends the rest with an error."""
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING
        self._wake()
        if not await self._until_closed(seconds):
            log.warning("requests are ended before they finished", open=len(self._open))
            self._commands.put(self._abort_all)
            await self._until_closed(5.0)

    async def stop(self) -> None:
        """Ends the engine thread after the step that runs now. Open generations get an error."""
        loading = self.phase is Phase.LOADING  # nothing can hurry it
        if self.phase not in (Phase.FAILED, Phase.DEAD):
            self.phase = Phase.STOPPED
        error = self.refusal()
        assert error is not None
        for generation in tuple(self._open):
            generation.fail(error)
        self._wake()
        self._commands.put(None)
        if self._thread is not None and not loading:
            await asyncio.to_thread(self._thread.join, 10.0)

    async def wait_phase(self, *phases: Phase) -> Phase:
        """Returns when the phase is one of ``phases``."""
        while self.phase not in phases:
            assert self._changed is not None
            await self._changed.wait()
        return self.phase

    def _arrive(self, generation: Generation, choice: Choice, *news: Any) -> None:
        generation.arrive(choice, *news)
        if generation.closed:
            self._tell(generation, choice)

    def _tell(self, generation: Generation, choice: Choice) -> None:
        """Counts how a choice ended that the engine ended well: its text, or its answer, may have failed all the same."""
        if choice.end is not None and choice.end.reason in _GOOD:
            self.told["error" if choice.broken is not None or generation.failed else choice.end.reason] += 1

    async def _until_closed(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._open and (left := deadline - time.monotonic()) > 0:
            assert self._changed is not None
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                break
        return not self._open

    def _wake(self) -> None:
        """Lets every waiter for a phase or for the last close look again."""
        if self._changed is not None:
            self._changed.set()
            self._changed = asyncio.Event()

    # On the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine = self._make()
        except Exception as error:  # noqa: BLE001 - told to whoever started us
            self.failure = error
            self._end(Phase.FAILED)
            return
        if self.phase is Phase.LOADING:  # a drain may have come while loading
            self.phase = Phase.READY
        self._deliver(self._wake)
        try:
            while self.turn(wait=True):
                pass
        except Exception as error:
            self.failure = error
            log.critical("the engine loop failed", exc_info=error)
            self._end(Phase.DEAD)

    def adopt(self) -> None:
        """Makes the engine on the calling thread, for a test that is the engine thread."""
        self._engine = self._make()
        self.phase = Phase.READY

    def turn(self, *, wait: bool = False) -> bool:
        """Applies every command sent so far, then runs one iteration if there is work. False after ``stop``."""
        engine = self._engine
        assert engine is not None
        if not self.apply(wait=wait):
            return False
        if engine.has_work:
            began = self.step_began = time.monotonic()
            record = engine.step()
            self.step_began = None
            if record.error is not None:
                log.error("a step failed", iteration=record.iteration, error=record.error, ended=len(record.finished))
            self._publish(engine, record, began)
            self._checker.after(engine, record.iteration, self._live)
        return True

    def apply(self, *, wait: bool = False) -> bool:
        """Applies every command sent so far; with ``wait``, and nothing else to do, waits for one. False after ``stop``."""
        engine = self._engine
        assert engine is not None
        try:
            while True:
                command = self._commands.get(block=wait and not engine.has_work)
                if command is None:
                    return False
                command()
        except queue.Empty:
            return True

    def _submit(self, generation: Generation) -> None:
        engine = self._engine
        assert engine is not None
        accepted: list[int] = []
        seeds: list[int] = []
        n = generation.params.n
        self._taken += len(generation.choices)
        try:
            asked = tuple(zip(generation.prompts, generation.each, strict=True))
            for prompt, params in asked:
                engine.check(prompt, params)
            for index, (prompt, params) in enumerate(asked):
                choices = generation.choices[index * n : (index + 1) * n]
                texts = [_TimedText(choice.text, self) for choice in choices] if params.stop else ()
                submitted = engine.submit(
                    prompt, params, priority=generation.priority, texts=texts, salt=generation.salt
                )
                accepted += submitted.requests
                seeds += submitted.seeds
        except InvalidRequest as error:
            for request in accepted:  # all or none
                engine.abort(request)
            self._deliver(partial(generation.refuse, error))
            return
        for choice, request in zip(generation.choices, accepted, strict=True):
            choice.request = request
            choice.arrived = generation.arrived
            self._live[request] = (generation, choice)
        self._deliver(partial(generation.accept, seeds))

    def _abort(self, generation: Generation, failed: bool) -> None:
        """``failed``: not by its client's wish."""
        assert self._engine is not None
        for choice in generation.choices:
            if choice.request is not None and self._live.pop(choice.request, None) is not None:
                self._engine.abort(choice.request)
                if failed:
                    self._failed.add(choice.request)

    def _abort_all(self) -> None:
        assert self._engine is not None
        for request in self._live:
            self._engine.abort(request)

    def _publish(self, engine: Engine, record: StepRecord, began: float) -> None:
        now = time.monotonic()
        for seat in record.plan.seated:
            if (live := self._live.get(seat.request)) is not None and live[1].admitted is None:
                live[1].admitted = began
        times = StepTimes(text=self.text_seconds)
        self.text_seconds = 0.0
        batch: list[Callable[[], None]] = []
        for end in record.aborted:
            if end.request in self._failed:
                self._failed.remove(end.request)
                times.judged.append(end.reason)
                batch.append(partial(self.told.update, ["error"]))
        ends = {end.request: end for end in (*record.aborted, *record.finished)}
        for request, sampled in record.sampled:
            if (live := self._live.get(request)) is not None:
                self._clock(live[1], len(live[0].prompts[live[1].prompt]), now, times)
                self._news(live, sampled, ends.pop(request, None), now, times, batch)
        for request, end in ends.items():  # ended without a token: aborted, or the step failed
            if (live := self._live.get(request)) is not None:
                self._news(live, None, end, now, times, batch)
        for sink in self._sinks:
            later = self._contained(sink, partial(sink.step, engine, record, times))
            if later is not None:
                batch.append(partial(self._contained, sink, later))
        if batch:
            self._deliver(*batch)

    def _contained(self, sink: Sink, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            if id(sink) not in self._broken_sinks:
                self._broken_sinks.add(id(sink))
                log.error("a metrics sink failed; said once", exc_info=error)
            return None

    def _news(
        self,
        live: tuple[Generation, Choice],
        sampled: Sampled | None,
        end: Finished | None,
        now: float,
        times: StepTimes,
        batch: list[Callable[[], None]],
    ) -> None:
        generation, choice = live
        if end is not None:
            del self._live[end.request]
            if end.reason in _GOOD:
                times.ends.append(now - choice.arrived)
                times.judged.append(end.reason)
        piece = ""
        if choice.stops_in_commit:
            try:
                if end is not None and failure(end) is None:
                    choice.text.finish()
                piece = choice.text.take()
            except Exception as error:  # noqa: BLE001 - it ends this request only
                if choice.request is not None and self._live.pop(choice.request, None) is not None:
                    assert self._engine is not None
                    self._engine.abort(choice.request)
                    self._failed.add(choice.request)
                elif end is not None and end.reason in _GOOD:
                    batch.append(partial(self.told.update, ["error"]))
                end = broken_text(choice.request, None if end is None else end.facts, 0, error)
        batch.append(partial(self._arrive, generation, choice, sampled, piece, end))

    @staticmethod
    def _clock(choice: Choice, prompt_tokens: int, now: float, times: StepTimes) -> None:
        if choice.last_token is None:
            choice.first_token = now
            times.first_tokens.append(now - choice.arrived)
            times.prompt_tokens += prompt_tokens
        else:
            times.between_tokens.append(now - choice.last_token)
        choice.last_token = now

    def _end(self, phase: Phase) -> None:
        """The thread is about to end by an error. The phase comes first: whoever submits later sees it."""
        self.phase = phase
        self.step_began = None
        error = self.refusal()
        assert error is not None

        def tell() -> None:
            for generation in tuple(self._open):
                generation.fail(error)
            self._wake()

        self._deliver(tell)

    def _deliver(self, *calls: Callable[[], Any]) -> None:
        """Runs ``calls`` on the event loop, in order; those of a busy moment in one go."""
        assert self._loop is not None
        with self._lock:
            self._outbox += calls
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("the event loop is gone")

    def _flush(self) -> None:
        with self._lock:
            calls, self._outbox = self._outbox, []
            self._scheduled = False
        for call in calls:
            call()
