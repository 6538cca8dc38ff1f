"""How the workload's own failures of one request come about (SPEC 13.7, 13.8): logits that hold no token, and a text that raises.

Logits are spoiled where the sampler is about to read them, in the buffer that the network wrote; with them what native kernels
left beside them, which is what they would have left. A text raises before it takes the token, as a broken tokenizer would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.control.request import StopText
from engine.trace import Submit

if TYPE_CHECKING:
    from torch import Tensor

INJECTED = "injected by the workload"
KINDS = ("one NaN", "NaN", "nothing left", "infinity")


class RowFailed(Exception):
    """What a text raises when the workload says that it fails."""


class BrokenText:
    """A text that raises at its ``at``-th token (from 1)."""

    def __init__(self, text: StopText, at: int) -> None:
        self._text, self._left = text, at

    @property
    def matched(self) -> str | None:
        return self._text.matched

    def push(self, token: int, may_stop: bool = True, last: bool = False) -> bool:
        self._left -= 1
        if self._left == 0:
            raise RowFailed(INJECTED)
        return self._text.push(token, may_stop, last)


def spoken(texts: Sequence[StopText], event: Submit) -> tuple[StopText, ...]:
    """The texts of a submission, the first of them broken if the workload says so."""
    at = event.fails("text")
    return tuple(texts) if at is None else (BrokenText(texts[0], at), *texts[1:])


def spoil(logits: Tensor, peaks: Tensor | None, kind: str) -> None:
    """Makes one row of ``logits`` [vocab] hold no token. ``peaks`` [panels of 16]: NaN where a panel is not finite."""
    at = len(logits) // 2
    value = float("-inf" if kind == "nothing left" else "inf" if kind == "infinity" else "nan")
    if kind in ("NaN", "nothing left"):
        logits.fill_(value)
    else:
        logits[at] = value
    if peaks is not None:
        peaks[at // 16 if kind in ("one NaN", "infinity") else slice(None)] = float("nan")
