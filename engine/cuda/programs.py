"""What runs on the device: attention over the block table, matrix products, norms, rotation, activation.

A row's numbers must not depend on its neighbours, to the bit, so every sum has one order:

    attention   the context is cut into tiles of TILE positions and splits of SPLIT positions, both counted from position 0.
                Inside a split tiles are folded in ascending order (online softmax), then splits likewise. A tile or split
                without a visible position leaves every bit as it was. Decode spreads the splits over programs and merges
                afterwards, prefill does both in one program; the text of both steps is the same two functions.
    products    a fixed tile, no split over k, fp32 accumulation, never TF32
    norms       one program a row

Sizes that a batch has are not specialised on: another compiled variant of a kernel could add in another order. For the same
reason kernels are launched without contraction of a * b + c (kernels.py).

In the interpreter a product of matrices is a library's: it takes bf16 for integers, and on some processors a row's bits depend
on its place among the rows. So there (WIDE) the same numbers are multiplied one by one in fp32 and added by a plain sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fold(peak, new_peak):
    """The common peak, and the factors of what was summed under ``peak`` and under ``new_peak``."""
    both = tl.maximum(peak, new_peak)
    safe = tl.where(both == float("-inf"), 0.0, both)  # nothing was visible so far
    return both, tl.exp(peak - safe), tl.exp(new_peak - safe)


@triton.jit
def _product(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        acc += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _attend_split(
    q, query, window, begin, end, keys, values, table, kv_head,
    SCALE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Peak [ROWS], sum [ROWS] and weighted values [ROWS, DIM_PAD] of positions ``begin .. end - 1``.

    ``begin`` is a multiple of TILE; ``query`` [ROWS] are the positions that ask.
    """
    d = tl.arange(0, DIM_PAD)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for tile in range(begin, end, TILE):
        position = tile + tl.arange(0, TILE)
        written = position < end  # beyond, memory may hold anything
        block = tl.load(table + position // BLOCK_SIZE, mask=written, other=0)
        cell = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        where = cell[:, None] * DIM + d[None, :]
        mask = written[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + where, mask=mask, other=0.0)
        v = tl.load(values + where, mask=mask, other=0.0)
        score = _product(q, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32), WIDE) * SCALE
        seen = written[None, :] & (position[None, :] <= query[:, None]) & (position[None, :] > query[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        peak, old, _ = _fold(peak, tl.max(score, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp(score - safe[:, None])
        total = total * old + tl.sum(weight, 1)
        acc = acc * old[:, None] + _product(weight.to(v.dtype), v, tl.zeros([ROWS, DIM_PAD], tl.float32), WIDE)
    return peak, total, acc


@triton.jit
def _first_tile(query, window, TILE: tl.constexpr):
    """The first position of the first tile that ``query`` sees."""
    return tl.maximum(query - window + 1, 0) // TILE * TILE


@triton.jit(do_not_specialize=["table_stride", "splits", "window"], do_not_specialize_on_alignment=["tables"])
def attend_decode(
    qkv, keys, values, tables, positions, partial, stats, table_stride, splits, window,
    QKV: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One split of one row and K/V head: ``partial`` [rows, heads, splits, DIM], ``stats`` [rows, heads, splits, 2]."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    query = tl.load(positions + row)
    first = split * SPLIT
    if first <= query:
        member, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
        head = kv_head * GROUP + member
        mask = (member < GROUP)[:, None] & (d < DIM)[None, :]
        q = tl.load(qkv + row * QKV + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        begin = tl.maximum(first, _first_tile(query, window, TILE))
        end = tl.minimum(first + SPLIT, query + 1)
        peak, total, acc = _attend_split(
            q, tl.zeros([ROWS], tl.int64) + query, window, begin, end, keys, values, tables + row * table_stride, kv_head,
            SCALE, DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, ROWS, TILE, WIDE,
        )  # fmt: skip
        place = (row * HEADS + head) * splits + split
        tl.store(stats + place * 2, peak, mask=member < GROUP)
        tl.store(stats + place * 2 + 1, total, mask=member < GROUP)
        tl.store(partial + place[:, None] * DIM + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    partial, stats, positions, out, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, DIM] from the splits that hold the context of each row, ascending."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    count = tl.load(positions + row) // SPLIT + 1
    place = (row * HEADS + head) * splits
    peak, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DIM_PAD], tl.float32)
    for split in range(count):
        new_peak = tl.load(stats + (place + split) * 2)
        new_total = tl.load(stats + (place + split) * 2 + 1)
        new = tl.load(partial + (place + split) * DIM + d, mask=d < DIM, other=0.0)
        peak, old, fresh = _fold(peak, new_peak)
        total = total * old + new_total * fresh
        acc = acc * old + new * fresh
    tl.store(out + (row * HEADS + head) * DIM + d, acc / total, mask=d < DIM)


@triton.jit(do_not_specialize=["first", "count", "start", "window"], do_not_specialize_on_alignment=["table"])
def attend_prefill(
    qkv, keys, values, table, out, first, count, start, window,
    QKV: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SCALE: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A few queries of one run of positions: tokens ``first ..`` of the batch stand at ``start ..`` of the request."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    QUERIES: tl.constexpr = ROWS // GROUP_PAD
    lane, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    index, member = tile * QUERIES + lane // GROUP_PAD, lane % GROUP_PAD
    query = start + index
    used = (index < count) & (member < GROUP)
    head = kv_head * GROUP + member
    mask = used[:, None] & (d < DIM)[None, :]
    token = (first + index).to(tl.int64)
    q = tl.load(qkv + token[:, None] * QKV + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    floor = _first_tile(start + tile * QUERIES, window, TILE)
    after = start + tl.minimum(count, (tile + 1) * QUERIES)
    for split in range(floor // SPLIT * SPLIT, after, SPLIT):
        new_peak, new_total, new = _attend_split(
            q, query, window, tl.maximum(split, floor), tl.minimum(split + SPLIT, after), keys, values, table, kv_head,
            SCALE, DIM, DIM_PAD, KV_HEADS, BLOCK_SIZE, ROWS, TILE, WIDE,
        )  # fmt: skip
        peak, old, fresh = _fold(peak, new_peak)
        total = total * old + new_total * fresh
        acc = acc * old[:, None] + new * fresh[:, None]
    where = out + (token[:, None] * HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(where, acc / total[:, None], mask=mask)


@triton.jit(do_not_specialize=["rows"])
def linear(
    x, weight, bias, out, rows,
    N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of out [rows, N] = x [rows, K] @ weight [N, K].T + bias [N]."""
    m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for begin in range(0, K, TILE_K):
        k = begin + tl.arange(0, TILE_K)
        mask = (k < K)[None, :]
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m < rows)[:, None] & mask, other=0.0)
        b = tl.load(weight + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & mask, other=0.0)
        acc = _product(a, tl.trans(b), acc, WIDE)
    if BIASED:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], acc, mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def norm(
    x, delta, weight, chosen, out,
    SIZE: tl.constexpr, PAD: tl.constexpr, EPS: tl.constexpr, ADDS: tl.constexpr, CHOOSES: tl.constexpr,
):  # fmt: skip
    """x += delta, then out = x / sqrt(mean(x ** 2) + EPS) * weight; of chosen rows, x itself stays as it is."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(chosen + row) if CHOOSES else row
    column = tl.arange(0, PAD)
    mask = column < SIZE
    value = tl.load(x + source * SIZE + column, mask=mask, other=0.0)
    if ADDS:
        more = tl.load(delta + source * SIZE + column, mask=mask, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        if not CHOOSES:
            tl.store(x + source * SIZE + column, value, mask=mask)
    value = value.to(tl.float32)
    scale = tl.sqrt(tl.sum(value * value, 0) / SIZE + EPS)
    weights = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, value / scale * weights, mask=mask)


@triton.jit
def rotate(
    qkv, positions, slots, cos, sin, norms, keys, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORMS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """All heads of one token: q is rotated in place, k is rotated into the cache, v goes there as it is.

    ``norms`` [2, DIM] are the weights of q and of k.
    """
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    head, d = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    inside = d < half
    mask = (head < HEADS + 2 * KV_HEADS) & inside
    start = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + d
    first, second = tl.load(start, mask=mask, other=0.0), tl.load(start + half, mask=mask, other=0.0)
    slot = tl.load(slots + token)
    is_value = mask & (head >= HEADS + KV_HEADS)
    cell = (slot + (head - HEADS - KV_HEADS) * BLOCK_SIZE) * DIM + d
    tl.store(values + cell, first, mask=is_value)
    tl.store(values + cell + half, second, mask=is_value)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORMS:
        scale = tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + EPS)[:, None]
        weight = norms + tl.where(head < HEADS, 0, DIM) + d
        first = first / scale * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
        second = second / scale * tl.load(weight + half, mask=mask, other=0.0).to(tl.float32)
    turn = tl.load(positions + token) * DIM + d
    new_first = first * tl.load(cos + turn, mask=inside) + second * tl.load(sin + turn, mask=inside)
    new_second = second * tl.load(cos + turn + half, mask=inside) + first * tl.load(sin + turn + half, mask=inside)
    is_query = mask & (head < HEADS)
    tl.store(start, new_first, mask=is_query)
    tl.store(start + half, new_second, mask=is_query)
    is_key = mask & (head >= HEADS) & (head < HEADS + KV_HEADS)
    cell = (slot + (head - HEADS) * BLOCK_SIZE) * DIM + d
    tl.store(keys + cell, new_first, mask=is_key)
    tl.store(keys + cell + half, new_second, mask=is_key)


@triton.jit
def silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out = gate / (1 + exp(-gate)) * up, for gate and up side by side in rows of 2 * SIZE."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)
