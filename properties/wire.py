"""The wire rung: the ledger rung's engine behind the production server, from the submit of a read request to its last byte.

    client --ASGI--> Answer, Context.answer, Bridge --commands--> Engine
    client <--SSE--- Shape, Generation, Choice <----batches------ StepRecord

One loop without clock and sockets, one thread: the rung plays event loop and engine thread in turn. Each submit of a workload
is a client: it streams, waits for the whole, stalls, or leaves; an abort is the client's leaving, so it ends all choices of one
answer. What it must see is derived from the specification: the text told in each iteration, one end for each choice, usage,
one end of the stream; nothing after it left, and nothing left of it.

The engine does not wait for the event loop: in some iterations, always the same ones, the loop is busy elsewhere, so that what
two or three steps made crosses in one flush and is read at once. What was sent is then judged when the loop has had its turn.

Not here: sockets, parsing of bodies, routing, worker threads (tests/server). A refusal before the queue uses no number of the
engine, so what the front refuses is put to the door as well, which must refuse it by the same word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from engine.control.record import StepRecord
from engine.control.request import Refusal, Submission
from engine.engine import Engine
from engine.request import InvalidRequest, SamplingParams
from engine.trace import Shape, Submit, prompt_tokens
from properties.checks import Fact, differing
from properties.diff import Known
from properties.row_failures import INJECTED, BrokenText
from properties.rung_ledger import StubRunner
from properties.rungs import EngineRung, limits
from properties.solo import AffineOracle
from properties.solo_text import NEVER
from properties.tally import Caller
from properties.toy_text import vocabulary
from properties.wire_client import Client
from properties.wire_loop import QuietLoop

if TYPE_CHECKING:
    from engine.loading.model import LoadedModel
    from server.answer import Answer
    from server.bridge import Bridge
    from server.context import Context
    from server.sinks import StepTimes

T = TypeVar("T")
SPECS = ("2.3", "2.4")
BUSY = (False, False, True, False, True, True, False)  # the event loop, in iterations 1, 2, ... and around


class InlineDesk:
    """The desk of a server, without its worker threads."""

    async def run(self, call: Callable[..., T], *arguments: Any, size: int = 0) -> T:
        return call(*arguments)


class Recorder:
    """A sink that keeps the last record, as metrics would be told it."""

    record: StepRecord | None = None

    def step(self, engine: Engine, record: StepRecord, times: StepTimes) -> None:
        self.record = record


class WireRung(EngineRung):
    """``shared``: the choices of one submission are one answer, so they are left and cut together."""

    shared = True

    def __init__(self, shape: Shape) -> None:
        self._runner = StubRunner()
        super().__init__(shape, self._runner, AffineOracle())
        self._runner.dead = self.dead
        self._model = _toy_model(shape.byte_fallback)
        self._engine = Engine(limits(shape), self._runner, seed=0, model=self._model)
        self._loop = QuietLoop()
        self._recorder = Recorder()
        self._context = _context(self._engine, self._loop, self._recorder)
        self._bridge: Bridge = self._context.bridge
        self._clients: list[Client] = []
        self._of: dict[int, Client] = {}
        self._known: Mapping[int, Known] = {}
        self._sampled: frozenset[int] = frozenset()
        self._logged: list[str] = []
        self._happened: Counter[str] = Counter()
        self._iteration = 0
        self._busy = False

    # What the driver does ----------------------------------------------------------------------------------------

    def submit(
        self, event: Submit, first_id: int, stop_ids: frozenset[int], stops: tuple[str, ...] = ()
    ) -> tuple[int, ...]:
        before = self._engine.counters
        used, refused = before.submitted, before.refused["queue_full"]
        requests = range(used, used + event.n)
        client = Client(requests, event.client, SPECS[first_id % 2])
        self._watched(lambda: self._ask(client, event, stop_ids, stops))
        after = self._engine.counters
        if after.refused["queue_full"] > refused:
            raise Refusal("queue_full", "the queue is full")
        if after.submitted > used:
            self._clients.append(client)
            self._of.update((request, client) for request in requests)
            self.condemn(requests[0], event)
            return tuple(requests)
        return self._engine.scheduler.submit(
            Submission(prompt_tokens(event.prompt), event.max_tokens, event.priority, stop_ids, event.min_tokens),
            event.n,
        )

    def condemn(self, request: int, event: Submit) -> None:
        super().condemn(request, event)
        if (at := event.fails("text")) is not None:  # the text that the server made, and hands to the engine
            asked = self._engine.scheduler.requests[request]
            assert asked.text is not None
            asked.text = BrokenText(asked.text, at)

    def _ask(self, client: Client, event: Submit, stop_ids: frozenset[int], stops: tuple[str, ...]) -> None:
        params = _params(event, stop_ids, stops)
        if params is None:  # no body that says this is read
            return
        client.commits = bool(params.stop)
        client.start(self._loop, _answer(self._context, event, params))
        self._loop.settle()
        if event.client == "leaves":
            client.leave()
            self._loop.settle()
        self._bridge.apply()
        self._loop.settle()

    def abort(self, request: int) -> None:
        if (client := self._of.get(request)) is not None:
            client.leave()
            self._watched(self._loop.settle)

    def shutdown(self, requests: Iterable[int]) -> None:
        """The server drains without patience: whatever is open gets an error, in the next iteration."""
        self._loop.create_task(self._bridge.drain(0.0))
        self._watched(self._loop.settle)

    def expect(self, step: Mapping[str, Any], after: Mapping[str, Any], known: Mapping[int, Known]) -> None:
        self._known = known
        failed = {request for request, reason in step.get("finished", ()) if reason == "error"}
        # who is told of a failure takes back what it still asks for, in the next iteration: for that the loop must run
        self._busy = BUSY[self._iteration % len(BUSY)] and not failed
        self._iteration += 1
        self._sampled = frozenset(request for request, _ in step.get("sampled", ()) if request not in failed)
        aborted = ((request, "abort") for request in step.get("aborted", ()))
        for request, reason in (*aborted, *step.get("finished", ())):
            if request in self._of:
                self._of[request].ends[request] = reason

    def step(self, *, fails: bool) -> StepRecord:
        self._runner.fails = fails
        for client in self._clients:
            client.tick()
        self._watched(self._turn)
        if self._runner.bad is not None:
            raise self._runner.bad
        assert self._recorder.record is not None
        return self._recorder.record

    def _turn(self) -> None:
        self._bridge.turn()
        if not self._busy:
            self._loop.settle()

    def told(self, record: StepRecord) -> Mapping[int, str]:
        return {}  # judged where it arrives, as part of the stream

    # What it saw ---------------------------------------------------------------------------------------------------

    def facts(self) -> Mapping[str, tuple[Fact, ...]]:
        facts = [] if self._busy else [fact for client in self._clients for fact in client.facts(self._caller)]
        kept = sorted(request for request in self._bridge._live if self._of[request].left)
        facts += differing([("kept for clients that left", kept, [])])
        for client in [client for client in self._clients if client.done]:
            self._happened.update(client.happened)
        self._clients = [client for client in self._clients if not client.done]
        open_ones = len(self._clients)
        facts += differing([("open requests", self._bridge.num_open, open_ones), ("logged", self._logged, [])])
        return {"stream": (*facts, *self._failures())}

    def closing(self) -> Mapping[str, tuple[Fact, ...]]:
        """The server stops: whoever still read slowly reads on, and nothing is left."""
        self._busy = False
        for client in self._clients:
            client.resume()
        self._sampled = frozenset()
        self._watched(self._loop.settle)
        facts = list(self.facts()["stream"])
        self._loop.create_task(self._bridge.stop())
        self._watched(self._loop.settle)
        facts += differing([("unanswered", len(self._clients), 0), ("kept by the bridge", len(self._bridge._live), 0)])
        return {"stream": (*facts, *self._failures())}

    def happened(self) -> Mapping[str, int]:
        return self._happened

    def close(self) -> None:
        for client in self._clients:
            if client.task is not None:
                client.task.cancel()
        self._watched(self._loop.settle)  # what the cancelled answers log is for nobody to read
        self._loop.close()

    def _caller(self, request: int) -> tuple[Caller, int]:
        caller = cast(Caller, self._known[request])
        return caller, len(caller.tokens) - caller.prompt_len + (request in self._sampled)

    def _failures(self) -> tuple[Fact, ...]:
        failures, self._loop.failures = self._loop.failures, []
        return tuple(Fact("task", failure, "no failure") for failure in failures)

    def _watched(self, call: Callable[[], None]) -> None:
        """Runs ``call`` and keeps what the server logs as an error, but for steps and requests that the workload makes fail."""
        from structlog.testing import capture_logs

        with capture_logs() as entries:
            call()
        self._logged += [
            f"{entry['event']}: {entry.get('exc_info') or entry.get('error') or ''}"
            for entry in entries
            if entry["log_level"] in ("error", "critical")
            and not (entry["event"] == "a step failed" and self._runner.fails)
            and not (entry["event"] == "a request failed" and INJECTED in f"{entry['error']} {entry['cause']}")
        ]


def _toy_model(byte_fallback: bool) -> LoadedModel:
    from engine.loading.model import LoadedModel

    tokenizer = cast(Any, vocabulary(byte_fallback))
    return LoadedModel("toy", cast(Any, None), cast(Any, None), tokenizer, None, frozenset())


def _context(engine: Engine, loop: QuietLoop, recorder: Recorder) -> Context:
    from server.bridge import Bridge
    from server.context import Context
    from server.settings import ServerSettings

    bridge = Bridge(lambda: engine, sinks=(recorder,))
    bridge.bind(loop)
    bridge.adopt()
    absent = cast(Any, None)  # metrics and the judge of fields play no part behind the parsing of a body
    return Context(ServerSettings(ping_interval=0), bridge, absent, cast(Any, InlineDesk()), absent, 0.0)


def _params(event: Submit, stop_ids: frozenset[int], stops: tuple[str, ...]) -> SamplingParams | None:
    """``min_tokens`` above ``max_tokens`` means that only length stops (SPEC 1.6), which a body cannot say but so."""
    in_commit = event.fails("text") is not None  # where a text fails, it is the engine's; else it has no need to be
    only_length = event.max_tokens is not None and event.min_tokens > event.max_tokens
    try:
        return SamplingParams(
            max_tokens=event.max_tokens,
            temperature=0.0,
            min_tokens=0 if only_length else event.min_tokens,
            stop=(NEVER,) if in_commit and (only_length or not stops) else () if only_length else stops,
            stop_token_ids=() if only_length else tuple(sorted(stop_ids)),
            include_stop_str_in_output=event.include_stop,
            seed=0,
            n=event.n,
            prompt_logprobs=None if event.takes_hits else 0,
        )
    except InvalidRequest:
        return None


def _answer(
    context: Context, event: Submit, params: SamplingParams, prompts: Sequence[tuple[int, ...]] | None = None
) -> Answer:
    """``prompts``: several in one request, in the place of the event's own (tests/properties)."""
    from server.answer import Answer
    from server.logprobs import Namer
    from server.prompts import Prompt
    from server.shapes import CompletionShape, Wish

    wish = Wish(
        model="toy",
        fingerprint="fp",
        namer=Namer(None),
        user_stop_ids=frozenset(params.stop_token_ids),
        token_ids=True,
        include_usage=True,
    )
    asked = [Prompt(ids) for ids in prompts or [prompt_tokens(event.prompt)]]

    async def work(send: Any) -> None:
        await context.answer(
            send,
            asked,
            params,
            partial(CompletionShape, wish=wish),
            stream=event.client != "whole",
            priority=event.priority,
            salt=event.salt or None,
        )

    return Answer(work)
