"""The noise is what SplitMix64 says, uniform, independent along seed, position and id, and its Gumbel race is softmax.

What this cannot show: weaknesses of SplitMix64 that need more than some 10**7 draws. Each statistic is also shown a bad
source and must object. Seeds are fixed, so an outcome is not a matter of luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from slow_reference import nth, splitmix64

from engine.compute import sampling_noise as noise
from engine.compute.sampling_choice import choose
from engine.request import SamplingParams

VOCAB = 1000
COUNTER = noise.counters(VOCAB)


def _uniforms(seed: int, position: int, counter: np.ndarray = COUNTER) -> np.ndarray:
    return (noise.bits(noise.stream_key(seed, position), counter) + 0.5) * noise.STEP


def test_known_answers() -> None:
    """The generator's published outputs for start state 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    generator = splitmix64(1234567)
    assert [next(generator) for _ in published] == published
    assert noise.bits(1234567, noise.counters(5)).tolist() == [x >> 12 for x in published]


def test_key_is_the_nested_generator_and_wraps() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        for position in (0, 1, 4095):
            assert noise.stream_key(seed, position) == nth(nth(seed, 0), position)


def test_the_ends_of_the_uniforms_are_open() -> None:
    for bits in (0, 2**52 - 1):
        assert 0.0 < noise.uniform(bits) < 1.0
        assert math.isfinite(noise.gumbel(bits))
    assert noise.gumbel(0) == pytest.approx(36.7, abs=0.1)


def ks_uniform(sample: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance from the uniform law, times sqrt(n): above 1.95 with probability 0.001."""
    ordered = np.sort(sample)
    n = len(ordered)
    grid = np.arange(n + 1) / n
    return float(max((grid[1:] - ordered).max(), (ordered - grid[:-1]).max()) * math.sqrt(n))


def chi_square_z(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square as a standard normal number (Wilson-Hilferty); above 3.09 with probability 0.001."""
    df = len(expected) - 1
    x = float(((observed - expected) ** 2 / expected).sum())
    return ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def pairs_z(a: np.ndarray, b: np.ndarray) -> float:
    """Chi-square of the pairs (a[i], b[i]) over a grid of 16 x 16 cells: any dependence, not just correlation."""
    cells = np.bincount((a * 16).astype(int) * 16 + (b * 16).astype(int), minlength=256)
    return chi_square_z(cells, np.full(256, len(a) / 256))


def _neighbours(source: Callable[[int, int], np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Streams that must look independent: the next id, position and seed, and mixtures that a sloppy key confuses."""
    table = {(s, p): source(s, p) for s in range(-2, 42) for p in range(42)}
    here = [(s, p) for s in range(40) for p in range(40)]

    def paired(ds: int, dp: int) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.concatenate([table[key] for key in here]),
            np.concatenate([table[s + ds, p + dp] for s, p in here]),
        )

    whole = np.concatenate([table[key] for key in here])
    return {
        "id": (whole[:-1], whole[1:]),
        "position": paired(0, 1),
        "seed": paired(1, 0),
        "seed and position": paired(1, 1),
        "seed against position": paired(-1, 1),
        "shifted ids at the next position": (paired(0, 1)[0][1:], paired(0, 1)[1][:-1]),
    }


def test_uniform_and_independent() -> None:
    for name, (a, b) in _neighbours(lambda s, p: _uniforms(s, p, COUNTER[:256])).items():
        assert ks_uniform(a) < 1.95, name
        assert pairs_z(a, b) < 3.09, name


def test_independence_is_seen_to_fail() -> None:
    """Keys that add seed and position, or ids that walk through one stream, are told apart from good ones."""

    def adding(seed: int, position: int) -> np.ndarray:
        return (noise.bits(noise.mix64((seed + position) % 2**64), COUNTER[:256]) + 0.5) * noise.STEP

    def overlapping(seed: int, position: int) -> np.ndarray:
        start = noise.mix64(seed % 2**64) + position * noise.GAMMA
        return (noise.bits(start % 2**64, COUNTER[:256]) + 0.5) * noise.STEP

    bad = {name: pairs_z(a, b) for name, (a, b) in _neighbours(adding).items()}
    assert bad["seed against position"] > 100
    bad = {name: pairs_z(a, b) for name, (a, b) in _neighbours(overlapping).items()}
    assert bad["shifted ids at the next position"] > 100
    assert ks_uniform(np.linspace(0, 1, 10000) ** 1.1) > 1.95


LAWS = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.05),
}


def _law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities that the parameters ask for, by textbook."""
    p = np.exp((logits - logits.max()).astype(float) / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_draws_follow_softmax(name: str, axis: str) -> None:
    params, draws = LAWS[name], 6000
    logits = (np.random.default_rng(3).standard_normal(16) * 1.2).astype(np.float32)
    counter = noise.counters(16)
    keys = [noise.stream_key(*((11, i) if axis == "positions" else (i, 11))) for i in range(draws)]
    seen = np.bincount([choose(logits, params, key, counter) for key in keys], minlength=16)
    law = _law(logits, params)
    assert seen[law == 0].sum() == 0
    kept = law > 0
    assert chi_square_z(seen[kept], law[kept] * draws) < 3.09
    other = _law(logits, SamplingParams(temperature=params.temperature * 1.15))
    assert chi_square_z(seen, other * draws + 1e-9) > 3.09  # the statistic has the power to tell a neighbour apart


def test_large_vocabulary_follows_softmax() -> None:
    """Pre-selection in fp32 loses nobody: a big, nearly flat vocabulary, counted in 50 groups of ids."""
    vocab, draws = 20000, 3000
    logits = np.random.default_rng(5).standard_normal(vocab).astype(np.float32)
    counter = noise.counters(vocab)
    params = SamplingParams()
    ids = [choose(logits, params, noise.stream_key(i, 3), counter) for i in range(draws)]
    law = _law(logits, params).reshape(50, -1).sum(axis=1)
    assert chi_square_z(np.bincount(np.array(ids) // (vocab // 50), minlength=50), law * draws) < 3.09


def test_preselection_equals_the_full_race() -> None:
    """Every token's exact score, and the lowest id of the best: what the race must return without computing it."""
    for seed, scale in enumerate((0.0, 0.1, 1.0, 5.0, 30.0) * 4):
        logits = (np.random.default_rng(seed).standard_normal(3000) * scale).astype(np.float32)
        counter = noise.counters(3000)
        key = noise.stream_key(seed, 1)
        peak = float(logits.max())
        scores = [
            float(x) - peak + noise.gumbel(b) for x, b in zip(logits, noise.bits(key, counter).tolist(), strict=True)
        ]
        assert choose(logits, SamplingParams(), key, counter) == scores.index(max(scores))
