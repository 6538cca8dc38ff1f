"""The sampler written again from the rules, one float at a time: no numpy, no torch, nothing of the engine's.

It recounts the penalties from the tokens at every step, walks each SplitMix64 generator output by output and gives
every surviving token its noise. ``Borderline`` marks a case whose answer hangs on the last bits of ``exp``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

WORD = 2**64


class Borderline(Exception):
    """Top-p's cut lies within rounding of a candidate's border."""


def f32(x: float) -> float:
    """``x`` rounded to single precision, saturating."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def splitmix64(state: int) -> Iterator[int]:
    """Sebastiano Vigna's public description of the generator, output by output."""
    state %= WORD
    while True:
        state = (state + 0x9E3779B97F4A7C15) % WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
        yield z ^ (z >> 31)


def nth(state: int, n: int) -> int:
    generator = splitmix64(state)
    for _ in range(n):
        next(generator)
    return next(generator)


def noise(seed: int, position: int, vocab: int) -> list[float]:
    """Gumbel noise of every token id: seed -> generator of positions -> generator of token ids."""
    by_token = splitmix64(nth(nth(seed, 0), position))
    uniforms = [((next(by_token) // 4096) + 0.5) / 2**52 for _ in range(vocab)]
    return [-math.log(-math.log1p(-v)) for v in uniforms]


def adjusted(
    raw: Sequence[float], params: Any, masked: Sequence[int], prompt: Sequence[int], out: Sequence[int]
) -> list[float]:
    logits = list(raw)
    if len(out) < params.min_tokens:
        for token in set(masked):
            if 0 <= token < len(logits):
                logits[token] = -math.inf
        if all(x == -math.inf for x in logits):
            logits = list(raw)
    for token, bias in params.logit_bias.items():
        logits[token] = f32(logits[token] + f32(bias))
    for token in set(prompt) | set(out):
        x = logits[token]
        if params.repetition_penalty != 1.0:
            r = max(f32(params.repetition_penalty), 2.0**-126)  # the smallest normal float
            x = f32(x / r) if x > 0 else f32(x * r)
        count = list(out).count(token)
        amount = f32(f32(f32(params.frequency_penalty) * count) + (f32(params.presence_penalty) if count else 0.0))
        logits[token] = min(f32(x - amount), 3.4028234663852886e38)
    return logits


def survivors(logits: Sequence[float], params: Any) -> list[int]:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    peak = logits[order[0]]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = [Fraction(math.exp((logits[i] - peak) / params.temperature)) for i in order]
        limit = Fraction(params.top_p) * sum(mass)
        kept, before = [], Fraction(0)
        for i, m in zip(order, mass, strict=True):
            if before and abs(before - limit) < sum(mass) / 10**9:
                raise Borderline
            if before < limit:
                kept.append(i)
            before += m
        order = kept
    if params.min_p > 0.0:
        order = [i for i in order if logits[i] >= peak + params.temperature * math.log(params.min_p)]
    return order


def sample(
    raw: Sequence[float], params: Any, seed: int, masked: Sequence[int], prompt: Sequence[int], out: Sequence[int]
) -> int:
    """The next token after ``prompt`` and ``out``, from raw fp32 logits."""
    logits = adjusted(raw, params, masked, prompt, out)
    peak = max(logits)
    if not math.isfinite(peak):
        return -1  # no token
    if params.temperature == 0.0:
        return logits.index(peak)
    g = noise(seed, len(prompt) + len(out), len(logits))
    scores = {i: (logits[i] - peak) / params.temperature + g[i] for i in survivors(logits, params)}
    return min(scores, key=lambda i: (-scores[i], i))


def logprobs(raw: Sequence[float]) -> list[float]:
    peak = max(raw)
    total = math.fsum(math.exp(x - peak) for x in raw)
    return [x - peak - math.log(total) for x in raw]
