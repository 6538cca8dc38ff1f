"""The noise of sampling (rule 14): a pure function of (seed, position, token id), so no generator state to keep or rewind.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) used by
counter: output ``i`` of the generator with start state ``s`` is ``mix64(s + i * GAMMA)``, so any output can be had
without those before it. Three of them are nested: the seed's generator names a generator for every position, and that
one's outputs are numbered by token id.

A 64-bit output gives ``v = (top 52 bits + 1/2) / 2**52``, uniform in (0, 1) and never 0 or 1 in fp64. The Gumbel noise
is ``-log(-log1p(-v))``: ``v`` is the distance from one, so the upper tail, where winners come from, is the finely
resolved end. The largest noise is 36.7.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = 2**64 - 1
STEP = 2.0**-52  # distance between neighbouring uniforms


def mix64(z: int) -> int:
    """SplitMix64's finaliser, on one unsigned 64-bit integer."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def stream_key(seed: int, position: int) -> int:
    """Start state of the generator for one position of one seed; ``seed`` may be negative (two's complement)."""
    return mix64((mix64((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK)


def counters(vocab_size: int) -> U64:
    """``(id + 1) * GAMMA`` for every token id, [vocab_size] uint64: what is added to a key before it is mixed."""
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GAMMA)


def bits(key: int, counter: U64) -> U64:
    """The top 52 bits of the hash for each counter, same shape, uint64."""
    z = counter + np.uint64(key)
    scratch = z >> np.uint64(30)
    z ^= scratch
    z *= np.uint64(MIX_1)
    np.right_shift(z, np.uint64(27), out=scratch)
    z ^= scratch
    z *= np.uint64(MIX_2)
    np.right_shift(z, np.uint64(31), out=scratch)
    z ^= scratch
    z >>= np.uint64(12)
    return z


def uniform(hash_bits: int) -> float:
    """The uniform number in (0, 1) that belongs to 52 bits; exact."""
    return (hash_bits + 0.5) * STEP


def exponential(hash_bits: int) -> float:
    """-log of a uniform number: the arrival time of a Poisson process of rate one."""
    return -math.log1p(-uniform(hash_bits))


def gumbel(hash_bits: int) -> float:
    """Standard Gumbel noise, fp64, by the C library's log: the same bits whatever stands beside the token."""
    return -math.log(exponential(hash_bits))
