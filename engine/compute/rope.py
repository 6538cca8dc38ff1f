"""Rotary embeddings: the cos and sin of every position, computed once, in fp32 as Hugging Face's models do.

Frequencies: RoPE (Su et al. 2021), linear position interpolation (Chen et al. 2023), Llama 3.1's scaling by wavelength,
YaRN (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch

from engine.loading.model import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each fp32 [length, head_dim], for halves rotated as ``x * cos + (-x2, x1) * sin``.

    The sign of the rotation is folded into the first half of sin. Raises ``ValueError`` for an unknown scaling kind.
    """
    frequencies, attention_factor = inverse_frequencies(config)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Radians per position, fp32 [head_dim / 2], and the factor by which cos and sin are multiplied."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "linear":
        return inverse / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling, config), 1.0
    if scaling.kind == "yarn":
        return _yarn(scaling, config), _yarn_attention_factor(scaling)
    raise ValueError(f"rope scaling is {scaling.kind!r}, but must be one of linear, llama3, yarn")


def _original_length(scaling: RopeScaling, config: ModelConfig) -> int:
    return scaling.original_max_position_embeddings or config.max_position_embeddings


def _llama3(inverse: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    original = _original_length(scaling, config)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inverse
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * inverse / scaling.factor + share * inverse
    scaled = torch.where(wavelength > original / low, inverse / scaling.factor, between)
    return torch.where(wavelength < original / high, inverse, scaled)


def _yarn(scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated, with a ramp between."""
    dim, base, original = config.head_dim, config.rope_theta, _original_length(scaling, config)

    def dimension_turning(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)
