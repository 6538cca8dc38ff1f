"""Parameters at the ends of what is allowed: no warning, no NaN, no masked token, and native kernels draw what numpy draws.

And just beyond the ends: a refusal in words, also where the number is one that Python will not convert or spell out.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute import sampling_row
from engine.compute.sampler import Draw, Sampler
from engine.control.plan import NO_TOKEN, Sampled, Seat
from engine.request import InvalidRequest, SamplingParams, SamplingSpec
from tests.native.kit import kernels
from tests.native.test_native_sampling import draw_of

VOCAB = 48
TINY = 5e-324  # the smallest float; in fp32 it is 0
MASKED = (0, 7)
ENDS: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, TINY, 1e-39, 1.0, 100.0),
    "repetition_penalty": (TINY, 1e-46, 1e-39, 1e-30, 1.0, 100.0),
    "frequency_penalty": (-2.0, -TINY, 0.0, TINY, 2.0),
    "presence_penalty": (-2.0, TINY, 0.0, 2.0),
    "top_p": (TINY, 1e-39, 1.0 - 2**-53, 1.0),
    "min_p": (0.0, TINY, 1e-39, 1.0),
}
BIASES: tuple[dict[int, float], ...] = ({}, {0: 100.0, 3: -100.0, 5: TINY}, {7: -TINY, 47: 100.0})


def extremes() -> list[SamplingParams]:
    """Each value of each field with every value of every other one, and a few random mixtures of all."""
    made = []
    for (one, values), (other, others) in itertools.combinations(ENDS.items(), 2):
        made += [{one: a, other: b} for a, b in itertools.product(values, others)]
    rng = np.random.default_rng(3)
    made += [{name: values[rng.integers(len(values))] for name, values in ENDS.items()} for _ in range(100)]
    return [
        SamplingParams(**chosen, logit_bias=BIASES[i % 3], top_k=(0, 1, 2**31 - 1)[i % 3], min_tokens=3)
        for i, chosen in enumerate(made)
    ]


def rows_of_logits() -> torch.Tensor:
    """Zeros, plateaus, both signs, and magnitudes at both ends of fp32. No token but a masked one is minus infinity."""
    rng = np.random.default_rng(4)
    rows = np.stack([rng.standard_normal(VOCAB), np.zeros(VOCAB), rng.standard_normal(VOCAB) * 1e-39, np.ones(VOCAB)])
    rows[3, ::2] = -3e38
    return torch.from_numpy(rows.astype(np.float32))


def sample(params: SamplingParams, logits: torch.Tensor, draw: Draw | None = None) -> list[Sampled]:
    """One token for each of ``logits``; some were generated before, more than once."""
    sampler = Sampler(len(logits), VOCAB, draw=draw)
    seat = (3, 5, 7, 0, 3, 3)
    for row in range(len(logits)):
        sampler.seat(Seat(row, row, seat, 4, (), SamplingSpec(params, row, MASKED)))
    rows = list(range(len(logits)))
    return sampler.sample(logits, rows, [len(seat)] * len(rows))


def failures(native: bool) -> list[str]:
    """What goes wrong at the ends: a warning, a masked token, or two answers."""
    logits, wrong = rows_of_logits(), []
    for params in extremes():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                tokens = [one.token for one in sample(params, logits)]
        except RuntimeWarning as warning:
            wrong.append(f"{warning}: {params}")
            continue
        if set(tokens) & {*MASKED, NO_TOKEN}:
            wrong.append(f"{tokens} with {MASKED} masked: {params}")
        if native and [one.token for one in sample(params, logits, draw_of(VOCAB))] != tokens:
            wrong.append(f"native kernels draw something else: {params}")
    return wrong


def test_the_ends_of_what_is_allowed() -> None:
    kernels()
    assert len(extremes()) > 300
    assert failures(native=True) == []


def test_a_penalty_that_becomes_zero_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_row, "_FLOAT_TINY", np.float32(0))
    wrong = failures(native=False)
    assert any(one.startswith("divide by zero") for one in wrong)
    with np.errstate(all="ignore"):
        params = SamplingParams(temperature=0.0, repetition_penalty=TINY, min_tokens=3)
        assert all("NaN" in (one.failure or "") for one in sample(params, rows_of_logits()))


HUGE = 10**5000
BEYOND: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, name)
        for name in ENDS
        for value in (math.nan, math.inf, -math.inf, HUGE, -HUGE, True, "1", None)
    ),
    *(({name: -TINY}, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *(({name: 0}, name) for name in ("top_p", "repetition_penalty")),
    *(({name: HUGE}, name) for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")),
    *(({"logit_bias": {1: value}}, "logit_bias") for value in (math.nan, math.inf, HUGE, 100.1, "1", None)),
    *(({"logit_bias": {token: 1.0}}, "logit_bias") for token in (-1, -HUGE, True, "1")),
    ({"logit_bias": {HUGE: 101.0}}, "logit_bias"),
    ({"stop_token_ids": (HUGE,)}, "stop_token_ids"),
]


@pytest.mark.parametrize(
    ("values", "field"), BEYOND, ids=lambda value: f"{value!s:.40}" if isinstance(value, str) else ""
)
def test_beyond_the_ends(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        SamplingParams(**values)
    assert refused.value.param == field
    assert len(str(refused.value)) < 200


def test_a_token_far_beyond_the_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="more than 30 digits"):
        SamplingParams(logit_bias={HUGE: 1.0}).check_vocabulary(512)
