"""What the kernel tests share: kernels by thread count, weights of every type with their exact values, byte comparison."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

import engine.native
from engine.compute.kv import by_position
from engine.native.build import SOURCES
from engine.native.kernels import HeadLayout, Kernels
from engine.native.library import Library, Packed
from engine.native.runner import library

F64 = npt.NDArray[np.float64]


@functools.cache
def kernels(threads: int = 1) -> Kernels:
    return kernels_of(library(), threads)


@functools.cache
def kernels_of(library: Library, threads: int) -> Kernels:
    return Kernels(library.pool(threads))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@functools.cache
def weight(kind: str, n: int, k: int, seed: int = 0, of: Library | None = None) -> tuple[Packed, F64]:
    """A packed weight [n, k] and its exact values, dequantised by the gguf package."""
    values = numbers(seed, n, k).numpy()
    raw, exact = values, values
    if kind != "F32":
        raw = np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[kind]))
        exact = quants.dequantize(raw, GGMLQuantizationType[kind])
    rows = torch.from_numpy(raw.view(np.uint8).reshape(n, -1).copy())
    return (of or library()).pack(kind, rows, k), exact.astype(np.float64)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal bit patterns: NaN equals itself, and 0.0 is not -0.0."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def changed_source(folder: Path, file: str, *changes: tuple[str, str]) -> Path:
    """A copy of the sources under ``folder`` with texts of one file replaced; each must occur once."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        text = (Path(engine.native.__file__).parent / name).read_text(encoding="utf-8")
        for old, new in changes if name == file else ():
            assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
            text = text.replace(old, new)
        (source / name).write_text(text, encoding="utf-8")
    return source


class Cache:
    """One layer of a pool, filled with the keys and values of some requests; every other cell is ``poison``."""

    def __init__(self, layout: HeadLayout, dtype: torch.dtype = torch.float32, poison: float = float("nan")) -> None:
        self.layout = layout
        self.pool = torch.full(pool_shape(layout), poison, dtype=dtype)
        self.parts = parts_of(self.pool, layout)

    def write(self, table: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """``keys`` and ``values`` [positions, kv_heads, dim]."""
        size = self.layout.block_size
        for position in range(len(keys)):
            for part, rows in zip(self.parts, (keys, values), strict=True):
                part[table[position // size], :, position % size] = rows[position]


def pool_shape(layout: HeadLayout) -> tuple[int, ...]:
    return 2, layout.blocks, layout.kv_heads, layout.block_size * layout.dim


def parts_of(pool: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer of a pool, [blocks, kv_heads, block_size, dim]."""
    return by_position(pool, layout.block_size, turned=True)


def attention_in_fp64(q: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None) -> F64:
    """[heads, dim] for one query ``q`` [heads, dim] at ``position``."""
    low = 0 if window is None else max(0, position - window + 1)
    group = q.shape[0] // keys.shape[1]
    seen = slice(low, position + 1)
    k = keys[seen].double().numpy().repeat(group, axis=1)
    v = values[seen].double().numpy().repeat(group, axis=1)
    scores = np.einsum("hd,jhd->hj", q.double().numpy(), k) * q.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    out: F64 = np.einsum("hj,jhd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    return out
