"""Token ids to text, one id at a time, without ever showing half a character.

The law. Let ``P`` be the prompt and ``G`` the generated ids, both without *silent* ids (unknown to the tokenizer, or
special ones that are skipped). What ``push`` and ``flush`` return, put together, is ``decode(P + G)`` without its
first ``len(decode(P))`` characters. A leading space that a tokenizer strips only at the start of a text is therefore
kept after a prompt. Two corners: a character that the prompt leaves unfinished belongs to the generated text
(byte-level BPE), and a run of byte tokens at the end of a prompt is closed there (byte fallback; of a prompt that is
nothing else, a run that follows and begins with the byte of a space loses it).

How. Decoders are local: what a token adds depends on the few tokens before it. So a short window of ids is decoded, and
what it adds to the text of the window before is new. Two things need patience:

    byte-level BPE   bytes of an unfinished character decode to one U+FFFD at the end: the last U+FFFD waits
    byte fallback    a run of ``<0xNN>`` tokens decodes as a whole, and to U+FFFD for each byte if any part is invalid:
                     the run waits, undecoded, for the token that ends it

A window of eight ids spans at least eight bytes, more than UTF-8 needs to fall into step (four) plus the longest
unfinished character (three). Each push decodes a bounded number of ids, but for runs, which are decoded once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
WINDOW = 8
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary(Protocol):
    """What text needs to know of a tokenizer. ``engine.loading.tokenizer.Tokenizer`` is one, and says what each means."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def byte_fallback(self) -> bool: ...

    def piece(self, token: int) -> str | None: ...

    def token_bytes(self, token: int) -> bytes: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental text of one request. Without a tokenizer (None) every id is silent: such a model has no text."""

    def __init__(
        self, tokenizer: Vocabulary | None, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._fallback = tokenizer is not None and tokenizer.byte_fallback
        self._run: list[int] = []  # byte tokens that wait for the end of their run
        self._after_run = False  # the window is one byte token, which stands for a prompt of nothing else
        self._window = self._context(prompt_ids)
        text = self._decode(self._window)
        unfinished = not self._fallback and text.endswith(REPLACEMENT) and self._ends_inside_character()
        self._shown = len(text) - unfinished  # how much of the window's text has been returned or was the prompt's

    def push(self, token: int) -> str:
        """The text that became certain with ``token``. Any integer is accepted; ids without text give none."""
        piece = self._piece(token)
        if piece is None:
            return ""
        after_run, self._after_run = self._after_run, False
        if self._fallback and _BYTE_TOKEN.fullmatch(piece):
            if after_run:  # the prompt's run is closed: these bytes are no part of it
                self._window, self._shown = [], 0
            self._run.append(token)
            return ""
        text = self._extend(token)
        end = len(text) - text.endswith(REPLACEMENT)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) >= 2 * WINDOW:
            self._slide(beyond=self._shown - end)
        return new

    def flush(self) -> str:
        """The rest: what was held of an unfinished character or run, as the full decode shows it."""
        text = self._extend()
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _extend(self, *tokens: int) -> str:
        """Takes the run and ``tokens`` into the window and returns the window's text."""
        self._window += self._run
        self._window += tokens
        self._run.clear()
        return self._decode(self._window)

    def _slide(self, beyond: int) -> None:
        """Forgets all but the last ids. ``beyond``: how many characters past the certain ones count as shown."""
        del self._window[:-WINDOW]
        text = self._decode(self._window)
        self._shown = len(text) - text.endswith(REPLACEMENT) + beyond

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last ``WINDOW`` ids of the prompt that have text, without a run of byte tokens at the end.

        Of a prompt that is nothing but such a run one id is kept, so that what follows is not taken for the start of a text.
        """
        context: list[int] = []
        run: list[int] = []
        for token in reversed(prompt_ids):
            piece = self._piece(token)
            if piece is None:
                continue
            if not context and self._fallback and _BYTE_TOKEN.fullmatch(piece):
                run = [token]
                continue
            context.append(token)
            if len(context) == WINDOW:
                break
        self._after_run = bool(run) and not context
        return run if self._after_run else context[::-1]

    def _piece(self, token: int) -> str | None:
        """The vocabulary's spelling of ``token``; None for a silent id."""
        tokenizer = self._tokenizer
        if tokenizer is None or not 0 <= token < tokenizer.vocab_size:
            return None
        if self._skip and token in tokenizer.special_ids:
            return None
        return tokenizer.piece(token)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if self._tokenizer else ""

    def _ends_inside_character(self) -> bool:
        assert self._tokenizer is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self._tokenizer.token_bytes, self._window)))
        return bool(decoder.getstate()[0])
