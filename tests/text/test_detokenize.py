"""The law of incremental detokenisation, on tokenizers of every decoder kind, random ids and real text.

Beside it, detokenisers with the faults of other engines, which the same check must reject.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import CORPUS, KINDS, toy

from engine.loading.tokenizer import CHAR_OF_BYTE, Tokenizer
from engine.text.detokenize import REPLACEMENT, Detokenizer

TEXT = "🎉 é 漢字 👨‍👩‍👧 ∑ a    b\n\n\tdef f(): “x” 🇩🇪👍🏽 한국어 STOP."
IDS = st.lists(st.integers(0, 400), max_size=40)


def is_byte(tokenizer: Tokenizer, token: int) -> bool:
    return (tokenizer.backend.id_to_token(token) or "").startswith("<0x")


def is_silent(tokenizer: Tokenizer, token: int, skip: bool) -> bool:
    return tokenizer.backend.id_to_token(token) is None or (skip and token in tokenizer.special_ids)


def expected(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """The law, by full decodes. ``prompt`` must not end inside a character."""
    full = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    return full[len(tokenizer.decode(prompt, skip_special_tokens=skip)) :]


def deltas(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool, make: type = Detokenizer) -> list[str]:
    detokenizer = make(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def closed(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> list[int]:
    """``prompt`` without its end, until that is no byte token and no unfinished character."""
    while prompt:
        last = prompt[-1]
        ends = tokenizer.decode(prompt, skip_special_tokens=skip).endswith(REPLACEMENT)
        if not (is_byte(tokenizer, last) or is_silent(tokenizer, last, skip) or ends):
            return prompt
        prompt = prompt[:-1]
    return prompt


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=IDS, ids=IDS, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_make_the_full_decode(kind: str, prompt: list[int], ids: list[int], skip: bool) -> None:
    tokenizer = toy(kind)
    prompt = closed(tokenizer, [i % tokenizer.vocab_size for i in prompt], skip)
    ids = [i % tokenizer.vocab_size for i in ids]
    assert "".join(deltas(tokenizer, prompt, ids, skip)) == expected(tokenizer, prompt, ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.lists(st.sampled_from([*CORPUS, TEXT, " ", "  ", "🎉🎉", "é", "\n"]), max_size=4).map("".join),
    cut=st.integers(0, 400),
)
@settings(max_examples=60, deadline=None)
def test_real_text_comes_whole(kind: str, text: str, cut: int) -> None:
    """A text cut anywhere into prompt and answer: nothing is lost, and no piece shows half a character."""
    tokenizer = toy(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = closed(tokenizer, ids[: cut % (len(ids) + 1)], True)
    answer = ids[len(prompt) :]
    pieces = deltas(tokenizer, prompt, answer, True)
    assert "".join(pieces) == expected(tokenizer, prompt, answer, True)
    if kind == "byte_level":
        assert tokenizer.decode(prompt) + "".join(pieces) == text
        assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_long_random_streams(kind: str) -> None:
    """The window slides many times, and its ids never fall into step with the characters (B109, B111)."""
    tokenizer, rng = toy(kind), random.Random(7)
    for _ in range(20):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(500)]
        assert "".join(deltas(tokenizer, [], ids, True)) == expected(tokenizer, [], ids, True)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    pieces = [f"<0x{b:02X}>" if tokenizer is toy("byte_fallback") else CHAR_OF_BYTE[b] for b in data]
    return [tokenizer.backend.token_to_id(piece) for piece in pieces]


BYTES = [
    "🎉é漢👨‍👩‍👧".encode(),
    "🎉".encode()[:3],
    b"\xff\xfe\xc3(\xe2\x82\xf0\x9f\x98",
    b"\xe6\xbc" * 30,
    b"\x80" * 40 + "é".encode() * 20,
    b"\xf0\x9f" + b"\xbf" * 25 + b"a",
    b"\xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80",
    REPLACEMENT.encode() * 12,
]


@pytest.mark.parametrize("data", BYTES)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_one_token_each(kind: str, data: bytes) -> None:
    """Valid, cut and wrong UTF-8: U+FFFD where the full decode has it, also where max_tokens cut a character (B108)."""
    tokenizer = toy(kind)
    ids = byte_ids(tokenizer, data)
    for end in range(len(ids) + 1):
        assert "".join(deltas(tokenizer, [], ids[:end], True)) == tokenizer.decode(ids[:end])
    if kind == "byte_level":
        assert "".join(deltas(tokenizer, [], ids, True)) == data.decode("utf-8", "replace")


def test_the_space_behind_a_prompt_of_bytes_alone_is_kept() -> None:
    """Only the very first space of a text is stripped, and a prompt that is a run of byte tokens is text, too."""
    tokenizer = toy("byte_fallback")
    the = tokenizer.backend.token_to_id("▁the")
    for data in ("é".encode(), b"\xc3", b"\xff" * 12):
        prompt = byte_ids(tokenizer, data)
        assert "".join(deltas(tokenizer, prompt, [the, the], True)) == " the the"
        assert "".join(deltas(tokenizer, prompt, [*byte_ids(tokenizer, b"\xa9"), the], True)) == REPLACEMENT + " the"
        assert "".join(deltas(tokenizer, prompt, byte_ids(tokenizer, "é".encode()), True)) == "é"
        assert deltas(tokenizer, prompt, [], True) == [""]


def test_characters_are_shown_when_they_are_complete() -> None:
    """Patience ends with the character (byte level), or with the token after the run (byte fallback)."""
    tokenizer = toy("byte_level")
    assert deltas(tokenizer, [], byte_ids(tokenizer, "é🎉a".encode()), True) == ["", "é", "", "", "", "🎉", "a", ""]
    tokenizer = toy("byte_fallback")
    ids = [*byte_ids(tokenizer, "🎉".encode()), tokenizer.backend.token_to_id("a")]
    assert deltas(tokenizer, [], ids, True) == ["", "", "", "", "🎉a", ""]


def test_endless_invalid_bytes_are_not_hoarded() -> None:
    """All but the last U+FFFD is certain, so it is shown."""
    tokenizer = toy("byte_level")
    pieces = deltas(tokenizer, [], byte_ids(tokenizer, b"\xff" * 100), True)
    assert pieces == ["", *[REPLACEMENT] * 100]


def test_leading_space_is_kept_after_a_prompt() -> None:
    """A decoder that strips the first space of a text would eat it if the prompt were not there (B112)."""
    tokenizer = toy("byte_fallback")
    the, a = tokenizer.backend.token_to_id("▁the"), tokenizer.backend.token_to_id("a")
    assert deltas(tokenizer, [a], [the, the], True) == [" the", " the", ""]
    assert deltas(tokenizer, [], [the, the], True) == ["the", " the", ""]


def test_a_character_across_the_end_of_the_prompt() -> None:
    """Byte level: what the prompt left unfinished is shown with the answer; a complete U+FFFD of the prompt is not."""
    tokenizer = toy("byte_level")
    ids = byte_ids(tokenizer, "🎉a".encode())
    assert "".join(deltas(tokenizer, ids[:2], ids[2:], True)) == "🎉a"
    prompt = byte_ids(tokenizer, REPLACEMENT.encode())
    assert "".join(deltas(tokenizer, prompt, ids, True)) == "🎉a"
    assert "".join(deltas(tokenizer, prompt, [], True)) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_ids_have_no_text(kind: str) -> None:
    """Ids beyond the tokenizer, padding of the embedding, negative or huge ones (B091, B114)."""
    tokenizer = toy(kind)
    known = tokenizer.encode("The fox", add_special_tokens=False)
    ids = [-1, tokenizer.vocab_size - 1, tokenizer.vocab_size, 2**40, -(2**70)]
    mixed = [x for token in known for x in (token, *ids)]
    assert "".join(deltas(tokenizer, ids, mixed, True)) == "".join(deltas(tokenizer, [], known, True))


def test_special_tokens_by_flag() -> None:
    tokenizer = toy("byte_level")
    ids = [*tokenizer.encode("a"), tokenizer.backend.token_to_id("<|im_end|>"), *tokenizer.encode("b")]
    assert "".join(deltas(tokenizer, [], ids, True)) == "ab"
    assert "".join(deltas(tokenizer, [], ids, False)) == "a<|im_end|>b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, [1, 2, 3])
    assert detokenizer.push(4) + detokenizer.flush() == ""


class Counting:
    """A tokenizer that adds up how many ids it was asked to decode."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.decoded = inner, 0

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def decode(self, ids: list[int], **how) -> str:
        self.decoded += len(ids)
        return self.inner.decode(ids, **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("only_bytes", [False, True])
def test_work_per_token_does_not_grow(kind: str, only_bytes: bool) -> None:
    """Ids decoded per id pushed, which no clock can blur (B150)."""
    tokenizer, rng = Counting(toy(kind)), random.Random(1)
    pool = [i for i in range(tokenizer.vocab_size) if not only_bytes or is_byte(toy(kind), i)] or [0]
    ids = [rng.choice(pool) for _ in range(4000)]
    deltas(tokenizer, ids, ids, True)
    assert tokenizer.decoded < 20 * len(ids)


class TokenByToken(Detokenizer):
    """Each token decoded alone (B106)."""

    def push(self, token: int) -> str:
        return self._decode([token])


class NoPatience(Detokenizer):
    """A trailing U+FFFD taken as final."""

    def push(self, token: int) -> str:
        text = self._extend(token)
        new, self._shown = text[self._shown :], len(text)
        return new


class ShortMemory(Detokenizer):
    """A look-back too small for a split character (B109)."""

    def _slide(self, beyond: int) -> None:
        del self._window[:-1]
        text = self._decode(self._window)
        self._shown = len(text) - text.endswith(REPLACEMENT) + beyond

    def push(self, token: int) -> str:
        new = super().push(token)
        self._slide(0)
        return new


class ForgetsTheRest(Detokenizer):
    """What was held is never delivered."""

    def flush(self) -> str:
        return ""


class RunsAreNotHeld(Detokenizer):
    """Byte tokens shown as soon as they make a character."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._fallback = False


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (TokenByToken, "byte_level"),
        (TokenByToken, "word_piece"),
        (NoPatience, "byte_level"),
        (ShortMemory, "byte_level"),
        (ForgetsTheRest, "byte_level"),
        (ForgetsTheRest, "byte_fallback"),
        (RunsAreNotHeld, "byte_fallback"),
    ],
)
def test_broken_detokenisers_are_seen(broken: type, kind: str) -> None:
    tokenizer, rng = toy(kind), random.Random(3)
    wrong = 0
    for _ in range(60):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        wrong += "".join(deltas(tokenizer, [], ids, True, broken)) != expected(tokenizer, [], ids, True)
    assert wrong
