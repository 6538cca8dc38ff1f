"""Tokens drawn by native kernels, behind ``sampler.Draw``: all rows of a step in one call, off the interpreter lock.

The head leaves the peaks of a decode step's logits in a buffer of their own. They are used when the logits that come in are
that very step's; of any other logits (prefill, copies with penalties) the kernel finds the peaks itself, with the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from engine.compute.sampling_choice import WEIGHTS
from engine.control.plan import NO_TOKEN
from engine.native.kernels import WISH, BadCall, Kernels
from engine.native.library import Records

_WORDS = WISH // 8


@attrs.frozen(eq=False)
class _Call:
    """One record, and the memory that it points to; what is not named here belongs to the drawer."""

    logits: Tensor
    peaks: Tensor | None
    records: Records


class NativeDraw:
    """``head`` lies where decode steps put their logits, ``peaks(n)`` is where they put the peaks of n rows."""

    def __init__(
        self, kernels: Kernels, rows: int, vocab_size: int, head: Tensor, peaks: Callable[[int], Tensor]
    ) -> None:
        self._kernel, self._vocab_size = kernels.draw, vocab_size
        self._head, self._peaks = head.data_ptr(), peaks
        self._weights = torch.from_numpy(WEIGHTS)
        self._reserve(rows)

    def __call__(self, logits: Tensor, wishes: Sequence[bytes], positions: Sequence[int]) -> list[int]:
        """See ``sampler.Draw``. Raises ``BadCall`` for logits that the kernel must not see, ``RuntimeError`` for other peaks."""
        n = len(wishes)
        call = self._kept.get(n)
        if call is None or call.logits is not logits:
            call = self._call(logits, n)
        if self._written[:n] != wishes:  # the same rows as in the last step, as a rule
            self._words[:n, :-1] = np.frombuffer(b"".join(wishes), dtype=np.int64).reshape(n, _WORDS - 1)
            self._written[:n] = wishes
        for place, position in zip(range(_WORDS - 1, n * _WORDS, _WORDS), positions, strict=True):
            self._cells[place] = position
        self._kernel.pool.run(call.records)
        drawn = self._drawn[:n].tolist()
        if min(drawn) < NO_TOKEN:
            raise RuntimeError(f"row {drawn.index(min(drawn))} of {n}: the head's peaks are not those of its logits")
        return drawn

    def _call(self, logits: Tensor, n: int) -> _Call:
        """The call for these logits. Those of decode steps are kept, since the runner brings the same tensors again."""
        if logits.shape != (n, self._vocab_size):
            raise BadCall(f"logits are {tuple(logits.shape)}, but {n} wishes need {(n, self._vocab_size)}")
        if n > len(self._words):
            self._reserve(n)
        of_head = logits.data_ptr() == self._head and logits.is_contiguous()
        peaks = self._peaks(n) if of_head else None
        record = self._kernel.encode(logits, peaks, self._wishes[:n], self._weights, self._tokens[:n])
        call = _Call(logits, peaks, Records.of(record))
        if of_head:
            self._kept[n] = call
        return call

    def _reserve(self, rows: int) -> None:
        self._wishes = torch.zeros(rows, WISH, dtype=torch.uint8)
        self._words = self._wishes.numpy().view(np.int64)
        self._cells = self._words.reshape(-1).data  # written one by one at less cost than through numpy
        self._written = [b""] * rows  # the wishes that stand in the words
        self._tokens = torch.zeros(rows, dtype=torch.int64)
        self._drawn: memoryview[int] = self._tokens.numpy().data
        self._kept: dict[int, _Call] = {}
