"""The workload: everything that decides a run, as one frozen value and one readable file.

Decisions depend on the sequence of events between iterations, on the sampled tokens and on step failures, and on nothing
else (rule 3). So a list of events describes a run completely, and this value is the only language in which runs are
written down: generators, the hunter and the server's recorder produce it, drivers replay it, reducers shrink it.

Interpretation is total, so that every value that can be built can be run:

    wait      iterations to let pass before this event; an idle engine makes none, so a wait ends early when nothing is left
    submit    tokens are a pure function of (stream name, position): equal names give equal prefixes
    abort     an index into everything submitted so far, choices and refused ones included, modulo their number (-1: the last)
    fail_step the next ``fail_step`` iterations raise in execute, those of them that have something to compute
    shutdown  nothing that follows counts, and whatever has not finished is aborted

An event that does not apply (an abort with nothing submitted, or of a request that ended) changes nothing.
Standard library only: the server records and the harness reads with this same module.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

FORMAT = "workload/1"
VOCAB = 251  # ids 0..250; a prime, so that affine token functions do not repeat within it
OUTSIDE, BELOW = "!", "!-"  # streams whose ids lie behind the vocabulary, and below 0: the door must refuse both
ANSWER = "answer/"  # "answer/3" is what request 3 generates on the ledger rung: for prompts that go on from there
MAX_TOTAL = 1 << 20  # bound of one prompt and of most numbers in a file: a workload is small or it is a mistake
MOST_GRAPHS = 1 << 16  # of one shape: as many as a server may be told to record
INT32 = (-(2**31), 2**31 - 1)  # of what a request may say over HTTP, and a recording must be able to repeat

CLIENTS = ("streams", "whole", "stalls", "leaves")
"""streams reads every piece as it comes; whole asks for one answer at the end; stalls streams, but does not read for some
iterations; leaves is gone before the engine hears of the request, which is an abort of all its choices."""

FAILURES = ("sampling", "text")
"""sampling has the logits of the row hold no token (rule 13.7); text raises where the token is made text (rule 13.8)."""

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: Mapping[str, Upgrade] = {}
"""From an old format to the next newer one, kept for ever: ``{"workload/0": upgrade_0}``. None is needed yet."""


class FormatError(ValueError):
    """A file or value that is no workload. The message names the place, what stood there and what is allowed."""


# Values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a run. ``capture_rows`` x ``capture_widths`` are the recorded graph shapes (width in blocks).

    ``byte_fallback``: the kind of vocabulary that makes text of the tokens, byte level where it is false.
    """

    blocks: int
    block_size: int
    rows: int
    budget: int = 2048
    watermark: int = 0
    max_model_len: int = 64
    capture_rows: tuple[int, ...] = ()
    capture_widths: tuple[int, ...] = ()
    persistent_batch: bool = True
    prefix_cache: bool = False
    max_waiting: int = 64
    byte_fallback: bool = False

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "rows", "budget", "max_model_len", "max_waiting"):
            _number(getattr(self, name), f"shape.{name}", 1)
        _number(self.watermark, "shape.watermark", 0, self.blocks - 1)
        _number(self.budget, "shape.budget (at least shape.rows: every row decodes in every iteration)", self.rows)
        for name in ("capture_rows", "capture_widths"):
            listed = getattr(self, name)
            for value in listed:
                _number(value, f"shape.{name}", 1)
            if list(listed) != sorted(set(listed)):
                raise FormatError(f"shape.{name} is {list(listed)}, but must be ascending without repetition")
        rows, widths = len(self.capture_rows), len(self.capture_widths)
        if rows * widths > MOST_GRAPHS:
            raise FormatError(
                f"shape.capture_rows x shape.capture_widths is {rows} x {widths}, which makes {rows * widths} graphs, "
                f"but at most {MOST_GRAPHS} are allowed"
            )

    @property
    def captures(self) -> tuple[tuple[int, int], ...]:
        """The recorded (rows, width) pairs in ascending order."""
        return tuple((rows, width) for rows in self.capture_rows for width in self.capture_widths)


@dataclass(frozen=True, slots=True)
class Submit:
    """``prompt`` is a list of (stream, length). ``stop_at`` k makes the k-th generated token (from 1) a stop token.

    ``max_tokens`` None asks for the most that the limits allow. ``temperature`` 0 is greedy. ``stop_text`` k makes stop
    strings of the request's own text around the k-th generated token (from 1), ``include_stop`` has the match told.
    ``client`` says how the answer is read, where there are clients: see ``CLIENTS``. Without ``takes_hits`` every position is
    computed (rule 11), as for prompt logprobs. ``fail_at`` k has the first choice fail, by ``fail_by`` of ``FAILURES``, at its
    k-th generated token (from 1), if it gets that far.
    """

    wait: int
    prompt: tuple[tuple[str, int], ...]
    max_tokens: int | None
    stop_at: int | None = None
    priority: int = 0
    temperature: float = 0.0
    seed: int | None = None
    salt: str = ""
    min_tokens: int = 0
    n: int = 1
    stop_text: int | None = None
    include_stop: bool = False
    client: str = "streams"
    takes_hits: bool = True
    fail_at: int | None = None
    fail_by: str = "sampling"

    def __post_init__(self) -> None:
        _number(self.wait, "wait", 0)
        for stream, length in self.prompt:
            _text(stream, "submit.prompt stream")
            _number(length, f"submit.prompt length of {stream!r}", 0)
        if self.max_tokens is not None:
            _number(self.max_tokens, "submit.max_tokens", 0, INT32[1])
        for name in ("stop_at", "stop_text", "fail_at"):
            if getattr(self, name) is not None:
                _number(getattr(self, name), f"submit.{name}", 1)
        for name, allowed in (("fail_by", FAILURES), ("client", CLIENTS)):
            if getattr(self, name) not in allowed:
                raise FormatError(f"submit.{name} is {getattr(self, name)!r}, but must be one of {', '.join(allowed)}")
        for name in ("include_stop", "takes_hits"):
            if not isinstance(getattr(self, name), bool):
                raise FormatError(f"submit.{name} is {getattr(self, name)!r}, but must be true or false")
        _number(self.priority, "submit.priority", *INT32)
        _number(self.min_tokens, "submit.min_tokens", 0)
        _number(self.n, "submit.n", 1, 64)
        if self.seed is not None:
            _number(self.seed, "submit.seed", -(2**63), 2**63 - 1)
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature <= 100:
            raise FormatError(f"submit.temperature is {self.temperature!r}, but must be a number in 0..100")
        _text(self.salt, "submit.salt")
        if self.prompt_len > MAX_TOTAL:
            raise FormatError(f"submit.prompt has {self.prompt_len} tokens, but at most {MAX_TOTAL} are allowed")

    def fails(self, by: str) -> int | None:
        """The generated token (from 1) at which the first choice fails in that way."""
        return self.fail_at if self.fail_by == by else None

    @property
    def prompt_len(self) -> int:
        return sum(length for _, length in self.prompt)


@dataclass(frozen=True, slots=True)
class Abort:
    wait: int
    of: int

    def __post_init__(self) -> None:
        _number(self.wait, "wait", 0)
        _number(self.of, "abort", -MAX_TOTAL)

    def target(self, submitted: int) -> int | None:
        """The request meant, when ``submitted`` ids have been given out; None when there is none yet."""
        return self.of % submitted if submitted else None


@dataclass(frozen=True, slots=True)
class FailStep:
    wait: int
    count: int = 1

    def __post_init__(self) -> None:
        _number(self.wait, "wait", 0)
        _number(self.count, "fail_step", 0)


@dataclass(frozen=True, slots=True)
class Shutdown:
    wait: int

    def __post_init__(self) -> None:
        _number(self.wait, "wait", 0)


Event = Submit | Abort | FailStep | Shutdown


@dataclass(frozen=True, slots=True)
class Workload:
    """``fault`` names the catalogue fault that brings this workload's bug back; ``found`` says where it came from.

    ``digests`` belong to a recording: one for each iteration of the live engine (engine/digest.py), to be met again.
    """

    shape: Shape
    events: tuple[Event, ...]
    title: str = ""
    fault: str | None = None
    found: Mapping[str, str | int] | None = field(default=None, hash=False)
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fault = () if self.fault is None else ((self.fault, "fault"),)
        for text, where in ((self.title, "title"), *fault, *((digest, "digests") for digest in self.digests)):
            _text(text, where)
        for key, entry in (self.found or {}).items():
            _text(key, "a key of found")
            _text("" if isinstance(entry, int) else entry, f"found.{key}", "text or an integer")

    def titled(self, title: str, *, fault: str | None = None, found: Mapping[str, str | int] | None = None) -> Workload:
        """The same run under another title and provenance."""
        return replace(self, title=title, fault=fault, found=found)

    def digest(self) -> str:
        """16 hex digits of what decides the run: shape and events. Title and provenance do not count."""
        return hashlib.sha256("\n".join(_body(self)).encode()).hexdigest()[:16]


# Tokens ----------------------------------------------------------------------------------------------------------


def answer_token(request: int, k: int) -> int:
    """The k-th generated token of a request where nothing is computed (the ledger rung): an affine function of both, without
    repetition within the first ``VOCAB`` of a request, so a token from the wrong request or position is a different token."""
    return (request * 97 + 11 + k * (1 + request * 31 % (VOCAB - 1))) % VOCAB


def stream_token(stream: str, position: int) -> int:
    """The token at ``position`` of a named stream, in 0..VOCAB-1; of the streams "!" and "!-" outside it."""
    if stream == OUTSIDE:
        return VOCAB + position
    if stream == BELOW:
        return -1 - position
    if stream.startswith(ANSWER) and stream[len(ANSWER) :].isdecimal():
        return answer_token(int(stream[len(ANSWER) :]), position)
    return zlib.crc32(f"{stream}/{position}".encode()) % VOCAB


@lru_cache(maxsize=64)  # the two sides and the oracles ask for the same prompt one after the other
def prompt_tokens(prompt: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """The concatenated prefixes of the named streams."""
    return tuple(stream_token(stream, position) for stream, length in prompt for position in range(length))


# Files -----------------------------------------------------------------------------------------------------------


def dumps(workload: Workload) -> str:
    """The file's text: one event a line, keys in a fixed order, defaults of a submit left out, newline at the end."""
    head = [f'"format": {json.dumps(FORMAT)}', f'"title": {json.dumps(workload.title, ensure_ascii=False)}']
    if workload.fault is not None:
        head.append(f'"fault": {json.dumps(workload.fault)}')
    if workload.found is not None:
        head.append(f'"found": {json.dumps(dict(workload.found))}')
    shape, *events = _body(workload)
    listed = ",\n  ".join(events)
    return (
        "{"
        + ", ".join(head)
        + ',\n "shape": '
        + shape
        + ',\n "events": ['
        + ("\n  " if events else "")
        + listed
        + "]"
        + _dump_digests(workload.digests)
        + "}\n"
    )


def loads(text: str, *, upgrades: Mapping[str, Upgrade] = UPGRADES) -> Workload:
    """The value in a file's text. Raises ``FormatError`` on anything that is not exactly a workload."""
    try:
        document = json.loads(text, object_pairs_hook=_once)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise FormatError(f"this is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"a workload is a JSON object, but this is {_kind(document)}")
    while isinstance(document.get("format"), str) and document["format"] in upgrades:
        document = upgrades[document["format"]](document)
    if document.get("format") != FORMAT:
        known = ", ".join(repr(name) for name in (*upgrades, FORMAT))
        raise FormatError(f"format is {document.get('format')!r}, but must be {known}")
    _keys(document, "the workload", ("format", "shape", "events"), ("title", "fault", "found", "digests"))
    return Workload(
        shape=_shape(document["shape"]),
        events=tuple(_event(entry, number) for number, entry in enumerate(_list(document["events"], "events"), 1)),
        title=document.get("title", ""),
        fault=document.get("fault"),
        found=None if document.get("found") is None else _object(document["found"], "found"),
        digests=tuple(_list(document.get("digests", []), "digests")),
    )


def load(path: Path) -> Workload:
    """Reads a file. Raises ``FormatError`` with the file's name in front, ``OSError`` when it cannot be read."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: this is not UTF-8 text: {error.reason} at byte {error.start}") from None


def save(workload: Workload, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(workload), encoding="utf-8")


def _body(workload: Workload) -> list[str]:
    return [_dump_shape(workload.shape), *(_dump_event(event) for event in workload.events)]


def _dump_digests(digests: tuple[str, ...]) -> str:
    """Ten to a line, so that iteration 10 n + k is the k-th of line n."""
    if not digests:
        return ""
    lines = [", ".join(json.dumps(entry) for entry in digests[at : at + 10]) for at in range(0, len(digests), 10)]
    return ',\n "digests": [\n  ' + ",\n  ".join(lines) + "]"


def _dump_shape(shape: Shape) -> str:
    # Broken once, behind max_model_len, so that a shape reads as two lines: the sizes, then what is recorded and switched.
    named = [item.name for item in fields(Shape) if item.name != "byte_fallback" or shape.byte_fallback]
    pairs = [f'"{name}": {json.dumps(getattr(shape, name))}' for name in named]
    return "{" + ", ".join(pairs[:6]) + ",\n           " + ", ".join(pairs[6:]) + "}"


def _dump_event(event: Event) -> str:
    match event:
        case Submit():
            given = {"prompt": event.prompt, "max_tokens": event.max_tokens}
            for item in fields(Submit):
                if item.name not in ("wait", *given) and getattr(event, item.name) != item.default:
                    given[item.name] = getattr(event, item.name)
            return json.dumps({"wait": event.wait, "submit": given}, ensure_ascii=False)
        case Abort():
            return json.dumps({"wait": event.wait, "abort": event.of})
        case FailStep():
            return json.dumps({"wait": event.wait, "fail_step": event.count})
        case Shutdown():
            return json.dumps({"wait": event.wait, "shutdown": True})


def _shape(value: object) -> Shape:
    given = _object(value, "shape")
    _keys(given, "shape", ("blocks", "block_size", "rows"), tuple(item.name for item in fields(Shape)))
    plain = dict(given)
    for name in ("capture_rows", "capture_widths"):
        if name in plain:
            plain[name] = tuple(_list(plain[name], f"shape.{name}"))
    for name in ("persistent_batch", "prefix_cache", "byte_fallback"):
        if not isinstance(plain.get(name, True), bool):
            raise FormatError(f"shape.{name} is {plain[name]!r}, but must be true or false")
    return Shape(**plain)


def _event(value: object, number: int) -> Event:
    try:
        given = _object(value, "it")
        kinds = [key for key in given if key != "wait"]
        _keys(given, "it", (), ("wait", "submit", "abort", "fail_step", "shutdown"))
        if len(kinds) != 1:
            raise FormatError(f"it has {kinds or 'no kind'}, but must have one of submit, abort, fail_step, shutdown")
        wait = given.get("wait", 0)
        if kinds == ["abort"]:
            return Abort(wait, given["abort"])
        if kinds == ["fail_step"]:
            return FailStep(wait, given["fail_step"])
        if kinds == ["shutdown"]:
            if given["shutdown"] is not True:
                raise FormatError(f"shutdown is {given['shutdown']!r}, but must be true")
            return Shutdown(wait)
        return _submit(wait, _object(given["submit"], "submit"))
    except FormatError as error:
        raise FormatError(f"event {number}: {error}") from None


def _submit(wait: int, given: dict[str, Any]) -> Submit:
    _keys(given, "submit", ("prompt", "max_tokens"), tuple(item.name for item in fields(Submit) if item.name != "wait"))
    prompt = []
    for piece in _list(given["prompt"], "submit.prompt"):
        if not isinstance(piece, list) or len(piece) != 2:
            raise FormatError(f"submit.prompt holds {piece!r}, but each piece must be [stream, length]")
        prompt.append((piece[0], piece[1]))
    return Submit(wait, **{**given, "prompt": tuple(prompt)})


# What may stand where --------------------------------------------------------------------------------------------


def _keys(given: Mapping[str, Any], where: str, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for key in given:
        if key not in needed and key not in optional:
            allowed = ", ".join(dict.fromkeys((*needed, *optional)))
            raise FormatError(f"{where} has the unknown key {key!r}; allowed are {allowed}")
    for key in needed:
        if key not in given:
            raise FormatError(f"{where} has no {key!r}, but it is needed")


def _number(value: object, where: str, least: int, most: int = MAX_TOTAL) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise FormatError(f"{where} is {value!r}, but must be an integer in {least}..{most}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = next(key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1)
        raise FormatError(f"the key {twice!r} stands twice in one object")
    return given


def _text(value: object, where: str, allowed: str = "text") -> None:
    if not isinstance(value, str):
        raise FormatError(f"{where} is {value!r}, but must be {allowed}")
    if not value.isascii() and (half := next((char for char in value if "\ud800" <= char <= "\udfff"), None)):
        raise FormatError(f"{where} is {value!r}, but must be Unicode text, and {half!r} is half of a surrogate pair")


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where} is {_kind(value)}, but must be a list")
    return value


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {_kind(value)}, but must be an object")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
