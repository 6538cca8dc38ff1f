"""What may be passed to a device program: shapes and types are checked here, grids and launch options chosen.

Each method writes into buffers that it is handed and allocates nothing, so that a step can be captured. The same calls run on a
GPU and, in Triton's interpreter, on a CPU; that is settled when Triton is first imported (``triton_device``).
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.compute.tiles import TILE

SPLIT = 4 * TILE  # positions that one program of a decode step reads
NO_WINDOW = 2**30
_OPTIONS = {
    "num_warps": 4,
    "enable_fp_fusion": False,
}  # a * b + c is rounded twice in every kernel, so nowhere differently
_WIDTHS = (torch.float32, torch.float16, torch.bfloat16)


class NoTriton(RuntimeError):
    """Triton's kernels cannot run on this device; the message says why and what to do."""


def has_triton() -> bool:
    return find_spec("triton") is not None


def triton_device(device: torch.device) -> Any:
    """The device programs, for ``device``. On a CPU they are interpreted, which Triton decides once per process.

    Raises ``NoTriton`` without Triton, and where the process has settled on the other kind already.
    """
    if not has_triton():
        raise NoTriton("Triton is not installed: pip install 'lockstep-engine[cuda]'")
    if device.type == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    interpreted = bool(triton.knobs.runtime.interpret)
    if interpreted != (device.type == "cpu"):
        kind = "interpreted" if interpreted else "compiled"
        raise NoTriton(
            f"Triton's kernels are {kind} in this process, so they cannot run on {device.type}: "
            "TRITON_INTERPRET must be 1 for a CPU and unset for a GPU before Triton is imported"
        )
    from engine.cuda import programs

    return programs


def power_of_two(n: int) -> int:
    """The smallest power of two that holds ``n``."""
    return 1 << (n - 1).bit_length()


@attrs.frozen
class Layout:
    """How a row of q, k and v splits into heads, and how the pool is cut into blocks."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int

    @property
    def width(self) -> int:
        """Numbers in a row of q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.dim


class Kernels:
    """Kernels for one layout on one device. ``split`` is a multiple of TILE; it belongs to the meaning of the result."""

    def __init__(self, layout: Layout, device: torch.device, *, split: int = SPLIT) -> None:
        if split < TILE or split % TILE:
            raise ValueError(f"split is {split} positions, but must be a multiple of {TILE}")
        self._programs = triton_device(device)
        self.layout, self.split = layout, split
        group = layout.heads // layout.kv_heads
        self._wide = device.type == "cpu"
        self._group_pad = power_of_two(group)
        self._heads: dict[str, Any] = {
            "QKV": layout.width,
            "HEADS": layout.heads,
            "GROUP": group,
            "SCALE": layout.dim**-0.5,
            "DIM": layout.dim,
            "DIM_PAD": max(16, power_of_two(layout.dim)),
            "KV_HEADS": layout.kv_heads,
            "BLOCK_SIZE": layout.block_size,
            "ROWS": max(16, self._group_pad),  # a matrix unit's smallest tile
            "TILE": TILE,
            "SPLIT": split,
            "WIDE": self._wide,
        }

    def splits(self, positions: int) -> int:
        """Splits that hold positions ``0 .. positions - 1``."""
        return max(1, -(-positions // self.split))

    def attend_decode(
        self,
        qkv: Tensor,
        cache: Tensor,
        tables: Tensor,
        positions: Tensor,
        window: int | None,
        scratch: tuple[Tensor, Tensor],
        out: Tensor,
    ) -> None:
        """One query a row: qkv [R, width], cache [2, blocks, kv_heads, block_size, dim], tables int64 [R, W].

        ``scratch`` fp32: [R, heads, splits, dim] and [R, heads, splits, 2]. ``out`` [R, heads * dim].
        """
        partial, stats = scratch
        rows, heads, splits, _ = partial.shape
        self._check(qkv, cache, out, rows)
        _must(tables.stride(1) == 1 and tables.shape[0] == rows, "tables", tables)
        _must(stats.shape == (rows, heads, splits, 2), "stats", stats)
        _must(self.splits(tables.shape[1] * self.layout.block_size) <= splits, "partial", partial)
        self._programs.attend_decode[rows, self.layout.kv_heads, splits](
            qkv, cache[0], cache[1], tables, positions, partial, stats, tables.stride(0), splits, window or NO_WINDOW,
            **self._heads, **_OPTIONS,
        )  # fmt: skip
        chosen = {name: self._heads[name] for name in ("HEADS", "DIM", "DIM_PAD", "SPLIT")}
        self._programs.merge_splits[rows, heads](partial, stats, positions, out, splits, **chosen, **_OPTIONS)

    def attend_prefill(
        self,
        qkv: Tensor,
        cache: Tensor,
        table: Tensor,
        span: tuple[int, int, int],
        window: int | None,
        out: Tensor,
    ) -> None:
        """A run of positions of one request; ``span`` is its first token in the batch, how many, and the first position."""
        first, count, start = span
        self._check(qkv, cache, out, len(qkv))
        _must(first + count <= len(qkv), "qkv", qkv)
        _must(start + count <= table.shape[-1] * self.layout.block_size, "table", table)
        queries = self._heads["ROWS"] // self._group_pad
        self._programs.attend_prefill[-(-count // queries), self.layout.kv_heads](
            qkv, cache[0], cache[1], table, out, first, count, start, window or NO_WINDOW,
            GROUP_PAD=self._group_pad, **self._heads, **_OPTIONS,
        )  # fmt: skip

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [rows, n] = x [rows, k] @ weight [n, k].T + bias, in one order of summation for any number of rows."""
        (rows, k), n = x.shape, len(weight)
        _must(weight.shape == (n, k) and weight.is_contiguous() and weight.dtype == x.dtype, "weight", weight)
        _must(x.is_contiguous() and out.is_contiguous() and out.shape == (rows, n), "out", out)
        tile_m, tile_n, tile_k = (16, 64, 64) if x.dtype == torch.float32 else (64, 64, 64)
        self._programs.linear[-(-rows // tile_m), -(-n // tile_n)](
            x, weight, x if bias is None else bias, out, rows,
            N=n, K=k, BIASED=bias is not None, TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, WIDE=self._wide, **_OPTIONS,
        )  # fmt: skip

    def norm(
        self, weight: Tensor, eps: float, x: Tensor, delta: Tensor | None, chosen: Tensor | None, out: Tensor
    ) -> None:
        """x += delta, then out = rms_norm(x) * weight; of the rows ``chosen`` int64 only, where given (x then stays)."""
        size = x.shape[1]
        _must(x.is_contiguous() and (delta is None or delta.shape == x.shape), "x", x)
        _must(out.shape == (len(x) if chosen is None else len(chosen), size) and out.is_contiguous(), "out", out)
        self._programs.norm[(len(out),)](
            x, x if delta is None else delta, weight, x if chosen is None else chosen, out,
            SIZE=size, PAD=power_of_two(size), EPS=eps, ADDS=delta is not None, CHOOSES=chosen is not None, **_OPTIONS,
        )  # fmt: skip

    def rotate(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Tensor, float] | None,
        cache: Tensor,
    ) -> None:
        """q in place, k and v into the cache rows of ``slots``. ``norms``: weights [2, dim] of q and k, and eps."""
        layout = self.layout
        self._check(qkv, cache, qkv, len(qkv))
        weights, eps = norms or (qkv, 0.0)
        self._programs.rotate[(len(qkv),)](
            qkv, positions, slots, *rope, weights, cache[0], cache[1],
            HEADS=layout.heads, KV_HEADS=layout.kv_heads, HEADS_PAD=power_of_two(layout.heads + 2 * layout.kv_heads),
            DIM=layout.dim, HALF_PAD=power_of_two(layout.dim // 2), BLOCK_SIZE=layout.block_size,
            NORMS=norms is not None, EPS=eps, **_OPTIONS,
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [n, m] = silu(gate) * up for gate_up [n, 2 m]."""
        rows, size = out.shape
        _must(gate_up.shape == (rows, 2 * size) and gate_up.is_contiguous() and out.is_contiguous(), "gate_up", gate_up)
        block = min(1024, power_of_two(size))
        self._programs.silu_mul[rows, -(-size // block)](gate_up, out, SIZE=size, BLOCK=block, **_OPTIONS)

    def _check(self, qkv: Tensor, cache: Tensor, out: Tensor, rows: int) -> None:
        layout = self.layout
        _must(qkv.shape == (rows, layout.width) and qkv.is_contiguous() and qkv.dtype in _WIDTHS, "qkv", qkv)
        _must(out.is_contiguous() and len(out) == rows, "out", out)
        fits = cache.shape[2:] == (layout.kv_heads, layout.block_size, layout.dim) and cache.dtype == qkv.dtype
        _must(fits and cache.is_contiguous(), "cache", cache)


def _must(holds: bool, name: str, tensor: Tensor) -> None:
    if not holds:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, which does not fit the other arguments")
