"""Attention over the block table in absolute tiles: the same numbers are added in the same order, whoever else is
there.

For one query and one head, with the context cut into tiles of TILE positions counted from position 0:

    m       = max over all visible positions                      (exact, so its order does not matter)
    w[j]    = exp(s[j] - m), exactly 0 where j is not visible
    l, o    = sum over tiles, ascending, one after the other, of   sum_j w[j]   and   sum_j w[j] v[j]
    out     = o / l

Inside a tile the sums are one library call whose bits do not depend on the batch (probed at start); between tiles they
are plain additions. A tile without a visible position adds +0 and leaves every bit as it was, so wide, padded tables
give the result of narrow ones. Positions outside the context are read from the pool's zero block, never from stale
memory.

Grouped queries: the query heads that share a K/V head are rows of one product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

from engine.compute.arena import Arena
from engine.compute.graphs import Do
from engine.compute.kernels import (
    add_tiles,
    batched_product,
    context_rows,
    copy,
    divide,
    mask_future,
    mask_past_window,
    scale,
    select_rows,
    softmax_weights,
)
from engine.compute.kv import KVPool
from engine.compute.network import Span
from engine.compute.probe import Ladder
from engine.compute.tiles import TILE, tiles_for
from engine.loading.model import ModelConfig

AttendLayer = Callable[[Do, int, int | None], None]  # do, layer, window


class Take(Protocol):
    def __call__(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor: ...


@attrs.frozen(eq=False)
class Context:
    """What attention reads for R rows and nt tiles, shared by all layers of a step.

    ``rows`` int64 [2, nt, R, kv_heads, TILE] are cache rows of keys and values; ``lanes`` int64 [nt * TILE] the
    positions 0, 1, ...; ``hidden`` bool [queries, nt * TILE] says which of them a query must not see, by window of the
    layer; a window that no position can leave is not among them, and means no window.
    """

    tiles: int
    rows: Tensor
    hidden: dict[int | None, Tensor]


class Attention:
    """Builds the calls of attention; scratch comes from the arena, so that decode and prefill share it."""

    def __init__(self, config: ModelConfig, pool: KVPool, ladder: Ladder, arena: Arena, max_positions: int) -> None:
        device = pool.layers[0].device
        self._kv_heads, self._group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self._dim, self._scale = config.head_dim, config.head_dim**-0.5
        self._pool, self._ladder, self._arena = pool, ladder, arena
        self._windows = sorted({w for w in config.sliding_windows if w is not None and w < max_positions})
        self._lanes = torch.arange(tiles_for(max_positions) * TILE, device=device)
        heads = torch.arange(config.num_kv_heads, device=device) * pool.block_size
        self._offsets = torch.stack([heads, heads + pool.value_offset])  # [2, kv_heads], from a slot to its cache rows
        self._query_rows = ladder.rung(max(ladder.rungs[-1], self._group))

    @property
    def offsets(self) -> Tensor:
        """int64 [2, kv_heads]: what leads from a slot to the cache rows of its keys and values."""
        return self._offsets

    # Once per step -------------------------------------------------------------------------------------------------

    def context(self, do: Do, take: Take, tables: Tensor, last: Tensor, queries: Tensor, positions: int) -> Context:
        """Cache rows and masks for ``positions`` lanes (rounded up to tiles) of the requests in ``tables`` [R, W].

        ``last`` int64 [R] is each request's last position in the pool; ``queries`` int64 [q] are the positions that
        ask. ``take(name, *shape, dtype=...)`` makes the buffers: the arena's for a step that is recorded.
        """
        rows, width = tables.shape
        tiles = tiles_for(positions)
        lanes = self._lanes[: tiles * TILE]
        block_of = (lanes // self._pool.block_size).clamp_(max=width - 1)
        offset_of = lanes % self._pool.block_size
        base = take("context base", rows, tiles * TILE, dtype=torch.int64)
        outside = take("context outside", rows, tiles * TILE, dtype=torch.bool)
        cache_rows = take("context rows", 2, tiles, rows, self._kv_heads, TILE, dtype=torch.int64)
        do(
            context_rows,
            (tables, last[:, None], lanes, block_of, offset_of),
            (self._pool.kv_heads * self._pool.block_size, self._pool.zero_row, self._offsets[:, None, None, :, None]),
            base,
            outside,
            (_by_tile(base)[None, :, :, None], _by_tile(outside)[None, :, :, None], cache_rows),
        )
        hidden: dict[int | None, Tensor] = {None: outside}
        if queries is not last:
            hidden[None] = take("hidden lanes", len(queries), tiles * TILE, dtype=torch.bool)
            do(mask_future, lanes, queries[:, None], hidden[None])
        for window in self._windows:
            hidden[window] = take(f"hidden lanes {window}", len(queries), tiles * TILE, dtype=torch.bool)
            floor = take("window floor", len(queries), 1, dtype=torch.int64)
            do(mask_past_window, lanes, queries[:, None], window, hidden[None], floor, hidden[window])
        return Context(tiles, cache_rows, hidden)

    def _gather(self, do: Do, context: Context, layer: int, gathered: Tensor, wide: Tensor) -> None:
        """Keys and values of ``context`` in one copy; in fp32 too, when the pool holds another type."""
        do(select_rows, self._pool.rows[layer], context.rows.view(-1), gathered.view(-1, self._dim))
        if wide is not gathered:
            do(copy, gathered, wide)

    def _gathered(self, context: Context) -> tuple[Tensor, Tensor]:
        """Buffers [2, nt, R, kv_heads, TILE, dim]: in the pool's type, and in fp32 (which may be the same)."""
        shape = (*context.rows.shape, self._dim)
        dtype = self._pool.rows[0].dtype
        gathered = self._arena.take("gathered", *shape, dtype=dtype)
        return gathered, gathered if dtype == torch.float32 else self._arena.take("gathered wide", *shape)

    # Once per layer ------------------------------------------------------------------------------------------------

    def decode(self, context: Context, queries: Tensor, out: Tensor) -> AttendLayer:
        """One query per request: ``queries`` to ``out``, both [R, heads, dim]; all heads of all tiles at once.

        All layers use the same buffers, so their views are made here, once per step, and not by what is returned.
        """
        rows, tiles, heads, group, dim = len(queries), context.tiles, self._kv_heads, self._group, self._dim
        count, items = self._ladder.rung(group), tiles * rows * heads
        take = self._arena.take
        gathered, wide = self._gathered(context)
        keys, values = (part.view(items, TILE, dim) for part in wide)
        scaled = take("queries", tiles, rows, heads, count, dim)
        scores, sums = take("scores", tiles, rows, heads, count, TILE), take("tile sums", tiles, rows, heads, count)
        partial, peak = take("tile values", tiles, rows, heads, count, dim), take("peak", 1, rows, heads, count, 1)
        total, weight = take("total", rows, heads, count, dim), take("weight", rows, heads, count)
        by_head = queries.view(1, rows, heads, group, dim).expand(tiles, -1, -1, -1, -1)
        flat = scores.view(items, count, TILE)
        softmax = {
            window: (scores, (0, 4), ((scores, _by_tile(hidden)[:, :, None, None]),), peak, sums)
            for window, hidden in context.hidden.items()
        }
        before = (scale, by_head, self._scale, scaled[..., :group, :])
        first_product = (batched_product, scaled.view(items, count, dim), keys.transpose(1, 2), flat)
        second_product = (batched_product, flat, values, partial.view(items, count, dim))
        after = (
            (add_tiles, partial.unbind(0), total),
            (add_tiles, sums.unbind(0), weight),
            (divide, total[:, :, :group], weight[:, :, :group, None], out.view(rows, heads, group, dim)),
        )

        def attend(do: Do, layer: int, window: int | None) -> None:
            self._gather(do, context, layer, gathered, wide)
            do(*before)
            do(*first_product)
            do(softmax_weights, *softmax[window if window in softmax else None])
            do(*second_product)
            for call in after:
                do(*call)

        return attend

    def prefill(
        self, do: Do, context: Context, span: Span, layer: int, window: int | None, queries: Tensor, out: Tensor
    ) -> None:
        """Many queries of one request: ``queries`` [count, heads, dim] to ``out``, in blocks of queries."""
        gathered, wide = self._gathered(context)
        self._gather(do, context, layer, gathered, wide)
        keys, values = (part[:, 0] for part in wide)  # [nt, kv_heads, TILE, dim]
        hidden = context.hidden[window if window in context.hidden else None]
        step = max(1, self._query_rows // self._group)
        for begin in range(0, span.count, step):
            end = min(begin + step, span.count)
            tiles = tiles_for(span.start + end)  # later tiles are invisible to all of these queries
            # Tiles that every one of these queries sees whole need no mask, unless there is a window.
            seen = (span.start + begin + 1) // TILE if hidden is context.hidden[None] else 0
            masks = hidden[begin:end, seen * TILE : tiles * TILE]
            self._query_block(do, queries[begin:end], (keys[:tiles], values[:tiles]), (seen, masks), out[begin:end])

    def _query_block(
        self, do: Do, queries: Tensor, kv: tuple[Tensor, Tensor], mask: tuple[int, Tensor], out: Tensor
    ) -> None:
        """A few queries against all their tiles; ``mask``: first tile with hidden lanes, and bool [queries, lanes]."""
        (keys, values), (seen, hidden) = kv, mask
        tiles, (length, heads, group, dim) = len(keys), (len(queries), self._kv_heads, self._group, self._dim)
        used, count = length * group, self._ladder.rung(length * group)
        take = self._arena.take
        scaled = take("queries", heads, count, dim)
        by_head = queries.view(length, heads, group, dim).transpose(0, 1)
        do(scale, by_head, self._scale, _split(scaled[:, :used], 1, group))
        scores, sums = take("scores", heads, tiles, count, TILE), take("tile sums", heads, tiles, count)
        partial, peak = take("tile values", heads, tiles, count, dim), take("peak", heads, 1, count, 1)
        for head in range(heads):
            do(batched_product, scaled[head].expand(tiles, -1, -1), keys[:, head].transpose(1, 2), scores[head])
        masked: tuple[tuple[Tensor, Tensor], ...] = ()
        if seen < tiles:
            lanes = _split(scores[:, seen:, :used], 2, group)  # [heads, nt', length, group, TILE]
            masked = ((lanes, _by_tile(hidden)[None, :, :, None]),)
        do(softmax_weights, scores, (1, 3), masked, peak, sums)
        for head in range(heads):
            do(batched_product, scores[head], values[:, head], partial[head])
        total, weight = take("total", heads, count, dim), take("weight", heads, count)
        do(add_tiles, partial.unbind(1), total)
        do(add_tiles, sums.unbind(1), weight)
        by_query = _split(total[:, :used], 1, group), _split(weight[:, :used, None], 1, group)
        do(divide, *by_query, out.view(length, heads, group, dim).transpose(0, 1))


def _by_tile(lanes: Tensor) -> Tensor:
    """[n, nt * TILE] seen as [nt, n, TILE]."""
    return _split(lanes, 1, TILE).transpose(0, 1)


def _split(x: Tensor, dim: int, inner: int) -> Tensor:
    """Dimension ``dim`` of size n * inner seen as two, (n, inner)."""
    view: Tensor = x.unflatten(dim, (-1, inner))
    return view
