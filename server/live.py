"""An answer on its way: one ``Generation`` for an HTTP request, one ``Choice`` for each engine request in it.

    engine thread                                  event loop
    -------------                                  ----------
    step -> (choice, token, text, end)  --batch--> Choice.arrive -> buffer -> Generation.news -> Delta -> client

A choice's buffer merges: whoever reads slowly gets one larger delta later. So it never holds more than one answer, and
the engine never waits for a client. A choice with stop strings gets its text from the engine thread, where the text
can end the request (rule 13); the others are turned into text here, when somebody asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import attrs
import structlog

from engine.control.plan import Sampled
from engine.control.record import Facts, Finished
from engine.request import SamplingParams
from engine.text.stream import TextStream
from server.errors import ApiError

log = structlog.get_logger("lockstep.engine")
SLICE = 256  # tokens turned into text before the event loop gets its turn


@attrs.frozen
class Delta:
    """What is new for one choice since the last delta. ``end`` comes with the last one, once."""

    index: int
    text: str
    tokens: tuple[Sampled, ...]
    end: Finished | None


@attrs.define(eq=False)
class Choice:
    """``index`` counts the choices of the HTTP request, over all its prompts."""

    index: int
    prompt: int  # which of the prompts
    text: TextStream
    stops_in_commit: bool  # then ``text`` belongs to the engine thread
    seed: int = 0

    tokens: list[Sampled] = attrs.field(factory=list)  # event loop only, as the next two
    pieces: list[str] = attrs.field(factory=list)
    end: Finished | None = None
    told: bool = False  # the end was part of a delta
    broken: Finished | None = None  # its text raised (rule 13.8): what it ends with, whatever the engine says
    spelled: int = 0  # of ``tokens``, those that are in ``text`` already
    earlier: int = 0  # tokens that came before ``tokens``

    request: int | None = None  # the engine thread sets it before anything arrives
    arrived: float = 0.0  # monotonic seconds, as the next three, which the event loop reads when the choice has ended
    admitted: float | None = None  # when the first iteration that had it began
    first_token: float | None = None
    last_token: float | None = None

    def arrive(self, token: Sampled | None, piece: str, end: Finished | None) -> None:
        if token is not None:
            self.tokens.append(token)
        if piece:
            self.pieces.append(piece)
        if end is not None:
            self.end = end

    async def take(self) -> Delta | None:
        """Everything that is new, as one delta; None when nothing is."""
        if self.told or (not self.tokens and not self.pieces and self.end is None):
            return None
        tokens, self.tokens = self.tokens, []
        pieces, self.pieces = self.pieces, []
        end, self.told = self.end, self.end is not None
        if not self.stops_in_commit:
            silent = end is not None and isinstance(end.stop, int)  # the stop token itself is not part of the text
            spoken = tokens[:-1] if silent else tokens
            done, self.spelled = self.spelled, 0
            while done < len(spoken) and self.broken is None:
                done = self._push(spoken, done)
                if done < len(spoken):
                    await asyncio.sleep(0)
            if self.broken is None and (end is not None and failure(end) is None):  # else what was held stays untold
                try:
                    self.text.finish()
                except Exception as error:  # noqa: BLE001 - as in _push
                    self._break(len(tokens), error)
            if self.broken is not None:
                tokens, end, self.told = tokens[:done], self.broken, True
            pieces.append(self.text.take())
            self.earlier += len(tokens)
        return Delta(self.index, "".join(pieces), tuple(tokens), end)

    def spell(self) -> None:
        """Turns into text what has come, while nobody asks for it yet: a text that raises is to end its request early."""
        if not self.stops_in_commit and self.end is None and self.broken is None:  # the token of an end may be silent
            self.spelled = self._push(self.tokens, self.spelled)

    def _push(self, tokens: Sequence[Sampled], start: int) -> int:
        """At most ``SLICE`` tokens from ``start`` on; returns where it stopped, at a token whose text raised at the latest."""
        for at in range(start, min(start + SLICE, len(tokens))):
            try:
                self.text.push(tokens[at].token, False)
            except Exception as error:  # noqa: BLE001 - it may end its own request, and nothing else
                self._break(at + 1, error)
                return at
        return min(start + SLICE, len(tokens))

    def _break(self, token: int, error: Exception) -> None:
        facts = None if self.end is None else self.end.facts
        self.broken = end = broken_text(self.request, facts, self.earlier + token, error)
        log.error("a request failed", request=end.request, error=end.why, cause=end.cause)


class Generation:
    """All choices of one HTTP request. Lives on the event loop; ``Choice`` says what the engine thread may touch.

    ``each``: per prompt, ``params`` with a ``max_tokens`` that fits it; by default they fit all as they are.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        choices: Sequence[Choice],
        *,
        priority: int = 0,
        salt: str | None = None,
        arrived: float = 0.0,
        each: Sequence[SamplingParams] = (),
    ) -> None:
        self.prompts = tuple(prompts)
        self.params = params
        self.each = tuple(each) or (params,) * len(self.prompts)
        self.priority = priority
        self.salt = salt
        self.arrived = arrived
        self.choices = tuple(choices)
        self.closed = False
        self.first_token: float | None = None  # when it came, monotonic
        self.num_tokens = 0
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the door has answered
        self._changed = asyncio.Event()
        self._failure: ApiError | None = None

    # Called by the bridge, on the event loop -----------------------------------------------------------------------

    def accept(self, seeds: Sequence[int]) -> None:
        for choice, seed in zip(self.choices, seeds, strict=True):
            choice.seed = seed
        if not self.settled.done():
            self.settled.set_result(None)

    def refuse(self, error: Exception) -> None:
        if not self.settled.done():
            self.settled.set_exception(error)

    def arrive(self, choice: Choice, token: Sampled | None, piece: str, end: Finished | None) -> None:
        if end is not None and end.why is not None:
            log.error("a request failed", request=end.request, error=end.why, cause=end.cause)
            token = None  # what could not be made text is not told at all
        if token is not None:
            self.num_tokens += 1
            self.first_token = self.first_token or time.monotonic()
        choice.arrive(token, piece, end)
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """Nothing more will come: whoever waits gets ``error``."""
        self.refuse(error)
        self._failure = self._failure or error
        self._changed.set()

    # Called by whoever answers ---------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return all(choice.end is not None for choice in self.choices)

    @property
    def failure(self) -> ApiError | None:
        """What this answer ended with instead of an answer; None when nothing went wrong."""
        ended = (failure(choice.broken or choice.end) for choice in self.choices)
        return self._failure or next((error for error in ended if error is not None), None)

    @property
    def failed(self) -> bool:
        """Whether the answer is a 500: by no wish of its client's, and not since the server goes away."""
        return self.failure is not None and self.failure.status_code == 500

    async def news(self, patience: float | None = None) -> AsyncIterator[list[Delta]]:
        """Deltas as they come, until every choice has ended; an empty list after ``patience`` seconds of silence.

        Raises ``ApiError`` when the engine failed on a choice or is going away; what came before was delivered.
        """
        while not all(choice.told for choice in self.choices):
            try:
                async with asyncio.timeout(
                    patience
                ):  # not wait_for, which may swallow a cancellation that meets the news
                    await self._changed.wait()
            except TimeoutError:
                yield []
                continue
            self._changed.clear()
            deltas = [delta for choice in self.choices if (delta := await choice.take())]
            good = [delta if failure(delta.end) is None else attrs.evolve(delta, end=None) for delta in deltas]
            if good := [delta for delta in good if delta.text or delta.tokens or delta.end]:
                yield good
            for delta in deltas:
                if (error := failure(delta.end)) is not None:
                    raise error
            if self._failure is not None and not self.ended:
                raise self._failure

    async def everything(self) -> list[Delta]:
        """One delta per choice, in order, when all have ended. Raises as ``news`` does, at the first failure."""
        while not self.ended:
            await self._changed.wait()
            self._changed.clear()
            for choice in self.choices:
                choice.spell()
                if (error := failure(choice.broken or choice.end)) is not None:
                    raise error
            if self._failure is not None and not self.ended:
                raise self._failure
        self._changed.set()
        (deltas,) = [deltas async for deltas in self.news()]
        return deltas


def broken_text(request: int | None, facts: Facts | None, token: int, error: Exception) -> Finished:
    """The end of a request whose text raised at its output token number ``token``, from 1; 0: at its last, as ``facts`` say."""
    token = token or (0 if facts is None else facts.generated_tokens)
    why, cause = f"the text of output token {token} failed", f"{type(error).__name__}: {error}"
    return Finished(-1 if request is None else request, "error", None, facts, why, cause)


def failure(end: Finished | None) -> ApiError | None:
    """The error that an end stands for; ``stop`` and ``length`` are none. A client's own abort never gets here."""
    if end is None or end.reason in ("stop", "length"):
        return None
    if end.reason == "abort":
        return ApiError(503, "the server is shutting down and ended this request early", code="server_shutdown")
    if end.why is not None:
        return ApiError(500, f"this request could not go on: {end.why}", code="engine_error")
    return ApiError(500, "the engine failed in the iteration that computed this request", code="engine_error")
