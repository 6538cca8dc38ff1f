"""Rows that cannot be sampled, on the native drawing kernel: the verdict and the sentence are numpy's, and neighbours are unhurt.

The head's peaks are NaN where a panel is not finite; with and without them the answer is the same.
"""

from __future__ import annotations

import math

import pytest
import torch
from test_native_sampling import draw_of, peaks, sampled
from torch import Tensor

from engine.control.plan import NO_TOKEN, Seat
from engine.native.draw import NativeDraw
from engine.request import SamplingParams, SamplingSpec
from tests.native.kit import kernels, numbers

VOCAB = 53  # three whole panels and a part of one
WISHES = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=5, top_p=0.7, min_p=0.05),
    SamplingParams(temperature=0.0, logit_bias={2: 3.0}, logprobs=2),
    SamplingParams(repetition_penalty=1.3, logits_digest=True),
)


def broken(kind: str, at: int) -> Tensor:
    row = numbers(11, 1, VOCAB)[0]
    if kind == "nothing left":
        row[:] = -math.inf
    else:
        row[at] = math.nan if kind == "NaN" else math.inf
    return row


@pytest.mark.parametrize("kind", ["NaN", "infinity", "nothing left"])
@pytest.mark.parametrize("at", [0, 17, VOCAB - 1])
def test_a_broken_row_is_told_as_numpy_tells_it(kind: str, at: int) -> None:
    good = numbers(7, 2, VOCAB)
    logits = torch.stack([good[0], broken(kind, at), good[1]])
    for params in WISHES:
        seats = [Seat(i, i, (1, 4), 1, (), SamplingSpec(params, i)) for i in range(3)]
        theirs = sampled(None, logits, seats, [2] * 3)
        assert [got.failure is None for got in theirs] == [True, False, True]
        given = peaks(logits)
        of_head = NativeDraw(kernels(), 3, VOCAB, logits, lambda rows, given=given: given[:rows])
        for draw in (draw_of(VOCAB), of_head):
            mine = sampled(draw, logits, seats, [2] * 3)
            assert mine == theirs
            assert mine[1].token == NO_TOKEN


def test_a_mask_that_hides_the_nan_does_not_mend_the_row() -> None:
    seats = [Seat(0, 0, (1,), 1, (), SamplingSpec(SamplingParams(min_tokens=3), 1, (9,)))]
    (got,) = sampled(draw_of(VOCAB), broken("NaN", 9)[None], seats, [1])
    assert got.failure == f"the logits for position 1 hold 1 NaN among {VOCAB}"
