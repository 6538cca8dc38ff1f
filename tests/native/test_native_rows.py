"""Norm, rotation with the K/V write, and SiLU * mul: close to fp64, row by row, and no byte outside of what was asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.compute.rope import rope_tables
from engine.loading.synthetic import synthetic_config
from engine.native.kernels import HeadLayout
from tests.native.kit import kernels, numbers, parts_of, pool_shape, same_bytes

EPS = 1e-5


def norm_in_fp64(x: Tensor, weight: Tensor) -> np.ndarray:
    values = x.double().numpy()
    wanted: np.ndarray = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS) * weight.double().numpy()
    return wanted


@pytest.mark.parametrize("size", [1, 8, 16, 40, 576, 1000])
def test_norm(size: int) -> None:
    x, delta, weight = numbers(1, 7, size), numbers(2, 7, size), numbers(3, size)
    stream, out = x.clone(), torch.empty(7, size)
    kernels().norm(weight, EPS, stream, delta, None, out)
    assert same_bytes(stream, x + delta)
    np.testing.assert_allclose(out.numpy(), norm_in_fp64(x + delta, weight), rtol=3e-6, atol=1e-6)
    for row in range(7):
        alone, one = x[row : row + 1].clone(), torch.empty(1, size)
        kernels(2).norm(weight, EPS, alone, delta[row : row + 1], None, one)
        assert same_bytes(one[0], out[row])
    chosen, some = torch.tensor([6, 2, 6]), torch.empty(3, size)
    kernels().norm(weight, EPS, x, delta, chosen, some)
    assert same_bytes(some, out[chosen])
    plain = torch.empty(7, size)
    kernels().norm(weight, EPS, stream, None, None, plain)
    assert same_bytes(plain, out)


def test_chosen_row_outside_reads_nothing() -> None:
    x, out = numbers(1, 4, 32), torch.zeros(3, 32)
    kernels().norm(torch.ones(32), EPS, x, None, torch.tensor([4, -1, 2**62]), out)
    assert out.isnan().all()


@pytest.mark.parametrize("size", [1, 15, 16, 36, 1536])
def test_silu_mul(size: int) -> None:
    gate_up = numbers(1, 5, 2 * size) * 30
    out = torch.empty(5, size)
    kernels().silu_mul(gate_up, out)
    gate, up = gate_up.double().numpy()[:, :size], gate_up.double().numpy()[:, size:]
    np.testing.assert_allclose(out.numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-6)
    many = torch.empty(50, size)
    kernels(3).silu_mul(gate_up.repeat(10, 1), many)
    assert same_bytes(many, out.repeat(10, 1))


def test_silu_at_its_ends() -> None:
    gate = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4, float("nan"), float("inf")]])
    out = torch.empty(1, 8)
    kernels().silu_mul(torch.cat([gate, torch.ones(1, 8)], dim=1), out)
    assert out[0, 0].abs() < 1e-30
    assert out[0, 2:6].tolist() == [0.0, 0.0, 100.0, 1e4]
    assert out[0, 6].isnan()
    assert out[0, 7].isinf()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (5, 1, 8), (4, 2, 32), (2, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_write(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool) -> None:
    layout = HeadLayout(heads, kv_heads, dim, 4, 6)
    tables = rope_tables(synthetic_config(head_dim=dim), 40)
    qkv = numbers(1, 3, layout.width)
    positions, cells = torch.tensor([30, 0, 7]), [(5, 2), (0, 0), (3, 3)]  # (block, offset in it)
    slots = torch.tensor([block * kv_heads * 4 + offset for block, offset in cells])
    norms = (numbers(2, dim), numbers(3, dim), EPS) if normed else None
    cache = torch.full(pool_shape(layout), 7.0, dtype=dtype)
    keys, values = parts_of(cache, layout)
    given = qkv.clone()
    kernels().rotate(layout, qkv, (positions, slots), tables, norms, cache)
    split = given.reshape(3, heads + 2 * kv_heads, dim)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if norms is not None:
        q, k = (torch.from_numpy(norm_in_fp64(part, weight)) for part, weight in ((q, norms[0]), (k, norms[1])))
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    turned = turn(q, tables, positions)
    np.testing.assert_allclose(qkv[:, : heads * dim].reshape(3, heads, dim).numpy(), turned, rtol=3e-6, atol=3e-6)
    turned = turn(k, tables, positions)
    for token, (block, offset) in enumerate(cells):
        np.testing.assert_allclose(keys[block, :, offset].float().numpy(), turned[token], tolerance, tolerance)
        assert torch.equal(values[block, :, offset], v[token].to(dtype))  # to nearest, as torch rounds
    untouched = torch.ones(6, 4, dtype=torch.bool)
    for block, offset in cells:
        untouched[block, offset] = False
    for part in (keys, values):
        assert (part.transpose(1, 2)[untouched] == 7).all()


def turn(x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor) -> np.ndarray:
    values, half = x.double().numpy(), x.shape[-1] // 2
    cos, sin = (table[positions].double().numpy()[:, None] for table in tables)
    turned: np.ndarray = values * cos + np.concatenate([values[..., half:], values[..., :half]], -1) * sin
    return turned


def test_slot_outside_the_pool_writes_nothing() -> None:
    layout = HeadLayout(2, 1, 8, 4, 3)
    tables = rope_tables(synthetic_config(head_dim=8), 16)
    cache = torch.full(pool_shape(layout), 7.0)
    for position, slot in ((0, 12), (0, -1), (0, 2**62), (16, 0), (-1, 0)):
        qkv = numbers(1, 1, layout.width)
        kernels().rotate(layout, qkv, (torch.tensor([position]), torch.tensor([slot])), tables, None, cache)
        assert qkv[0, :16].isnan().all()
    assert (cache == 7).all()


def test_slot_whose_last_head_would_overflow_writes_nothing() -> None:
    layout, tables = HeadLayout(2, 2, 8, 4, 3), rope_tables(synthetic_config(head_dim=8), 16)
    cache = torch.full(pool_shape(layout), 7.0)
    for slot in (2**63 - 1, 2**63 - 5, 20):  # of 24 cells the last four of a block belong to its second head
        qkv = numbers(1, 1, layout.width)
        kernels().rotate(layout, qkv, (torch.tensor([0]), torch.tensor([slot])), tables, None, cache)
        assert qkv[0, :16].isnan().all()
    assert (cache == 7).all()
    qkv = numbers(1, 1, layout.width)
    kernels().rotate(layout, qkv, (torch.tensor([0]), torch.tensor([19])), tables, None, cache)  # the last slot
    assert qkv.isfinite().all()
