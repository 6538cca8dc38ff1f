"""A vocabulary of ``VOCAB`` ids that is nasty on purpose: what the text of a workload is made of, on every rung.

Characters are split over two, three and four tokens, bytes come that belong to no character, pieces begin with spaces, special
ids print nothing and some ids the tokenizer does not know, as where a model's vocabulary is padded. Words are few and overlap,
so that stop strings begin again inside each other. It has the face that ``engine.text`` knows of a tokenizer, in two kinds:

    byte level      a token is bytes, and all bytes together are decoded as UTF-8
    byte fallback   a token is text, or one byte spelled ``<0xNN>``; a run of those is decoded as a whole, to one U+FFFD for
                    each byte if any part of it is wrong; one space at the very start of a text is dropped

No library decodes here, so that a run costs microseconds and imports nothing; a test holds it against the real one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from engine.trace import VOCAB

SPECIAL = frozenset({0, 1, 2, 14, 71, 100, 187, 216})
UNKNOWN = frozenset({17, 60, 122, 201, 250})
_WORDS = (
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aa",
    b" a",
    b" the",
    b"STOP",
    b"ST",
    b"OP",
    b"\n",
    b" ",
    b".",
    "é".encode(),
    "漢".encode(),
)
_OPENS = (b"\xc3", b"\xf0\x9f", b"\xf0", b"\xe6\xbc", b"\xff")  # begins a character that the next token may finish
_CLOSES = (b"\xa9", b"\x8e\x89", b"\x9f\x8e\x89", b"\xa2")
# The ids that the first request of the ledger rung says, in its order: something of everything within a few tokens.
_SCRIPT: tuple[tuple[int, bytes], ...] = (
    (11, b" One"),
    (12, b" caf\xc3"),
    (13, b"\xa9"),
    (15, b"\xf0\x9f"),
    (16, b"\x8e"),
    (18, b"\x89!"),
    (19, b"STO"),
    (20, b"P it"),
    (21, b"\xe6"),
    (22, b"\xbc"),
    (23, b" x\xff"),
    (24, b"ab"),
    (25, b"aba"),
    (26, b"\xe6\xbc\xa2\xe6"),
)


def _bytes_of(token: int) -> bytes:
    draw = zlib.crc32(f"piece {token}".encode())
    piece = _WORDS[draw % len(_WORDS)]
    if draw >> 8 & 1:
        piece = _CLOSES[(draw >> 10) % len(_CLOSES)] + piece * (draw >> 16 & 1)
    if draw >> 9 & 1:
        piece = piece * (draw >> 17 & 1) + _OPENS[(draw >> 13) % len(_OPENS)]
    return piece


def _fallback_of(piece: bytes) -> tuple[str, int | None]:
    """The same piece as byte fallback has it: text, or one byte, of what is no text and of the line feed."""
    try:
        if piece != b"\n":
            return piece.decode("utf-8"), None
    except UnicodeDecodeError:
        pass
    byte = piece.lstrip(bytes(range(0x80)))[:1] or piece
    return f"<0x{byte[0]:02X}>", byte[0]


PIECES: tuple[bytes | None, ...] = tuple(
    None
    if token in UNKNOWN
    else f"<s{token}>".encode()
    if token in SPECIAL
    else dict(_SCRIPT).get(token, _bytes_of(token))
    for token in range(VOCAB)
)
"""What each id stands for; None where the tokenizer does not know it."""
FALLBACK: tuple[tuple[str, int | None] | None, ...] = tuple(
    None if piece is None else (piece.decode(), None) if token in SPECIAL else _fallback_of(piece)
    for token, piece in enumerate(PIECES)
)
"""(spelling, byte) of each id, byte None where the spelling is the text itself."""


class ToyVocabulary:
    """Stands where a tokenizer stands. Frozen by use: nothing in it changes."""

    vocab_size = VOCAB
    special_ids = SPECIAL

    def __init__(self, byte_fallback: bool) -> None:
        self.byte_fallback = byte_fallback

    def piece(self, token: int) -> str | None:
        if self.byte_fallback:
            found = FALLBACK[token]
            return None if found is None else found[0]
        raw = PIECES[token]
        return None if raw is None else raw.decode("latin-1")

    def token_bytes(self, token: int) -> bytes:
        if not self.byte_fallback:
            return PIECES[token] or b""
        found = FALLBACK[token]
        if found is None:
            return b""
        spelling, byte = found
        return spelling.encode() if byte is None else bytes((byte,))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [token for token in ids if not (skip_special_tokens and token in SPECIAL)]
        if not self.byte_fallback:
            return b"".join(PIECES[token] or b"" for token in shown).decode("utf-8", "replace")
        text = "".join(self._parts(shown))
        return text.removeprefix(" ")

    def _parts(self, ids: Sequence[int]) -> Iterator[str]:
        run = b""
        for token in ids:
            found = FALLBACK[token]
            if found is None:
                continue
            spelling, byte = found
            if byte is not None:
                run += bytes((byte,))
                continue
            yield _whole(run)
            run = b""
            yield spelling
        yield _whole(run)


def _whole(run: bytes) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


BYTE_LEVEL, BYTE_FALLBACK = ToyVocabulary(False), ToyVocabulary(True)


def vocabulary(byte_fallback: bool) -> ToyVocabulary:
    return BYTE_FALLBACK if byte_fallback else BYTE_LEVEL
