"""Drawing one token from one row of logits (rule 14): temperature, top-k, top-p, min-p, then Gumbel-max over keyed noise.

The order of candidates is always (logit descending, id ascending), so ties have one answer. What survives:

    top_k   the first k candidates
    top_p   of those, each whose predecessors hold less than ``top_p`` of the mass (so at least one)
    min_p   of those, each with a logit of at least ``max + temperature * log(min_p)``

Among the survivors the largest ``(logit - max) / temperature + gumbel`` wins. All of it is exact in the sense that no
sum depends on the order of its terms: masses are integers, scores are per token. So the answer is a function of the
row's values alone.

Speed comes from doing the exact fp64 arithmetic only for tokens that can still win. In the Gumbel race token i arrives
at ``E_i / w_i``, with ``E_i = -log1p(-v_i) >= v_i`` and weight ``w_i``; a token with ``v_i / w_i`` beyond one arrival
time that is known exactly has lost. That test runs in fp32 with a margin some fifty times its rounding error, and may
therefore keep a loser, but never drops the winner.
"""

from __future__ import annotations

import math

import numpy as np

from engine.compute.sampling_noise import STEP, U64, bits, exponential, gumbel
from engine.compute.sampling_row import F32, I64
from engine.control.plan import NO_TOKEN
from engine.request import SamplingParams

MASS_BITS = 40  # weight of the likeliest token is 2**40; 2**22 tokens of it still fit into int64
_FINE = 64  # steps of the table of weights for each halving
_COLDEST = -28.0  # e to this times 2**40 is below one
WEIGHTS = np.array([2.0 ** (MASS_BITS - k / _FINE) for k in range(round(-_COLDEST * _FINE / math.log(2)) + 1)])
_MARGIN = 1.001
_COLD = 1e-30  # below this temperature fp32 quotients lose their meaning; only the pre-selection uses it


def choose(logits: F32, params: SamplingParams, key: int, counter: U64) -> int:
    """The token drawn from ``logits`` [vocab] fp32 with noise stream ``key``; ``counter`` is ``counters(vocab)``.

    Temperature must not be 0. ``NO_TOKEN`` for a row without a finite maximum: all masked, NaN or infinity (rule 13.7).
    """
    peak = float(logits.max())
    if not math.isfinite(peak):
        return NO_TOKEN
    ids: I64 | None = None
    if 0 < params.top_k < len(logits) or params.top_p < 1.0:
        ids = survivors(logits, peak, params)
        logits, counter = logits[ids], counter[ids]
    if params.min_p > 0.0:
        kept = np.flatnonzero(logits >= np.float64(peak + params.temperature * math.log(params.min_p)))
        ids = kept if ids is None else ids[kept]
        logits, counter = logits[kept], counter[kept]
    winner = race(logits, peak, params.temperature, key, counter)
    return winner if ids is None else int(ids[winner])


def survivors(logits: F32, peak: float, params: SamplingParams) -> I64:
    """Ids that top-k and top-p leave, ascending."""
    ids = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        ids = first(logits, params.top_k)
        logits = logits[ids]
    if params.top_p < 1.0:
        ids = ids[first(logits, nucleus(logits, peak, params.temperature, params.top_p))]
    return ids


def first(logits: F32, count: int) -> I64:
    """The first ``count`` indices in the order (logit descending, index ascending), returned ascending."""
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    keep = logits > threshold
    tied = np.flatnonzero(logits == threshold)
    keep[tied[: count - int(np.count_nonzero(keep))]] = True
    return np.flatnonzero(keep)


def nucleus(logits: F32, peak: float, temperature: float, top_p: float) -> int:
    """How many candidates top-p keeps: those whose predecessors hold less than ``top_p`` of the mass."""
    weights = weigh(logits, peak, temperature)  # a monotone image of the logits, so sorting it sorts the candidates
    total = int(weights.sum())
    bound = math.ceil(top_p * total)
    # Tokens lighter than this hold at most the rest of the mass all together, so they come after the cut.
    weights = np.sort(weights[weights >= (total - bound) // len(weights)])[::-1]
    before = np.cumsum(weights) - weights
    return int(np.count_nonzero(before < bound))


def weigh(logits: F32, peak: float, temperature: float) -> I64:
    """``exp((logit - peak) / temperature) * 2**MASS_BITS``, whole numbers.

    Libraries disagree about the last bits of exp, and one library with itself from processor to processor. So this is a table
    of powers and a short polynomial, in operations that IEEE 754 fixes: the native kernel has the same bits.
    """
    x = logits.astype(np.float64)
    x -= peak
    with np.errstate(over="ignore"):
        x /= temperature
    np.maximum(x, _COLDEST, out=x)
    step = np.rint(x * (-_FINE / math.log(2)))
    rest = step * (math.log(2) / _FINE)
    rest += x
    power = rest * (1 / 24)  # Taylor's: rest is at most 0.0055, the error 4e-14
    for coefficient in (1 / 6, 0.5, 1.0):
        power += coefficient
        power *= rest
    power += 1.0
    power *= WEIGHTS[step.astype(np.int64)]
    return power.astype(np.int64)


def race(logits: F32, peak: float, temperature: float, key: int, counter: U64) -> int:
    """Index of the largest ``(logit - peak) / temperature + gumbel``; ties go to the lowest index."""
    hashes = bits(key, counter)
    arrival = earliest_arrival(logits, peak, temperature, hashes)
    first = int(arrival.argmin())
    known = exponential(int(hashes[first])) * _inverse_weight(float(logits[first]), peak, temperature)
    best, winner = -math.inf, first
    for index in np.flatnonzero(arrival <= known * _MARGIN).tolist():
        score = (float(logits[index]) - peak) / temperature + gumbel(int(hashes[index]))
        if score > best:
            best, winner = score, index
    return winner


def earliest_arrival(logits: F32, peak: float, temperature: float, hashes: U64) -> F32:
    """Lower bounds of the arrival times, fp32: ``v / w``; infinite where the weight underflows."""
    lower = hashes.view(np.int64).astype(np.float32)  # signed: a conversion that the processor has
    lower += np.float32(0.5)
    lower *= np.float32(STEP)
    with np.errstate(divide="ignore", over="ignore"):
        weights = logits - np.float32(peak)
        weights *= np.float32(1.0 / max(temperature, _COLD))
        np.exp(weights, out=weights)
        lower /= weights
    return lower


def _inverse_weight(logit: float, peak: float, temperature: float) -> float:
    exponent = (peak - logit) / temperature
    return math.exp(exponent) if exponent < 700.0 else math.inf
