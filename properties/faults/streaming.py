"""Faults of the server between an engine's record and a client's bytes: streaming, leaving, errors, shutdown. Letter V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from properties.arming import Fault as F
from properties.arming import in_area, instead, line

_BRIDGE = "server.bridge:Bridge"
_CHOICE = "server.live:Choice"
_GENERATION = "server.live:Generation"
_SHAPE = "server.shapes:_OpenAIShape"
_COMPLETION = "server.shapes:CompletionShape"


def _gone_at_once(_: Callable[..., Any]) -> Any:
    async def gone(receive: Any) -> None:
        pass

    return gone


FAULTS = in_area(
    "streaming",
    F(
        "V01",
        "nobody watches whether the client is still there",
        ("stream", "decisions"),
        line("server.answer", "race", "asyncio.wait({task, watcher}", "asyncio.wait({task}"),
        source="vllm-project/vllm#54947",
    ),
    F(
        "V02",
        "the record of a request is gone before its abort, which finds nothing",
        ("stream", "decisions"),
        line(_BRIDGE, "_abort", "self._live.pop(choice.request, None) is not None", "False"),
        source="sgl-project/sglang#36333",
    ),
    F(
        "V03",
        "leaving aborts the first choice alone",
        ("stream", "decisions"),
        line(_BRIDGE, "_abort", "in generation.choices:", "in generation.choices[:1]:"),
    ),
    F(
        "V04",
        "leaving aborts the request behind",
        ("decisions",),
        line(_BRIDGE, "_abort", "self._engine.abort(choice.request)", "self._engine.abort(choice.request + 1)"),
    ),
    F(
        "V05",
        "a client that leaves before its request was scheduled is ignored",
        ("decisions",),
        line(
            _BRIDGE,
            "_abort",
            "choice.request is not None and",
            "choice.request is not None and self._engine.scheduler.requests[choice.request].first_iteration is not None and",
        ),
        source="vllm-project/vllm#49118",
        needs="left at once",
    ),
    F(
        "V06",
        "the end of a choice is told with every delta that follows",
        ("stream",),
        line(_CHOICE, "take", "self.told or (not", "(not"),
    ),
    F(
        "V07",
        "the end of the stream is told twice",
        ("stream",),
        line("server.answer", "send_events", '"body": _DONE, ', '"body": _DONE + _DONE, '),
    ),
    F(
        "V08",
        "the end of the stream is never told",
        ("stream",),
        line("server.answer", "send_events", '"body": _DONE, ', '"body": b"", '),
        source="waybarrios/vllm-mlx#101",
    ),
    F(
        "V09",
        "a natural end has no finish_reason",
        ("stream",),
        line(_SHAPE, "_finish", "if end is None:", 'if end is None or end.reason == "stop":'),
        source="waybarrios/vllm-mlx#628",
        needs="finished: stop",
    ),
    F(
        "V10",
        "a slow reader loses what it has not read",
        ("stream",),
        line(_CHOICE, "arrive", "self.tokens.append(token)", "self.tokens = [token]"),
    ),
    F(
        "V11",
        "text from the engine's side is sent again with every delta",
        ("stream",),
        line(_CHOICE, "take", "pieces, self.pieces = self.pieces, []", "pieces = list(self.pieces)"),
    ),
    F(
        "V12",
        "a step that fails ends the loop",
        ("raises",),
        line(
            _BRIDGE,
            "turn",
            "if record.error is not None:",
            "if record.error is not None:\n            raise RuntimeError(record.error)",
        ),
        needs="failed step",
    ),
    F(
        "V13",
        "an end without a token is told to nobody",
        ("stream",),
        line(_BRIDGE, "_publish", "in ends.items():", "in ():"),
    ),
    F(
        "V14",
        "shutdown forgets those who wait",
        ("stream", "decisions"),
        line(
            _BRIDGE,
            "_abort_all",
            "in self._live:",
            "in {r.id for r in self._engine.scheduler.running} & {*self._live}:",
        ),
        needs="shutdown",
    ),
    F(
        "V15",
        "a choice that fails is not told while another one goes on",
        ("stream",),
        line(
            _GENERATION,
            "news",
            "if (error := failure(delta.end)) is not None:",
            "if (error := failure(delta.end)) is not None and self.ended:",
        ),
        needs="failed step",
    ),
    F(
        "V16",
        "every choice is choice 0",
        ("stream",),
        line(_COMPLETION, "_choice", '"index": delta.index', '"index": 0'),
        source="ggml-org/llama.cpp PR#20226",
    ),
    F(
        "V17",
        "usage counts the last delta",
        ("stream",),
        line(_SHAPE, "_count", "+= len(delta.tokens)", "= len(delta.tokens)"),
    ),
    F(
        "V18",
        "the stop token is told as text",
        ("stream",),
        line(_CHOICE, "take", "end is not None and isinstance(end.stop, int)", "False"),
        rules=("13.6",),
        needs="finished: stop",
    ),
    F(
        "V19",
        "a stream ends without what was held of its text",
        ("stream",),
        line(_CHOICE, "take", "self.text.finish()", "pass"),
        rules=("13.6",),
        needs="text held back",
    ),
    F(
        "V20",
        "with stop strings, an answer ends without what was held of its text",
        ("stream",),
        line(_BRIDGE, "_news", "choice.text.finish()", "pass"),
        rules=("13.6",),
    ),
    F(
        "V21",
        "an answered request counts as open for ever",
        ("stream",),
        line(_BRIDGE, "close", "self._open.discard(generation)", "pass"),
    ),
    F(
        "V22",
        "a client that is there is taken to be gone",
        ("stream", "decisions"),
        instead("server.answer", "_until_gone", _gone_at_once),
        source="sgl-project/sglang#17031",
    ),
    F(
        "V23",
        "a whole answer is sent when its first choice has ended",
        ("stream",),
        line(_GENERATION, "ended", "all(", "any("),
    ),
    F(
        "V24",
        "of what an iteration made only the first request hears",
        ("stream",),
        line(_BRIDGE, "_deliver", "self._outbox += calls", "self._outbox += calls[:1]"),
    ),
    F(
        "V25",
        "an answer that is cut inside a character is an error",
        ("stream",),
        line(
            "engine.text.detokenize:Detokenizer",
            "flush",
            "text = self._extend()",
            "text = self._extend()\n    text.removesuffix(REPLACEMENT) == text or codecs.decode(b'\\xff', 'utf-8')",
        ),
        source="timtoole02/Camelid PR#288",
        rules=("13.6",),
        needs="character told as U+FFFD",
    ),
    F(
        "V26",
        "a stream whose request fails just breaks off",
        ("stream",),
        line("server.answer", "send_events", "data = frame(of_exception(error).body())", "return"),
        source="mozilla-ai/any-llm PR#847",
        needs="failed step",
    ),
    F(
        "V27",
        "usage is asked for and not sent",
        ("stream",),
        line(_SHAPE, "last", "if self.wish.include_usage:", "if not self.wish.include_usage:"),
        source="ROCm/ATOM PR#1711",
    ),
    F(
        "V28",
        "each event of a stream has an id of its own",
        ("stream",),
        line(_SHAPE, "_chunk", "{**self._head, ", '{**self._head, "id": uuid.uuid4().hex, '),
        source="open-webui/open-webui#23922",
    ),
    F(
        "V29",
        "a failure swallows what a slow reader has not read yet",
        ("stream",),
        line(_GENERATION, "news", "attrs.evolve(delta, end=None)", 'attrs.evolve(delta, end=None, text="", tokens=())'),
        needs="failed step",
    ),
    F(
        "V30",
        "a failure tells what was still uncertain of the text",
        ("stream",),
        line(_CHOICE, "take", "end is not None and failure(end) is None", "end is not None"),
        rules=("13.6",),
        needs="failed step",
    ),
    rung="wire",
)
