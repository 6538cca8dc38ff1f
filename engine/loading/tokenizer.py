"""Text to token ids and back: one thread-safe face over ``tokenizers``, whatever file the vocabulary came from.

Special tokens in the text of a user are a question of trust, so ``encode`` takes ``parse_special``: with it off, the
string ``<|im_end|>`` becomes the ordinary tokens that spell it. The library's switch for that is a mutable attribute of
the tokenizer, so two tokenizers over one vocabulary are kept instead and neither is changed after it was made.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence

import tokenizers


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is moved to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_OF_CHAR = _byte_alphabet()
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
_SPACE_MARK = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # and its bytes that no piece covers
_SHIELD = "\ufdd0"  # a code point that Unicode reserves for uses like this and forbids in text
LONG_TEXT = 2**12  # characters; less is tokenised in a few milliseconds
WINDOW = 2**15  # characters searched at a time, since a search lets no other thread run


class Tokenizer:
    """A tokenizer with the ids that the engine needs to know.

    ``vocab_size`` is the model's where given (embeddings are often padded), else the tokenizer's; every id below it may
    be decoded, and ids that the tokenizer does not know are empty text. ``eos_ids`` end a generation. ``add_bos`` says
    whether ``encode`` puts ``bos_id`` in front when it adds special tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._literal = frozenset(added)
        if vocab_size is None:
            vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = vocab_size
        self.add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
        self._byte_level = _has_decoder(backend, "ByteLevel")
        self.byte_fallback = _has_decoder(backend, "ByteFallback")  # runs of ``<0xNN>`` tokens are decoded as a whole
        special = [token for token in added.values() if token.special and token.content]
        self._id_of_special = {token.content: i for i, token in added.items()}
        # 0: white space before a token belongs to it, so that a match has no greatest length.
        self._longest = (
            0 if any(token.lstrip for token in special) else max([len(t.content) for t in special], default=0)
        )
        self._special = _pattern(special)
        self._spelling = _pattern(special, spelling_only=True)
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of ``text``. ``add_special_tokens``: with BOS/EOS as the tokenizer's file asks. ``parse_special``:
        whether the spelling of a special token becomes that token. Raises ``ValueError`` on a lone surrogate."""
        backend = self.backend if parse_special or not self.special_ids else self._without_special()
        try:
            if len(text) < LONG_TEXT:
                return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
            # The same ids, but the library's batch call gives up the interpreter lock; the plain one stops every thread.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"the text cannot be encoded as UTF-8: {error}") from None

    def guard(self, text: str) -> str:
        """``text`` of a user, marked so that ``encode_guarded`` reads no special token out of it. The marks survive a
        chat template, whose own special tokens stay what they are."""
        shielded = text.replace(_SHIELD, _SHIELD * 2)
        if self._spelling is None:
            return shielded
        pieces: list[str] = []
        at = 0
        for found in _each(self._spelling, shielded, self._longest):
            pieces += (shielded[at : found.start() + 1], _SHIELD)
            at = found.start() + 1
        return "".join((*pieces, shielded[at:]))

    def encode_guarded(self, text: str) -> list[int]:
        """Ids of a rendered chat, without BOS or EOS around it; equal to ``encode(text, add_special_tokens=False)``
        where no guarded part spells a special token."""
        ids: list[int] = []
        at = 0
        for found in _each(self._special, text, self._longest) if self._special is not None else ():
            ids += self._encode_literal(text[at : found.start()])
            ids.append(self._id_of_special[found[found.lastindex or 0]])
            at = found.end()
        return ids + self._encode_literal(text[at:])

    def _encode_literal(self, text: str) -> list[int]:
        if _SHIELD in text:
            text = re.sub(f"{_SHIELD}({_SHIELD}?)", r"\1", text)
        return self.encode(text, add_special_tokens=False, parse_special=False) if text else []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD. Raises ``ValueError`` on an id outside
        [0, vocab_size)."""
        limit = self.vocab_size
        for token in ids:
            if not 0 <= token < limit:
                raise ValueError(f"token id {token} is outside the vocabulary, [0, {limit})")
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token: int) -> str | None:
        """The vocabulary's spelling of ``token``; None where the tokenizer does not know the id."""
        piece: str | None = self.backend.id_to_token(token)
        return piece

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty where the tokenizer does not know the id. Raises ``ValueError`` as
        ``decode`` does."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary, [0, {self.vocab_size})")
        piece = self.piece(token)
        if piece is None:
            return b""
        if token in self._literal:
            return piece.encode()
        if self._byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in piece)
            except KeyError:
                return piece.encode()
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte is not None:
            return bytes.fromhex(byte[1])
        return piece.replace(_SPACE_MARK, " ").encode()

    def token_text(self, token: int) -> str:
        """``token_bytes`` as text; incomplete UTF-8 shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _without_special(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._plain is None:
                plain = _twin(self.backend)
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain


def _twin(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer that is equal to ``backend`` and has switches of its own. Vocabulary and merges, of which each entry costs a
    few hundred bytes, are held once for both; a copy by way of JSON would hold them twice and three times on its way."""
    twin = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(backend, part)) is not None:
            setattr(twin, part, found)
    for _, token in sorted(backend.get_added_tokens_decoder().items()):  # in the order in which their ids were given
        (twin.add_special_tokens if token.special else twin.add_tokens)([token])
    return twin


def _pattern(tokens: Iterable[tokenizers.AddedToken], *, spelling_only: bool = False) -> re.Pattern[str] | None:
    """Matches any of ``tokens``, the longest first, with the white space that a token's flags swallow (unless
    ``spelling_only``); the token is the group that matched, or else the whole match. An alternative without a group lets
    the library skip quickly to characters that begin one."""
    choices = []
    for token in sorted(tokens, key=lambda token: -len(token.content)):
        before = r"\s*" if token.lstrip and not spelling_only else ""
        after = r"\s*" if token.rstrip and not spelling_only else ""
        content = re.escape(token.content)
        choices.append(f"{before}({content}){after}" if before or after else content)
    return re.compile("|".join(choices)) if choices else None


def _each(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """As ``pattern.finditer(text)``, in windows, between which other threads run. ``longest`` bounds what a match begins
    with; 0: unbounded, then there is one window."""
    if longest == 0 or len(text) <= WINDOW:
        yield from pattern.finditer(text)
        return
    at = 0
    for start in range(0, len(text), WINDOW):
        end = start + WINDOW
        at = max(at, start)
        while at < end and (found := pattern.search(text, at, end + longest)) is not None and found.start() < end:
            whole = pattern.match(text, found.start())  # with all white space behind it
            assert whole is not None
            yield whole
            at = whole.end()


def _has_decoder(backend: tokenizers.Tokenizer, kind: str) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    return any(part.get("type") == kind for part in state.get("decoders", [state]))
