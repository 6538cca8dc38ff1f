"""What may be passed to a native kernel. Every shape, type, device and stride is checked before an address leaves Python.

A call becomes a record of 32 eight-byte words: the kernel's number and its arguments in the order of the C struct. Run at
once or appended to a tape, it is the same record. Values behind addresses are live, so they are checked not here but by
the kernels, whenever they run: token ids, chosen rows, positions, slots and block tables. Where one leads out of its table
or of the pool, or positions descend that share a unit of ``attend``, the rows of that call or unit become NaN, and nothing is
read or written through it. ``draw`` stays inside of its logits whatever wishes and peaks hold.

Trusted, not checked: that memory stays alive and as large as it was, that outputs overlap no input but where a kernel says
so, that nobody changes values while a call runs, and that ``weights`` of ``draw`` hold what they should.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.compute.tiles import tiles_for
from engine.native.library import INTEGER, RECORD, TYPES, Packed, Pool, Records

_MARK = 0x4C6F636B00000000  # in the number of every kernel: memory that was given back holds nothing like it
LANES = 16  # outputs of a panel
GROUP = 32  # numbers that share a scale
_INTEGER = tuple(INTEGER.values())
MAX_HEAD_DIM = 256
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of a pool: attention.h knows them by number
WISH = 48  # bytes that say how a row is drawn: seed, temperature, top_p, min_p, top_k, position
NUM_WEIGHTS = 2586  # of the table that sampling.h reads
MAX_COUNT = 2**31  # rows, columns, positions: products of two stay far below 2**63


class BadCall(ValueError):
    """Arguments that a kernel must not see; the message names the argument, what it was and what is allowed."""


@attrs.frozen(eq=False)
class HeadLayout:
    """How a row of q, k and v splits into heads, and where the pool's cache rows lie (engine/compute/kv.py)."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    blocks: int

    def __attrs_post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise BadCall(f"{self.heads} heads over {self.kv_heads} K/V heads: must be a positive multiple")
        if self.dim < 2 or self.dim % 2 or self.dim > MAX_HEAD_DIM:
            raise BadCall(f"head_dim is {self.dim}, but must be even and in 2..{MAX_HEAD_DIM}")
        if not 1 <= self.block_size < MAX_COUNT or not 1 <= self.blocks < MAX_COUNT:
            raise BadCall(f"{self.blocks} blocks of {self.block_size} positions: both must be in 1..{MAX_COUNT}")

    @property
    def value_offset(self) -> int:
        return self.blocks * self.kv_heads * self.block_size

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


@attrs.frozen(eq=False)
class Kernel:
    """One kernel of a pool: called, it runs; given to a tape, it is recorded."""

    name: str
    encode: Callable[..., bytes]
    pool: Pool

    def __call__(self, *arguments: Any) -> None:
        self.pool.run(Records.of(self.encode(*arguments)))


class Kernels:
    """All kernels over one pool of threads."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.embed = Kernel("embed", _reading(pool, _embed), pool)
        self.norm = Kernel("norm", _norm, pool)
        self.linear = Kernel("linear", _reading(pool, _linear), pool)
        self.rotate = Kernel("rotate", _rotate, pool)
        self.attend = Kernel("attend", _attend, pool)
        self.silu_mul = Kernel("silu_mul", _silu_mul, pool)
        self.quantise = Kernel("quantise", _quantise, pool)
        self.multiply = Kernel("multiply", _reading(pool, _multiply), pool)
        self.head = Kernel("head", _reading(pool, _head), pool)
        self.draw = Kernel("draw", _draw, pool)


# Records: the order of words is that of the structs in kernels.cpp and attention.h ----------------------------------


def _record(kind: int, layout: str, *words: Any) -> bytes:
    return struct.pack(f"<q{layout}", _MARK + kind, *words).ljust(RECORD, b"\0")


def _embed(weight: Packed, tokens: Tensor, out: Tensor) -> bytes:
    """out [n, k] = rows ``tokens`` of ``weight``; the row of an id outside it is NaN."""
    count = _vector("tokens", tokens, torch.int64)
    _matrix("out", out, (count, weight.k), dense=True)
    return _record(
        0,
        "QQqqqqQ",
        tokens.data_ptr(),
        weight.data.data_ptr(),
        _type_of(weight),
        count,
        weight.n,
        weight.k,
        out.data_ptr(),
    )


def _norm(weight: Tensor, eps: float, x: Tensor, delta: Tensor | None, chosen: Tensor | None, out: Tensor) -> bytes:
    """x += delta, then out = RMSNorm(x) * weight. With ``chosen``, of those rows only, and x stays as it was."""
    size = _vector("weight", weight, torch.float32)
    limit = _matrix("x", x, (None, size), dense=True)
    rows = limit if chosen is None else _vector("chosen", chosen, torch.int64)
    if delta is not None:
        _matrix("delta", delta, (limit, size), dense=True)
    _matrix("out", out, (rows, size), dense=True)
    if not 0 <= eps < 1:
        raise BadCall(f"eps is {eps}, but must be in [0, 1)")
    addresses = (x.data_ptr(), _address(delta), weight.data_ptr(), _address(chosen), out.data_ptr())
    return _record(1, "QQQQQqqqd", *addresses, rows, size, limit, eps)


def _linear(weight: Packed, bias: Tensor | None, x: Tensor, out: Tensor) -> bytes:
    """out [n, weight.n] = x [n, weight.k] times the weight's rows, plus bias; rows of x and out may lie apart."""
    return _record(2, _LINEAR, *_linear_words(weight, bias, x, out))


_LINEAR = "QqqQqqQQqq"


def _linear_words(weight: Packed, bias: Tensor | None, x: Tensor, out: Tensor) -> tuple[int, ...]:
    rows = _matrix("x", x, (None, weight.k))
    _matrix("out", out, (rows, weight.n))
    if bias is not None and _vector("bias", bias, torch.float32) != weight.n:
        raise BadCall(f"bias has {len(bias)} numbers, but the weight {weight.n} rows")
    return (
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.data.data_ptr(),
        weight.n,
        weight.k,
        _address(bias),
        out.data_ptr(),
        out.stride(0),
        _type_of(weight),
    )


def _rotate(
    layout: HeadLayout,
    qkv: Tensor,
    where: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    cache: Tensor,
) -> bytes:
    """q is rotated in place; k, rotated, and v go to ``cache``, one layer of the pool. Norms of heads come first.

    ``where``: positions and slots, int64 [n]; ``tables``: cos and sin [length, dim]; ``norms``: of q, of k [dim], eps.
    """
    positions, slots = where
    tokens = _matrix("qkv", qkv, (None, layout.width))
    for name, vector in (("positions", positions), ("slots", slots)):
        if _vector(name, vector, torch.int64) != tokens:
            raise BadCall(f"{name} has {len(vector)} entries, but qkv {tokens} rows")
    length = _matrix("cos", tables[0], (None, layout.dim), dense=True)
    _matrix("sin", tables[1], (length, layout.dim), dense=True)
    for weight in () if norms is None else norms[:2]:
        if _vector("norm weight", weight, torch.float32) != layout.dim:
            raise BadCall(f"norm weight has {len(weight)} numbers, but head_dim is {layout.dim}")
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    _cache(layout, cache)
    addresses = (qkv, positions, slots, *tables, q_norm, k_norm, cache)
    return _record(
        3,
        "QQQQQQQQqqqqqqqqqqd",
        *map(_address, addresses),
        tokens,
        qkv.stride(0),
        length,
        layout.heads,
        layout.kv_heads,
        layout.dim,
        layout.block_size,
        layout.value_offset,
        2 * layout.value_offset,
        KV_TYPES[cache.dtype],
        eps,
    )


def _attend(
    layout: HeadLayout,
    q: Tensor,
    positions: Tensor,
    tables: Tensor,
    cache: Tensor,
    window: int | None,
    out: Tensor,
    split: tuple[Tensor, int] | None = None,
) -> bytes:
    """out [n, heads * dim] = attention of the queries, the first columns of ``q`` [n, >= heads * dim].

    ``tables`` int64 [n, width]: one row for each query; or [1, width]: queries of one request at ascending positions.
    ``split``: scratch [n, heads, tiles, 2 + dim rounded up to 16] and into how many units the tiles of a row are spread;
    more units than tiles would have nothing to do, so there are at most as many.
    """
    count = _vector("positions", positions, torch.int64)
    _matrix("q", q, (count, None))
    if q.shape[1] < layout.heads * layout.dim:
        raise BadCall(f"q has {q.shape[1]} columns, but {layout.heads} heads of {layout.dim} need more")
    _matrix("out", out, (count, layout.heads * layout.dim))
    rows = _matrix("tables", tables, (None, None), dtype=torch.int64)
    if rows not in (1, count):
        raise BadCall(f"tables has {rows} rows, but must have 1 or {count}")
    if window is not None and not 1 <= window < MAX_COUNT:
        raise BadCall(f"window is {window}, but must be in 1..{MAX_COUNT} or absent")
    _cache(layout, cache)
    partials, segments, tiles = _split(layout, count, rows, tables.shape[1], split)
    return _record(
        4,
        "QQQQQqqqqqqqqqqqqqQqqd",
        *map(_address, (q, out, positions, tables, cache)),
        count,
        q.stride(0),
        out.stride(0),
        tables.stride(0) if rows == count and count > 1 else 0,
        tables.shape[1],
        layout.blocks,
        layout.value_offset,
        layout.heads,
        layout.kv_heads,
        layout.dim,
        layout.block_size,
        window or 0,
        KV_TYPES[cache.dtype],
        _address(partials),
        segments,
        tiles,
        layout.dim**-0.5,
    )


def _silu_mul(gate_up: Tensor, out: Tensor) -> bytes:
    """out [n, m] = silu(gate) * up for ``gate_up`` [n, 2 m], the gate's columns first."""
    rows = _matrix("out", out, (None, None), dense=True)
    _matrix("gate_up", gate_up, (rows, 2 * out.shape[1]), dense=True)
    return _record(5, "QQqq", gate_up.data_ptr(), out.data_ptr(), rows, out.shape[1])


def _head(weight: Packed, x: Tensor, out: Tensor, peaks: Tensor) -> bytes:
    """A linear layer without bias; ``peaks`` [n, panels] are the largest of each 16 columns of ``out``, NaN where one of
    them is not finite."""
    words = _linear_words(weight, None, x, out)
    _matrix("peaks", peaks, (len(out), panels_of(weight.n)), dense=True)
    return _record(6, _LINEAR + "Q", *words, peaks.data_ptr())


def _draw(logits: Tensor, peaks: Tensor | None, wishes: Tensor, weights: Tensor, tokens: Tensor) -> bytes:
    """tokens [n] = what ``wishes`` uint8 [n, WISH] draw from ``logits`` [n, vocab] (engine/native/sampling.h).

    ``peaks`` are the head's, of these very logits; ``weights`` float64 is ``sampling_choice.WEIGHTS``.
    """
    rows = _matrix("logits", logits, (None, None))
    vocab = logits.shape[1]
    if peaks is not None:
        _matrix("peaks", peaks, (rows, panels_of(vocab)), dense=True)
    _matrix("wishes", wishes, (rows, WISH), dtype=torch.uint8, dense=True)
    if _vector("weights", weights, torch.float64) != NUM_WEIGHTS:
        raise BadCall(f"weights has {len(weights)} entries, but must have {NUM_WEIGHTS}")
    if _vector("tokens", tokens, torch.int64) != rows:
        raise BadCall(f"tokens has {len(tokens)} entries, but logits {rows} rows")
    addresses = (peaks, wishes, weights, tokens)
    return _record(7, "QqqqQQQQ", logits.data_ptr(), logits.stride(0), rows, vocab, *map(_address, addresses))


def panels_of(n: int) -> int:
    return -(-n // LANES)


def _quantise(x: Tensor, q: Tensor, scales: Tensor) -> bytes:
    """Rows of x [n, k] in 8 bits: q int8 [n, k], scales [n, 2 k / 32] (integer.h)."""
    rows = _matrix("x", x, (None, None))
    _quantised(q, scales, rows, x.shape[1])
    addresses = (q.data_ptr(), scales.data_ptr())
    return _record(16, "QqqqQQ", x.data_ptr(), x.stride(0), rows, x.shape[1], *addresses)


def _multiply(weight: Packed, bias: Tensor | None, q: Tensor, scales: Tensor, out: Tensor) -> bytes:
    """``linear`` on what ``quantise`` made, for a weight of one of INTEGER's types."""
    if weight.type not in _INTEGER:
        raise BadCall(f"the weight is of type {weight.type}, but must be one of {', '.join(_INTEGER)}")
    rows = _matrix("out", out, (None, weight.n))
    _quantised(q, scales, rows, weight.k)
    if bias is not None and _vector("bias", bias, torch.float32) != weight.n:
        raise BadCall(f"bias has {len(bias)} numbers, but the weight {weight.n} rows")
    return _record(
        17,
        "QQqQqqQQqq",
        q.data_ptr(),
        scales.data_ptr(),
        rows,
        weight.data.data_ptr(),
        weight.n,
        weight.k,
        _address(bias),
        out.data_ptr(),
        out.stride(0),
        16 + _INTEGER.index(weight.type),
    )


def _quantised(q: Tensor, scales: Tensor, rows: int, k: int) -> None:
    if k % GROUP:
        raise BadCall(f"k is {k}, but must be a multiple of {GROUP}")
    _matrix("q", q, (rows, k), dtype=torch.int8, dense=True)
    _matrix("scales", scales, (rows, 2 * k // GROUP), dense=True)


def _split(
    layout: HeadLayout, count: int, rows: int, width: int, split: tuple[Tensor, int] | None
) -> tuple[Tensor | None, int, int]:
    """Scratch, segments and tiles of a call to ``attend`` whose rows are spread over several units."""
    if split is None:
        return None, 1, 0
    partials, segments = split
    tiles = tiles_for(width * layout.block_size)
    shape = (count, layout.heads, tiles, 2 + -(-layout.dim // LANES) * LANES)
    if rows != count:
        raise BadCall(f"tables has {rows} rows, but a call that is split needs one for each of {count} queries")
    if not 1 <= segments < MAX_COUNT:
        raise BadCall(f"segments is {segments}, but must be in 1..{MAX_COUNT}")
    if partials.shape != shape or partials.dtype != torch.float32 or not partials.is_contiguous():
        raise BadCall(f"split is {_told(partials)}, but must be contiguous float32 of shape {shape}")
    if partials.device.type != "cpu":
        raise BadCall(f"split is {_told(partials)}, but must be on the CPU")
    return partials, min(segments, tiles), tiles


def _reading(pool: Pool, encode: Callable[..., bytes]) -> Callable[..., bytes]:
    """``encode``, whose first argument is a weight, for weights that lie as the kernels of ``pool`` read them."""

    def checked(weight: Packed, *arguments: Any) -> bytes:
        wanted = pool.layouts[weight.type]
        if weight.layout != wanted:
            raise BadCall(f"the weight {weight.type} is packed as {weight.layout!r}, but these kernels read {wanted!r}")
        return encode(weight, *arguments)

    return checked


# Checks ------------------------------------------------------------------------------------------------------------


def _type_of(weight: Packed) -> int:
    if weight.type not in TYPES:
        raise BadCall(f"the weight is of type {weight.type}, but must be one of {', '.join(TYPES)}")
    return TYPES.index(weight.type)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vector(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Length of a contiguous vector."""
    if tensor.dim() != 1 or tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise BadCall(f"{name} is {_told(tensor)}, but must be a contiguous vector of {dtype} on the CPU")
    if not 1 <= len(tensor) < MAX_COUNT:
        raise BadCall(f"{name} has {len(tensor)} entries, but must have 1..{MAX_COUNT}")
    return len(tensor)


def _matrix(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, int | None],
    *,
    dtype: torch.dtype = torch.float32,
    dense: bool = False,
) -> int:
    """Number of rows; ``dense``: rows lie without gaps."""
    if tensor.dim() != 2 or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise BadCall(f"{name} is {_told(tensor)}, but must be a matrix of {dtype} on the CPU")
    rows, columns = tensor.shape
    if shape[0] not in (None, rows) or shape[1] not in (None, columns):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise BadCall(f"{name} has shape {tuple(tensor.shape)}, but must have ({wanted})")
    if not 1 <= rows < MAX_COUNT or not 1 <= columns < MAX_COUNT:
        raise BadCall(f"{name} has shape {tuple(tensor.shape)}, but both must be in 1..{MAX_COUNT}")
    stride = tensor.stride(0) if rows > 1 else max(columns, tensor.stride(0))
    if (columns > 1 and tensor.stride(1) != 1) or stride < columns or (dense and rows > 1 and stride != columns):
        raise BadCall(f"{name} has strides {tensor.stride()}, which overlap or leave gaps that are not allowed")
    return rows


def _cache(layout: HeadLayout, cache: Tensor) -> None:
    shape = (2, layout.blocks, layout.kv_heads, layout.block_size * layout.dim)
    if cache.shape != shape or not cache.is_contiguous() or cache.device.type != "cpu":
        raise BadCall(f"the pool's layer is {_told(cache)}, but must be contiguous, of shape {shape}")
    if cache.dtype not in KV_TYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_TYPES)
        raise BadCall(f"the pool's layer is {cache.dtype}, but must be one of {allowed}")


def _told(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device.type}"
