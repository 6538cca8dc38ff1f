"""``--record FILE``: a production run as a ``workload/1`` file, which the lockstep harness replays and shrinks.

What decides an engine's run is the order of its events between iterations, the lengths of prompts and answers, which
prompts begin alike, and where answers stop. That is written down, and a digest of every iteration's decisions; text and
token ids are not, unless asked for: a prompt becomes pieces of named streams, and two prompts share a piece exactly as far
as their tokens were equal.

    prompts  a b c d e f          [["s0", 6]]
             a b c x y            [["s0", 3], ["s1", 2]]
             a b c x z            [["s0", 3], ["s1", 1], ["s2", 1]]

A prompt that goes on from an earlier answer, as the next turn of a conversation does, has a piece of ["answer/7", ...]: what
request 7 was told. Tokens of answers are others in a replay, so where two answers of the live engine happened to be equal,
or where a rung computes its own tokens, blocks may be shared differently with the prefix cache on, and the replay says so.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import attrs
import structlog

from engine.control.limits import Limits
from engine.control.record import StepRecord
from engine.control.request import Submission
from engine.digest import digest
from engine.trace import ANSWER, VOCAB, Abort, Event, FailStep, Shape, Submit, Workload, save, stream_token

MAX_EVENTS = 100_000  # after which the recording ends, with a warning: it lives in memory until it is written
MAX_TOKENS = 20_000_000  # of prompts, likewise: 160 MB

log = structlog.get_logger("lockstep.record")


class Streams:
    """Names for what prompts have in common: a tree whose nodes are runs of tokens of one stream."""

    def __init__(self) -> None:
        self.num_tokens = 0  # kept here, to compare later prompts with
        self._children: dict[tuple[str, int, int], str] = {}  # (stream, position, token) -> the stream that goes on
        self._tokens: dict[str, array[int]] = {"": array("q")}
        self._taken: dict[
            tuple[str, int], set[int]
        ] = {}  # first tokens, as the workload has them, of what goes on there

    def answered(self, prompt: Sequence[tuple[str, int]], request: int, tokens: Sequence[int]) -> None:
        """Where ``prompt``, in pieces, goes on with the answer of ``request``. Nothing new if something went on alike."""
        if not prompt or not tokens:
            return
        stream, position = prompt[-1]
        known = self._tokens[stream]
        if not (position < len(known) and known[position] == tokens[0]):
            name = self._children.setdefault((stream, position, tokens[0]), f"{ANSWER}{request}")
            if name not in self._tokens:
                self._taken.setdefault((stream, position), set()).add(stream_token(name, 0))
                self._tokens[name] = array("q", tokens)
                self.num_tokens += len(tokens)

    def pieces(self, prompt: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """(stream, length) pieces: as far as earlier prompts and answers go, then a new stream. O(length)."""
        pieces: list[tuple[str, int]] = []
        stream, position = "", 0
        for at, token in enumerate(prompt):
            known = self._tokens[stream]
            if position < len(known) and known[position] == token:
                position += 1
                continue
            if position:
                pieces.append((stream, position))
            going_on = self._children.get((stream, position, token))
            if going_on is None:
                return (*pieces, (self._branch(stream, position, prompt[at:]), len(prompt) - at))
            stream, position = going_on, 1
        return (*pieces, (stream, position)) if position else tuple(pieces)

    def _branch(self, stream: str, position: int, rest: Sequence[int]) -> str:
        """A new stream. Its name is such that the workload's tokens part where the real ones did: the workload knows
        far fewer token ids, and two streams that began alike would share one position more."""
        taken = self._taken.setdefault((stream, position), set())
        if position < len(self._tokens[stream]):
            taken.add(stream_token(stream, position))
        name = base = f"s{len(self._tokens)}"
        for attempt in range(1, 4 * VOCAB):
            if len(taken) >= VOCAB or stream_token(name, 0) not in taken:
                break
            name = f"{base}.{attempt}"
        taken.add(stream_token(name, 0))
        self._children[stream, position, rest[0]] = name
        self._tokens[name] = array("q", rest)
        self.num_tokens += len(rest)
        return name


@attrs.define
class _Sent:
    """A submit as it was recorded, to be completed when its answer ends."""

    at: int  # index of the event
    event: Submit
    tokens: list[int] = attrs.field(factory=list)  # of the answer so far


class Recorder:
    """A tap of the engine: called on the engine thread for every event and iteration, in their order."""

    def __init__(self, limits: Limits, path: Path, *, max_events: int = MAX_EVENTS) -> None:
        self.path = path
        self._shape = shape_of(limits)
        self._streams = Streams()
        self._salts: dict[str, str] = {}
        self._events: list[Event] = []
        self._digests: list[str] = []
        self._open: dict[int, _Sent] = {}
        self._since = 0  # iterations since the latest event
        self._max_events = max_events
        self._full = False
        self._lock = threading.Lock()  # ``workload`` may be asked for from another thread

    # The tap -----------------------------------------------------------------------------------------------------

    def submitted(self, submission: Submission, n: int, requests: Sequence[int] | None) -> None:
        """``requests`` are the ids given out, or None when the door refused all ``n``."""
        prompt = self._streams.pieces(submission.prompt)
        salt = self._salt(submission.salt)
        event = Submit(
            0,
            prompt,
            submission.max_tokens,
            priority=submission.priority,
            salt=salt,
            n=n,
            takes_hits=submission.takes_hits,
        )
        with self._lock:
            if requests is None:
                self._add(event)
                return
            for request in requests:  # choices end at different tokens, so each becomes a request of its own
                self._add(replace(event, n=1) if n > 1 else event, request)

    def aborted(self, request: int) -> None:
        with self._lock:
            self._add(Abort(0, request))

    def stepped(self, record: StepRecord) -> None:
        with self._lock:
            if self._full:
                return
            if record.error is not None and record.plan.forwards:
                self._add(FailStep(0))
            sampled = {request: got.token for request, got in record.sampled}
            for request, token in sampled.items():
                if request in self._open:
                    self._open[request].tokens.append(token)
            for end in record.finished:
                sent = self._open.pop(end.request, None)
                if sent is None:
                    continue
                self._streams.answered(sent.event.prompt, end.request, sent.tokens)
                count = len(sent.tokens)
                if (
                    end.why is not None
                ):  # this request alone could not go on: where its text failed, with the last token
                    texts = end.request in sampled
                    failed = replace(sent.event, fail_at=count + (not texts), fail_by="text" if texts else "sampling")
                    self._events[sent.at] = failed
                if end.reason == "stop":
                    # Tokens are others when this is replayed: whether one of them stops it or not, it ends here.
                    self._events[sent.at] = replace(sent.event, stop_at=count, min_tokens=count, max_tokens=count)
            for end in record.aborted:
                self._open.pop(end.request, None)
            self._digests.append(digest(record))
            self._since += 1

    # Files -------------------------------------------------------------------------------------------------------

    def workload(self) -> Workload:
        """What was recorded so far. An answer that has not ended stands there with the length that it may have."""
        with self._lock:
            return Workload(
                self._shape,
                tuple(self._events),
                title=f"recorded by the server: {len(self._events)} events, {len(self._digests)} iterations",
                digests=tuple(self._digests),
            )

    def write(self) -> int:
        """Returns the number of iterations in the file. Raises ``OSError``."""
        workload = self.workload()
        save(workload, self.path)
        return len(workload.digests)

    def _add(self, event: Event, request: int | None = None) -> None:
        if self._full:
            return
        if len(self._events) >= self._max_events or self._streams.num_tokens > MAX_TOKENS:
            self._full = True
            log.warning("the recording is full and ends here", events=len(self._events), file=str(self.path))
            return
        event = replace(event, wait=self._since)
        self._since = 0
        if request is not None and isinstance(event, Submit):
            self._open[request] = _Sent(len(self._events), event)
        self._events.append(event)

    def _salt(self, salt: str | None) -> str:
        """Salts are names of tenants, or secrets: only which of them are equal is written down."""
        return "" if salt is None else self._salts.setdefault(salt, f"t{len(self._salts) + 1}")


def shape_of(limits: Limits) -> Shape:
    """The workload's sizes. Raises ``ValueError`` for captures that are no product of rows and widths."""
    rows = tuple(sorted({rows for rows, _ in limits.captures}))
    widths = tuple(sorted({width for _, width in limits.captures}))
    if len(rows) * len(widths) != len(limits.captures):
        raise ValueError("the recorded graph shapes are no product of rows and widths, which a workload file needs")
    return Shape(
        blocks=limits.num_blocks,
        block_size=limits.block_size,
        rows=limits.max_num_seqs,
        budget=limits.max_num_batched_tokens,
        watermark=limits.watermark,
        max_model_len=limits.max_model_len,
        capture_rows=rows,
        capture_widths=widths,
        persistent_batch=limits.persistent_batch,
        prefix_cache=limits.prefix_cache,
        max_waiting=limits.max_waiting,
    )
