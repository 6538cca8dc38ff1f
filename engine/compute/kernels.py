"""The row-wise kernels, in torch: each writes into buffers that it is handed and allocates nothing that outlives the
call.

What a row gets must not depend on its neighbours, to the bit. Vectorised loops treat the tail of an array differently
from its body, and torch fuses multiply and add in one and not in the other (its silu and sigmoid differ there), so only
operations with one correct result are used: add, subtract, multiply, divide, square root. Besides them exp, the sum
over the last dimension and matrix products occur; those are measured at start (probe.py).
"""

from __future__ import annotations

import torch
from torch import Tensor


def copy(src: Tensor, out: Tensor) -> None:
    out.copy_(src)


def add(x: Tensor, y: Tensor) -> None:
    """x += y."""
    x.add_(y)


def rms_norm(weight: Tensor, eps: float, x: Tensor, wide: Tensor, square: Tensor, scale: Tensor, out: Tensor) -> None:
    """out = x / sqrt(mean(x ** 2) + eps) * weight over the last dimension, in fp32.

    ``wide`` and ``square`` are fp32 scratch of x's shape, ``scale`` the same with a last dimension of 1. ``wide`` may
    be x itself when x is fp32; x and out may be one tensor.
    """
    if wide is not x:
        wide.copy_(x)
    torch.mul(wide, wide, out=square)
    torch.sum(square, -1, keepdim=True, out=scale)
    scale.div_(x.shape[-1]).add_(eps).sqrt_()
    torch.div(wide, scale, out=square)
    torch.mul(square, weight, out=out)


def rotate(
    x: Tensor, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, turned: tuple[Tensor, Tensor, Tensor]
) -> None:
    """x [n, heads, d] is rotated in place by cos and sin [n, 1, d]; ``first`` and ``second`` are its halves.

    ``turned`` is scratch of x's shape with its two halves.
    """
    half = first.shape[-1]
    both, turned_first, turned_second = turned
    torch.mul(second, sin[..., :half], out=turned_first)
    torch.mul(first, sin[..., half:], out=turned_second)
    x.mul_(cos)
    x.add_(both)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """out = gate / (1 + exp(-gate)) * up; torch's own silu gives other bits in the tail of an array."""
    torch.neg(gate, out=out)
    out.exp_()
    out.add_(1.0)
    torch.div(gate, out, out=out)
    out.mul_(up)


def select_rows(matrix: Tensor, rows: Tensor, out: Tensor) -> None:
    """out [n, d] = matrix[rows]: embeddings, cache rows, the rows that sample."""
    torch.index_select(matrix, 0, rows, out=out)


def write_rows(cache: Tensor, rows: Tensor, values: Tensor) -> None:
    """cache[rows[i, j]] = values[i, j] for cache [m, d], rows [n, k], values [n, k, d]; rows distinct but for trash."""
    cache.index_put_((rows,), values)


def add_offsets(base: Tensor, offsets: Tensor, out: Tensor) -> None:
    """out = base + offsets, broadcast, int64."""
    torch.add(base, offsets, out=out)


# Attention (attention.py says what it computes) ---------------------------------------------------------------------


def context_rows(
    where: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    layout: tuple[int, int, Tensor],
    base: Tensor,
    outside: Tensor,
    by_tile: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The cache row of every lane of every request; lanes beyond the last position lead to a row of zeros.

    ``where``: tables [R, W], last positions [R, 1], lanes [L], block and offset of each lane [L]. ``layout``: cache
    rows per block, the zero row, offsets of keys and values by head. ``base`` int64 and ``outside`` bool, both [R, L],
    are written on the way; ``by_tile``: both of them seen tile by tile, and the output [2, nt, R, kv_heads, TILE].
    """
    tables, last, lanes, block_of, offset_of = where
    rows_per_block, zero_row, offsets = layout
    slots, hidden, out = by_tile
    torch.index_select(tables, 1, block_of, out=base)
    base.mul_(rows_per_block).add_(offset_of)
    torch.gt(lanes, last, out=outside)
    torch.add(slots, offsets, out=out)
    out.masked_fill_(hidden, zero_row)


def mask_future(lanes: Tensor, queries: Tensor, out: Tensor) -> None:
    """out [q, L] = lanes [L] > queries [q, 1]."""
    torch.gt(lanes, queries, out=out)


def mask_past_window(lanes: Tensor, queries: Tensor, window: int, hidden: Tensor, floor: Tensor, out: Tensor) -> None:
    """out [q, L] = hidden or lanes <= queries - window; a window of w sees the query itself and w - 1 before it."""
    torch.sub(queries, window, out=floor)
    torch.le(lanes, floor, out=out)
    out.logical_or_(hidden)


def scale(x: Tensor, factor: float, out: Tensor) -> None:
    """out = x * factor, broadcast."""
    torch.mul(x, factor, out=out)


def batched_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out [i, m, n] = a [i, m, k] @ b [i, k, n]."""
    torch.bmm(a, b, out=out)


def softmax_weights(
    scores: Tensor, over: tuple[int, int], masked: tuple[tuple[Tensor, Tensor], ...], peak: Tensor, sums: Tensor
) -> None:
    """scores become exp(scores - peak), 0 where hidden; peak is their maximum over dimensions ``over``; sums are by
    tile.

    ``masked``: views of ``scores`` with the masks that hide parts of them.
    """
    for view, hidden in masked:
        view.masked_fill_(hidden, -torch.inf)
    torch.amax(scores, over, keepdim=True, out=peak)
    scores.sub_(peak).exp_()
    torch.sum(scores, -1, out=sums)


def add_tiles(parts: tuple[Tensor, ...], out: Tensor) -> None:
    """out = 0 + parts[0] + parts[1] + ... in this order. From +0, since later zeros would turn a -0 into +0."""
    out.zero_()
    for part in parts:
        out.add_(part)


def divide(x: Tensor, y: Tensor, out: Tensor) -> None:
    """out = x / y, broadcast."""
    torch.div(x, y, out=out)
