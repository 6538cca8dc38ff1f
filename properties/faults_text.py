"""Faults of the detokeniser, of stop strings, and of who is told what of a request's text. Letter D."""

from __future__ import annotations

from properties.arming import in_area, line
from properties.arming import Fault as F

_DETOKENIZER = "engine.text.detokenize:Detokenizer"
_STOPS = "engine.text.stops:StopStrings"
_STREAM = "engine.text.stream:TextStream"
_SCHEDULER = "engine.control.scheduler:Scheduler"
_STRING = "stopped by a string"
_HELD = "text held back"

FAULTS = in_area(
    "text",
    F(
        "D01",
        "half a character is told as U+FFFD at once",
        ("text",),
        line(_DETOKENIZER, "push", "len(text) - text.endswith(REPLACEMENT)", "len(text)"),
        source="antonellof/ferrox#124",
        rules=("13.6",),
        needs=_HELD,
    ),
    F(
        "D02",
        "what is left of a character at the end is lost",
        ("text",),
        line(_DETOKENIZER, "flush", "text[self._shown :]", "text[self._shown :].rstrip(REPLACEMENT)"),
        rules=("13.6",),
        needs=_HELD,
    ),
    F(
        "D03",
        "text that could have become a stop string is lost at the end",
        ("text",),
        line(_STREAM, "finish", "self._release(self._stops.release())", "self._stops.release()"),
        source="ggml-org/llama.cpp PR#9867",
        rules=("13.6",),
    ),
    F(
        "D04",
        "a stop string is looked for in each piece alone",
        ("decisions", "text", "solo"),
        line(_STOPS, "push", "self._node = node", "self._node = self._root"),
        rules=("13.4",),
        needs=_STRING,
    ),
    F(
        "D05",
        "a stop string ends the text before min_tokens",
        ("decisions", "text", "solo"),
        line(_STREAM, "_feed", "if self._may_stop:", "if True:"),
        rules=("13.4",),
    ),
    F(
        "D06",
        "text from before min_tokens may begin a match",
        ("text",),
        line(
            _STREAM,
            "_feed",
            "self._release(self._stops.release() + piece)",
            "self._release(self._stops.push(piece))\n        self._stops.matched = None",
        ),
        rules=("13.4",),
        needs=_STRING,
    ),
    F(
        "D07",
        "of two stop strings that end together the shorter wins",
        ("text", "solo"),
        line("engine.text.stops", "_automaton", "node.match or node.fail.match", "node.fail.match or node.match"),
        rules=("13.4",),
        needs=_STRING,
    ),
    F(
        "D08",
        "a stop string that begins inside another one is missed",
        ("text",),
        line("engine.text.stops", "_automaton", "root if parent.fail is None else _next(parent.fail, char)", "root"),
        rules=("13.4",),
        needs=_STRING,
    ),
    F(
        "D09",
        "text behind the stop string is told",
        ("text",),
        line(
            _STOPS,
            "_finish",
            "text[: end if self._include else end - len(match)]",
            "text if self._include else text[: end - len(match)] + text[end:]",
        ),
        rules=("13.6",),
        needs=_STRING,
    ),
    F(
        "D10",
        "the stop string is told where it should not be, and the other way round",
        ("text",),
        line(_STOPS, "_finish", "if self._include", "if not self._include"),
        rules=("13.6",),
        needs=_STRING,
    ),
    F(
        "D11",
        "nothing is held back, so the beginning of a stop string is told",
        ("text",),
        line(_STOPS, "push", "len(text) - node.depth", "len(text)"),
        rules=("13.6",),
    ),
    F(
        "D12",
        "as much is held back as the longest stop string is long",
        ("text",),
        line(
            _STOPS,
            "push",
            "len(text) - node.depth",
            "max(0, len(text) - max(child.depth for child in self._root.children.values()) - 3)",
        ),
        source="smg-project/smg PR#2203",
        rules=("13.6",),
    ),
    F(
        "D13",
        "the first space behind the prompt is lost",
        ("text",),
        line(_DETOKENIZER, "__init__", "self._context(prompt_ids)", "self._context(())"),
        source="InternLM/lmdeploy PR#992",
        rules=("13.6",),
    ),
    F(
        "D14",
        "behind a prompt of byte tokens alone the first space is lost",
        ("text",),
        line(_DETOKENIZER, "_context", "run if self._after_run else context[::-1]", "context[::-1]"),
        rules=("13.6",),
    ),
    F(
        "D15",
        "the window looks back one token, less than a character can span",
        ("text",),
        line(_DETOKENIZER, "_slide", "[:-WINDOW]", "[:-1]"),
        source="ai-dynamo/dynamo#12630",
        rules=("13.6",),
    ),
    F(
        "D16",
        "special tokens are told",
        ("text",),
        line(_DETOKENIZER, "__init__", "self._skip = skip_special_tokens", "self._skip = False"),
        rules=("13.6",),
    ),
    F(
        "D17",
        "byte tokens are decoded one by one, not as a run",
        ("text",),
        line(_DETOKENIZER, "push", "if self._fallback and", "if not self._fallback and"),
        source="Luce-Org/lucebox PR#641",
        rules=("13.6",),
    ),
    F(
        "D18",
        "nobody is told which stop string it was",
        ("solo",),
        line(_SCHEDULER, "_append", '"stop", request.text.matched', '"stop", None'),
        rules=("13.1",),
        needs=_STRING,
    ),
    F(
        "D19",
        "an end by a stop string is reported as length",
        ("decisions", "solo"),
        line(_SCHEDULER, "_append", '"stop", request.text.matched', '"length", None'),
        source="PaddlePaddle/FastDeploy PR#4543",
        rules=("13.1", "13.5"),
        needs=_STRING,
    ),
    F(
        "D20",
        "with stop strings, stop tokens are forgotten",
        ("decisions", "solo"),
        line(_SCHEDULER, "_append", "if may_stop and token", "if request.text is None and may_stop and token"),
        rules=("13.1", "13.2"),
        needs="finished: stop",
    ),
    F(
        "D21",
        "text is told again when more becomes certain",
        ("text",),
        line(_DETOKENIZER, "push", "self._shown = max(self._shown, end)", "self._shown += bool(new)"),
        rules=("13.6",),
    ),
    F(
        "D22",
        "the prompt's unfinished character is told with its first bytes missing",
        ("text",),
        line(_DETOKENIZER, "__init__", "len(text) - unfinished", "len(text)"),
        rules=("13.6",),
    ),
    F(
        "D23",
        "a stop string does not end the request, only its text",
        ("decisions", "solo"),
        line(_STREAM, "push", "return self._ended", "return False"),
        rules=("13.1", "13.5"),
        needs=_STRING,
    ),
)
