"""How far each native kernel is from fp64, by weight type: the largest error over the kernel's own scale.

    python ci/native_errors.py [--json]

A linear layer is measured in half-units (2^-24) of the sum of magnitudes that it adds up, so 1 is one rounding of the whole
sum; with 8-bit activations against the product of the rounded activations, and against the unrounded ones. Attention,
rotation and norm: absolute, of outputs of the order of 1. Exit status 1 when one is above its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.compute.kv import by_position
from engine.compute.rope import rope_tables
from engine.loading.synthetic import synthetic_config
from engine.native.kernels import HeadLayout, Kernels
from engine.native.library import INTEGER, TYPES, Packed
from engine.native.runner import library

K, N, ROWS, UNIT = 1536, 96, 24, 2.0**-24
EPS = 1e-5
F64 = npt.NDArray[np.float64]


@attrs.frozen
class Error:
    """``bound``: what it must stay below; derived in tests/native, not fitted."""

    kernel: str
    type: str
    error: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.error < self.bound


def draw(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def stored(kind: str) -> tuple[Tensor, F64]:
    """A weight [N, K] as rows of the file's type, and its exact values."""
    from gguf import GGMLQuantizationType, quants

    values = draw(0, N, K).numpy()
    raw = values if kind == "F32" else np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[kind]))
    exact = values if kind == "F32" else quants.dequantize(raw, GGMLQuantizationType[kind])
    return torch.from_numpy(raw.view(np.uint8).reshape(N, -1).copy()), exact.astype(np.float64)


def linear_errors(kernels: Kernels) -> Iterator[Error]:
    x = draw(1, ROWS, K)
    for kind in TYPES:
        rows, exact = stored(kind)
        out = torch.empty(ROWS, N)
        kernels.linear(library().pack(kind, rows, K), None, x, out)
        yield Error("linear", kind, _relative(out, x, exact), 4 * K**0.5, "half-units")
    for kind, packed in INTEGER.items():
        rows, exact = stored(kind)
        out, rounded = _integer(kernels, library().pack(packed, rows, K), x)
        yield Error("linear, rounded activations", packed, _relative(out, rounded, exact), 16, "half-units")
        off = np.abs(out.double().numpy() - x.double().numpy() @ exact.T).max() / (np.linalg.norm(exact, axis=1).max())
        yield Error("linear, unrounded activations", packed, float(off), 0.05, "of |w|")


def _integer(kernels: Kernels, weight: Packed, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and the activations that it saw."""
    q, scales, out = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), K // 16), torch.empty(len(x), N)
    kernels.quantise(x, q, scales)
    kernels.multiply(weight, None, q, scales, out)
    steps = scales.reshape(len(x), -1, 2)[..., 0].double().repeat_interleave(32, dim=1)
    return out, q.double() * steps


def _relative(out: Tensor, x: Tensor, exact: F64) -> float:
    values = x.double().numpy()
    size = np.abs(values) @ np.abs(exact).T
    return float((np.abs(out.double().numpy() - values @ exact.T) / size).max() / UNIT)


def row_errors(kernels: Kernels) -> Iterator[Error]:
    x, weight, out = draw(2, ROWS, 576), draw(3, 576), torch.empty(ROWS, 576)
    kernels.norm(weight, EPS, x, None, None, out)
    values = x.double().numpy()
    wanted = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS) * weight.double().numpy()
    yield Error("norm", "F32", _most(out, wanted), 4e-6, "absolute")
    gate_up, half = draw(4, ROWS, 2 * 576) * 4, torch.empty(ROWS, 576)
    kernels.silu_mul(gate_up, half)
    gate, up = np.split(gate_up.double().numpy(), 2, axis=1)
    yield Error("silu * mul", "F32", _most(half, gate / (1 + np.exp(-gate)) * up), 2e-5, "absolute")


def cache_errors(kernels: Kernels) -> Iterator[Error]:
    heads, kv_heads, dim, size, length = 9, 3, 64, 16, 300
    layout = HeadLayout(heads, kv_heads, dim, size, -(-length // size))
    tables = rope_tables(synthetic_config(head_dim=dim), length)
    where = torch.arange(length)
    for kind, name, bound in (
        (torch.float32, "F32", 2e-6),
        (torch.bfloat16, "BF16", 2.0**-6),
        (torch.float16, "F16", 2.0**-9),
    ):
        cache = torch.full((2, layout.blocks, kv_heads, size * dim), float("nan"), dtype=kind)
        qkv = draw(5, length, layout.width)
        given = qkv.double().reshape(length, -1, dim)
        slots = where // size * kv_heads * size + where % size
        kernels.rotate(layout, qkv, (where, slots), tables, None, cache)
        turned = _turned(given[:, : heads + kv_heads], tables)
        keys, values = (
            part.transpose(1, 2).reshape(-1, kv_heads, dim)[:length].double()
            for part in by_position(cache, size, turned=True)
        )
        yield Error(
            "rotate, q", name, _most(qkv[:, : heads * dim], turned[:, :heads].reshape(length, -1)), 2e-6, "absolute"
        )
        yield Error(
            "rotate, K in the cache", name, float(np.abs(keys.numpy() - turned[:, heads:]).max()), bound, "absolute"
        )
        out = torch.empty(length, heads * dim)
        table = torch.arange(layout.blocks)[None]
        kernels.attend(layout, qkv, where, table, cache, None, out)
        q = qkv[:, : heads * dim].reshape(length, heads, dim).double().numpy()
        yield Error(
            "attention, of what is cached",
            name,
            _most(out, _attention(q, keys.numpy(), values.numpy())),
            3e-6,
            "absolute",
        )


def _turned(x: Tensor, tables: tuple[Tensor, Tensor]) -> F64:
    cos, sin = (table[: len(x)].double().numpy()[:, None] for table in tables)
    first, second = np.split(x.numpy(), 2, axis=-1)
    turned: F64 = x.numpy() * cos + np.concatenate([second, first], -1) * sin
    return turned


def _attention(q: F64, keys: F64, values: F64) -> F64:
    """Causal, [length, heads * dim]."""
    length, heads, dim = q.shape
    k, v = (part.repeat(heads // part.shape[1], axis=1) for part in (keys, values))
    scores = np.einsum("ihd,jhd->hij", q, k) * dim**-0.5
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: F64 = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v).reshape(length, -1)
    return out


def _most(out: Tensor, wanted: F64) -> float:
    return float(np.abs(out.double().numpy() - wanted).max())


GROUPS: tuple[Callable[[Kernels], Iterator[Error]], ...] = (linear_errors, row_errors, cache_errors)


def errors(kernels: Kernels | None = None) -> list[Error]:
    """Every kernel that computes. ``kernels``: by default those of this machine on one thread."""
    on = kernels or Kernels(library().pool(1))
    return [found for group in GROUPS for found in group(on)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    found = errors()
    if asked.json:
        print(json.dumps([attrs.asdict(one) for one in found], indent=1))
    else:
        print("| kernel | type | largest error | bound | in |\n|---|---|---|---|---|")
        for one in found:
            print(f"| {one.kernel} | {one.type} | {one.error:.3g} | {one.bound:.3g} | {one.unit} |")
    return 0 if all(one.holds for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
