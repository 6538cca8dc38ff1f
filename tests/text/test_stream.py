"""The text of a request: independent of when it is taken, equal to the unstreamed text, ended by a stop string."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import CORPUS, KINDS, toy

from engine.text.stream import TextStream

IDS = st.lists(st.integers(0, 400), max_size=30)
SPLIT = "$Q%"  # several tokens long
STOPS = st.lists(st.sampled_from(["STOP", "the", "🎉", "\ufffd", " ", "漢字", "a    b", "e", "\n\n"]), max_size=3)


def reference(kind: str, ids: list[int], may: list[bool], stops: list[str], include: bool) -> tuple[str, str | None]:
    """The unstreamed text: the full decode, then matches looked for character by character, by brute force."""
    tokenizer = toy(kind)
    detokenised = TextStream(tokenizer)
    text, eligible = "", []
    flags = [*may, may[-1] if may else True]
    for token, flag in zip([*ids, None], flags, strict=True):
        if token is None:
            detokenised.finish()
        else:
            detokenised.push(token)
        piece = detokenised.take()
        text += piece
        eligible += [flag] * len(piece)
    assert text == tokenizer.decode(ids)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop) and all(eligible[end - len(stop) : end])]
        if found:
            match = max(found, key=len)
            return text[: end if include else end - len(match)], match
    return text, None


@pytest.mark.parametrize("kind", KINDS)
@given(
    source=st.one_of(
        st.lists(st.integers(0, 400), max_size=30), st.lists(st.sampled_from([*CORPUS, "🎉"]), max_size=2)
    ),
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    takes=st.lists(st.booleans(), min_size=1, max_size=5),
    announced=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_text_is_a_function_of_the_tokens(
    kind: str, source: list, stops: list[str], include: bool, min_tokens: int, takes: list[bool], announced: bool
) -> None:
    """Whether the last token is announced as such or ``finish`` follows it changes neither text nor match."""
    tokenizer = toy(kind)
    texts = "".join(source) if source and isinstance(source[0], str) else None
    ids = tokenizer.encode(texts) if texts is not None else [i % tokenizer.vocab_size for i in source]
    may = [i + 1 >= min_tokens for i in range(len(ids))]
    stream = TextStream(tokenizer, stop=stops, include_stop=include)
    taken, stopped = [], False
    for i, (token, flag) in enumerate(zip(ids, may, strict=True)):
        stopped = stream.push(token, flag, announced and i == len(ids) - 1)
        assert stopped == (stream.matched is not None)
        if takes[i % len(takes)]:
            taken.append(stream.take())
            assert "".join(taken) == stream.text
        if stopped:
            break
    stream.finish()
    taken.append(stream.take())
    text, matched = reference(kind, ids, may, stops, include)
    assert "".join(taken) == stream.text == text
    assert stream.matched == matched
    assert stream.take() == ""


def ids_of(text: str) -> list[int]:
    return toy("byte_level").encode(text, add_special_tokens=False)


def run(text: str, stop: list[str], min_tokens: int = 0, **how: bool) -> tuple[str, str | None]:
    stream = TextStream(toy("byte_level"), stop=stop, **how)
    for i, token in enumerate(ids_of(text)):
        if stream.push(token, i + 1 >= min_tokens):
            break
    stream.finish()
    return stream.text, stream.matched


def test_a_stop_string_across_tokens() -> None:
    assert len(ids_of("END of ENDING")) > 5
    assert run("one END two", ["END"]) == ("one ", "END")
    assert run("one END two", ["END"], include_stop=True) == ("one END", "END")


def test_the_held_end_is_delivered() -> None:
    """Text that could have become a stop string, at the end (B093)."""
    assert run("my dog pleas", ["assistant", "please"]) == ("my dog pleas", None)


def test_before_min_tokens_a_stop_string_is_plain_text_for_ever() -> None:
    """Neither the whole string before the border nor one that straddles it matches; a new one does."""
    border = len(ids_of(SPLIT))
    assert border >= 3
    assert run(SPLIT + " on", [SPLIT], min_tokens=border + 1) == (SPLIT + " on", None)
    assert run(SPLIT + " on", [SPLIT], min_tokens=border) == (SPLIT + " on", None)
    assert run(SPLIT + SPLIT, [SPLIT], min_tokens=border + 1) == (SPLIT, SPLIT)
    assert run(SPLIT + SPLIT, [SPLIT], min_tokens=1) == ("", SPLIT)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    ids = ids_of("🎉")
    assert len(ids) >= 2
    assert run("🎉", ["🎉"], min_tokens=len(ids)) == ("", "🎉")
    assert run("🎉 a", ["🎉"], min_tokens=len(ids) + 1) == ("🎉 a", None)


def test_a_run_that_finish_closes_still_stops() -> None:
    """Byte fallback holds a run until it ends; a stop string inside the last one cuts the text all the same."""
    tokenizer = toy("byte_fallback")
    ids = [tokenizer.backend.token_to_id(p) for p in ("a", *(f"<0x{b:02X}>" for b in "🎉é".encode()))]
    stream = TextStream(tokenizer, stop=["🎉"])
    assert [stream.push(token) for token in ids] == [False] * len(ids)
    stream.finish()
    assert (stream.text, stream.matched) == ("a", "🎉")


@pytest.mark.parametrize(
    ("kind", "stop"), [("byte_level", "\ufffd"), ("byte_fallback", "\ufffd"), ("byte_fallback", "\u00e9")]
)
def test_what_only_the_last_token_makes_certain_may_stop(kind: str, stop: str) -> None:
    """The last of a text's tokens leaves half a character, or an open run of bytes, and then there is nothing to wait for."""
    tokenizer = toy(kind)
    byte = {"byte_level": "\u00c3", "byte_fallback": "<0xC3>"}[kind]
    ids = [tokenizer.backend.token_to_id(piece) for piece in ("a", byte)]
    if stop == "\u00e9":
        ids.append(tokenizer.backend.token_to_id("<0xA9>"))
    for last in (True, False):
        stream = TextStream(tokenizer, stop=[stop])
        ended = [stream.push(token, last=last and token == ids[-1]) for token in ids]
        assert ended == [False] * (len(ids) - 1) + [last]
        stream.finish()
        assert (stream.text, stream.matched) == ("a", stop)
    barred = TextStream(tokenizer, stop=[stop])
    assert [barred.push(token, False, token == ids[-1]) for token in ids] == [False] * len(ids)
    assert barred.text == "a" + stop


def test_the_end_is_the_end() -> None:
    stream = TextStream(toy("byte_level"), stop=["a"])
    assert stream.push(ids_of("a")[0])
    with pytest.raises(RuntimeError, match="after the end"):
        stream.push(ids_of("b")[0])
    stream.finish()
    stream.finish()
    assert stream.text == ""


def test_no_tokenizer_no_text() -> None:
    stream = TextStream(None, [1, 2], stop=["x"])
    assert not stream.push(3)
    stream.finish()
    assert stream.text == ""


def test_reading_the_text_at_every_token_stays_cheap() -> None:
    """A generous bound on the clock: 8000 tokens with 64 stop strings, taken and read each time (B150)."""
    stream = TextStream(toy("byte_level"), stop=[f"{i:02d}" * 100 for i in range(64)])
    ids = (ids_of(CORPUS[0]) * 400)[:8000]
    start = time.perf_counter()
    for token in ids:
        stream.push(token)
        stream.take()
        assert stream.text is not None
    assert time.perf_counter() - start < 5.0


class TakesFromHeld(TextStream):
    """``take`` also gives what may still become a stop string."""

    def take(self) -> str:
        self._release(self._stops.release())
        return super().take()


class MatchesOldText(TextStream):
    """Text before min_tokens stays in the matcher's memory."""

    def push(self, token: int, may_stop: bool = True) -> bool:
        stopped = super().push(token, True)
        if stopped and not may_stop:
            self._stops.matched, self._ended = None, False
            self._release(SPLIT)
        return stopped and may_stop


class LosesTheEnd(TextStream):
    def finish(self) -> None:
        self._ended = True


@pytest.mark.parametrize("broken", [TakesFromHeld, MatchesOldText, LosesTheEnd])
def test_broken_streams_are_seen(broken: type[TextStream]) -> None:
    """The law of this file, checked on a few texts, rejects each of them."""
    wrong = 0
    for text in (f"a {SPLIT} b", SPLIT * 2, "x $Q"):
        ids = ids_of(text)
        for border in range(len(ids) + 1):
            may = [i + 1 >= border for i in range(len(ids))]
            stream = broken(toy("byte_level"), stop=[SPLIT])
            taken = ""
            for token, flag in zip(ids, may, strict=True):
                stopped = stream.push(token, flag)
                taken += stream.take()
                if stopped:
                    break
            stream.finish()
            taken += stream.take()
            wrong += (taken, stream.matched) != reference("byte_level", ids, may, [SPLIT], False)
    assert wrong
