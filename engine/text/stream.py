"""The text of one request as it grows: token ids in, text that may be shown out, ended by a stop string.

The law: ``take`` may be called at any time or never; the pieces put together are ``text``, which is a function of the
tokens (and their ``may_stop``) alone: all of the detokenised text, or what stands before the first stop string.

Which characters can match: a character belongs to the push in which it became certain, and only characters of pushes
with ``may_stop`` take part in a match. So a stop string that appears before ``min_tokens``, in whole or in part, is
plain text for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.detokenize import Detokenizer, Vocabulary
from engine.text.stops import StopSet, StopStrings


class TextStream:
    """Detokenisation and stop strings of one choice. ``stop``: a ``StopSet`` where several texts share the same."""

    def __init__(
        self,
        tokenizer: Vocabulary | None,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] | StopSet = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop, include_stop=include_stop)
        self._may_stop = True  # of the last push; it also governs what finish flushes
        self._ended = False
        self._taken: list[str] = []
        self._fresh: list[str] = []

    def push(self, token: int, may_stop: bool = True, last: bool = False) -> bool:
        """Adds one generated token; True exactly when a stop string is completed by it. ``last``: no token follows, so
        everything that is held becomes certain with this one.

        Raises ``RuntimeError`` after a stop string or ``finish``: the text has ended.
        """
        if self._ended:
            raise RuntimeError(f"token {token} arrives after the end of its text")
        self._may_stop = may_stop
        self._feed(self._detokenizer.push(token))
        if last:
            self.finish()
        return self.matched is not None

    def finish(self) -> None:
        """Releases everything held: no token follows. A stop string in the flushed rest cuts the text."""
        if self._ended:
            return
        self._feed(self._detokenizer.flush())
        self._release(self._stops.release())
        self._ended = True

    def take(self) -> str:
        """The text released since the last ``take``."""
        piece = "".join(self._fresh)
        self._fresh.clear()
        if piece:
            self._taken.append(piece)
        return piece

    @property
    def text(self) -> str:
        """Everything released so far, taken or not."""
        self._taken = ["".join(self._taken)]
        return self._taken[0] + "".join(self._fresh)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def _feed(self, piece: str) -> None:
        if self._may_stop:
            self._release(self._stops.push(piece))
            self._ended = self.matched is not None
        else:
            self._release(self._stops.release() + piece)

    def _release(self, piece: str) -> None:
        if piece:
            self._fresh.append(piece)
