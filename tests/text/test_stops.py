"""Stop strings: the same answer for every cut of the text, nothing held that cannot become a match, linear work."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import stops as module
from engine.text.stops import StopSet, StopStrings

ALPHABET = "ab👍"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text(ALPHABET + "c", max_size=6), max_size=12)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule by brute force: the first end of any match, then the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            match = max(ending, key=len)
            return text[: end if include else end - len(match)], match
    return text, None


def held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is a proper prefix of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if n and text.endswith(stop[:n])), default=0)


@given(STOPS, PIECES, st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_cut_gives_the_rule(stops: list[str], pieces: list[str], include: bool) -> None:
    matcher = StopStrings(stops, include_stop=include)
    shown, seen = "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        if matcher.matched is None:
            assert len(seen) - len(shown) == held(seen, stops)  # neither more nor less (B094)
    shown += matcher.release()
    assert (shown, matcher.matched) == expected(seen, stops, include)


@given(STOPS, st.lists(st.tuples(st.integers(0, 2), st.text(ALPHABET + "c", max_size=6)), max_size=24))
@settings(max_examples=100, deadline=None)
def test_texts_that_share_a_set_do_not_disturb_each_other(stops: list[str], pushes: list[tuple[int, str]]) -> None:
    shared = StopSet(stops)
    matchers = [StopStrings(shared) for _ in range(3)]
    shown, seen = [""] * 3, [""] * 3
    for at, piece in pushes:
        shown[at] += matchers[at].push(piece)
        seen[at] += piece
    for at, matcher in enumerate(matchers):
        shown[at] += matcher.release()
        assert (shown[at], matcher.matched) == expected(seen[at], stops, False)


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["assistant"], ["pl", "eas"], "pleas", None),  # a tail that is a proper prefix is delivered (B093)
        (["STOP"], ["a ST", "OP b"], "a ", "STOP"),
        (["STOP"], ["STOSTO", "P"], "STO", "STOP"),
        (["abcd", "bc"], ["abc", "d"], "a", "bc"),  # the match that ends first, although the other began first
        (["bc", "abc"], ["ab", "cx"], "", "abc"),  # together: the longest
        (["abc", "ab"], ["abc"], "", "ab"),
        (["\n\n"], ["x\n", "y\n", "\nz"], "x\ny", "\n\n"),
        (["a", "a"], ["ba"], "b", "a"),
        ([], ["any", "thing"], "anything", None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    matcher = StopStrings(stops)
    assert "".join(map(matcher.push, pieces)) + matcher.release() == text
    assert matcher.matched == matched


def test_a_long_stop_string_delays_nothing() -> None:
    matcher = StopStrings(["x" * 500])
    assert matcher.push("hello") == "hello"
    assert matcher.push("xx") == ""
    assert matcher.push("y") == "xxy"


def _events(function: Callable[[], object]) -> int:
    """Function calls made by ``function``, Python's and C's: work that no clock can blur."""
    count = 0

    def tick(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_work_is_linear_in_the_text() -> None:
    """64 stop strings of 200 characters over 8000 pieces, on text that keeps nearly matching (B150)."""
    rng = random.Random(5)
    stops = ["ab" * 99 + f"{i:02d}" for i in range(64)]
    matcher = StopStrings(stops)
    pieces = [rng.choice(["abab", "ab" * 20, "b", "xyz "]) for _ in range(8000)]
    work = [_events(lambda part=part: [matcher.push(p) for p in part]) for part in (pieces[:1000], pieces[7000:])]
    size = [sum(map(len, part)) for part in (pieces[:1000], pieces[7000:])]
    assert matcher.matched is None
    assert work[1] / size[1] < 1.2 * work[0] / size[0]
    assert work[1] < 10 * size[1]


def _wrong(trials: int = 300) -> int:
    rng, wrong = random.Random(2), 0
    for _ in range(trials):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(3)]
        pieces = ["".join(rng.choices("abc", k=rng.randint(0, 3))) for _ in range(6)]
        matcher = StopStrings(stops)
        shown = "".join(map(matcher.push, pieces)) + matcher.release()
        wrong += (shown, matcher.matched) != expected("".join(pieces), stops, False)
    return wrong


class PerPiece(StopStrings):
    """Looks at each piece alone, so a match across a border is missed."""

    def push(self, piece: str) -> str:
        self._node, self._held = self._root, ""
        return super().push(piece) + self.release()


def test_broken_matchers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _wrong() == 0
    with monkeypatch.context() as patch:
        # Without failure links an overlapping start is lost.
        patch.setattr(module, "_next", lambda node, char: node.children.get(char) or _root_of(node))
        assert _wrong() > 0
    with monkeypatch.context() as patch:
        patch.setattr(StopStrings, "release", lambda self: "")
        assert _wrong() > 0
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "StopStrings", PerPiece)
        assert _wrong() > 0


def _root_of(node: module._Node) -> module._Node:
    while node.fail is not None:
        node = node.fail
    return node
