"""What a request's text is when it runs alone: its bytes, Python's own UTF-8 decoder, and the stop rule of SPEC 13, by search.

The oracle of the ``text`` and ``stream`` checks. It shares nothing with ``engine.text``: no window, no automaton, no state. It
takes every token of the solo run at once and says, after each of them, how much of the text is certain and how much of that
may be told: all but the longest end that could still become a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import attrs

from engine.trace import Shape, Submit, prompt_tokens
from properties import solo
from properties.toy_text import FALLBACK, PIECES, SPECIAL

REPLACEMENT = "\ufffd"
NEVER = "\0"  # no piece holds it: a stop string that ends in it is waited for and never comes
_STEM = 4  # characters of a stop string: enough to lie across a token border


@attrs.frozen
class SoloText:
    """``text``: everything that may be told. ``stop``: the string that ended it. ``after``: the number of generated tokens
    at which that ends the request; None where none does, or only in what a stop token flushes."""

    text: str
    stop: str | None
    after: int | None
    lengths: tuple[int, ...]  # characters told after 0, 1, 2, ... tokens, while the request goes on

    def told(self, tokens: int) -> str:
        return self.text[: self.lengths[min(tokens, len(self.lengths) - 1)]]


SILENT = SoloText("", None, None, (0,))


@attrs.frozen
class Script:
    """What the choices of one submission are told when they run alone. ``stops``: the stop strings that all of them have."""

    stops: tuple[str, ...]
    texts: tuple[SoloText, ...]

    @property
    def after(self) -> tuple[int | None, ...]:
        return tuple(text.after for text in self.texts)


def script(
    oracle: solo.Oracle, first_id: int, event: Submit, stop_ids: frozenset[int], max_tokens: int, shape: Shape
) -> Script:
    """``max_tokens`` is what the door settles. The stop strings are made of the first choice's text."""
    prompt = prompt_tokens(event.prompt)
    spoken, full = [], []
    for request in range(first_id, first_id + event.n):
        alone = solo.outcome(oracle, request, stop_ids, event.min_tokens, max_tokens)
        spoken.append(alone.tokens[: len(alone.tokens) - (alone.reason == "stop")])
        full.append(alone.reason == "length")
    stops: tuple[str, ...] = ()
    if event.stop_text is not None:
        stops = stop_strings(prompt, spoken[0], event.stop_text, byte_fallback=shape.byte_fallback)
    texts = [
        solo_text(
            prompt,
            tokens,
            stops=stops,
            include_stop=event.include_stop,
            min_tokens=event.min_tokens,
            byte_fallback=shape.byte_fallback,
            at_length=at_length,
        )
        for tokens, at_length in zip(spoken, full, strict=True)
    ]
    return Script(stops, tuple(texts))


def solo_text(
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    stops: Sequence[str] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    byte_fallback: bool = False,
    at_length: bool = False,
) -> SoloText:
    """``tokens``: those whose text counts, so without a stop token at the end. ``at_length``: the last of them is the last
    that the request may generate: it makes everything certain, and nothing is held behind it."""
    full, certain = _decoded(prompt, tokens, byte_fallback)
    if not stops:
        return SoloText(full, None, None, tuple(certain))
    if at_length:
        certain[-1] = len(full)
    # What takes no part in a match. Without a token there is only what the prompt left unfinished, which a stop token ends.
    barred = 0 if not tokens else len(full) if len(tokens) < min_tokens else certain[max(0, min_tokens - 1)]
    end, stop = _first_match(full, stops, barred)
    text = full if stop is None else full[: end if include_stop else end - len(stop)]
    after = None if stop is None else next((k for k, length in enumerate(certain) if length >= end), None)
    lengths = []
    for k, length in enumerate(certain):
        held = _held(full[barred:length], stops) if k >= min_tokens else 0
        lengths.append(min(length - held, len(text)))
    if at_length:
        lengths[-1] = len(text)
    return SoloText(text, stop, after, tuple(lengths))


def stop_strings(
    prompt: Sequence[int], tokens: Sequence[int], at: int, *, byte_fallback: bool = False
) -> tuple[str, ...]:
    """The stop strings of a request whose ``stop_text`` is ``at``, made from its own text: one that ends inside the text of
    the ``at``-th token and begins before it; where ``at`` is even, the end of that; one that begins earlier and ends later;
    and one that is about to come when the text ends. Fewer where the text is too short. Where ``at`` is 3, 6, ... and there are
    five characters: three that overlap, so that the one that comes is found only by giving up two others in turn. Where there
    is no ``at``-th token and ``at`` is even: what only the end makes certain."""
    full, certain = _decoded(prompt, tokens, byte_fallback)
    hope = full[-2:] + NEVER
    if at > len(tokens):
        return (full[certain[-1] :], hope) if at % 2 == 0 and len(full) > certain[-1] else (hope,)
    before, now = certain[at - 1], certain[at]
    end = before + (now - before + 1) // 2
    if at % 3 == 0 and end >= 5:
        last = full[end - 5 : end]
        return (last[:4] + NEVER, last[1:3] + NEVER, last[2:])
    start = max(0, min(before - 1, end - _STEM))
    candidates = (full[start:end], full[end - 1 : end] if at % 2 == 0 else "", full[max(0, start - 2) : end + 1], hope)
    return tuple(dict.fromkeys(text for text in candidates if text))


def _first_match(full: str, stops: Sequence[str], barred: int) -> tuple[int, str | None]:
    """SPEC 13.4: the match that ends first; of those that end together, the longest."""
    for end in range(barred + 1, len(full) + 1):
        matches = [stop for stop in stops if end - len(stop) >= barred and full.endswith(stop, 0, end)]
        if matches:
            return end, max(matches, key=len)
    return len(full), None


def _held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of ``text`` could still become a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    ends = range(min(longest, len(text)), 0, -1)
    return next((count for count in ends if any(stop.startswith(text[-count:]) for stop in stops)), 0)


def _decoded(prompt: Sequence[int], tokens: Sequence[int], byte_fallback: bool) -> tuple[str, list[int]]:
    """The whole text, and how many characters of it are certain after 0, 1, 2, ... tokens. A U+FFFD at the end waits for
    what comes next (SPEC 13.5)."""
    return _from_pieces(prompt, tokens) if byte_fallback else _from_bytes(prompt, tokens)


def _from_bytes(prompt: Sequence[int], tokens: Sequence[int]) -> tuple[str, list[int]]:
    """A character that the prompt leaves unfinished belongs to the generated text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in prompt:
        decoder.decode(_loud(token))
    text, certain = "", [0]
    for token in tokens:
        text += decoder.decode(_loud(token))
        pending = bool(decoder.getstate()[0])
        certain.append(len(text) - (text.endswith(REPLACEMENT) and not pending))
    return text + decoder.decode(b"", final=True), certain


def _loud(token: int) -> bytes:
    return b"" if token in SPECIAL else PIECES[token] or b""


def _from_pieces(prompt: Sequence[int], tokens: Sequence[int]) -> tuple[str, list[int]]:
    """A run of byte tokens is closed by the prompt's end. Only the very first space of prompt and answer is dropped."""
    before, run = _closed(prompt)
    opened = bool(before + run)
    text, certain = "", [0]
    for k in range(1, len(tokens) + 1):
        closed, run = _closed(tokens[:k])
        text = closed if opened else closed.removeprefix(" ")
        certain.append(max(certain[-1], len(text) - text.endswith(REPLACEMENT)))
        text += run
    return text, certain


def _closed(tokens: Sequence[int]) -> tuple[str, str]:
    """The text up to the last token that is no byte, and what the run of bytes after it would decode to."""
    text, run = "", b""
    for token in tokens:
        found = None if token in SPECIAL else FALLBACK[token]
        if found is None:
            continue
        spelling, byte = found
        if byte is None:
            text, run = text + _run(run) + spelling, b""
        else:
            run += bytes((byte,))
    return text, _run(run)


def _run(run: bytes) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)
