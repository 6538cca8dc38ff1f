"""Linear layers and the embedding in every weight type: close to fp64, and a row's bytes belong to the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.native.kernels import Kernels
from engine.native.library import TYPES, Library
from tests.native.kit import kernels, numbers, same_bytes, weight

SHAPES = ((200, 608), (16, 32), (33, 160), (17, 1536))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 33, 64, 65)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_error_against_fp64(kind: str, n: int, k: int) -> None:
    packed, exact = weight(kind, n, k)
    x, bias = numbers(1, 21, k), numbers(2, n)
    out = torch.full((21, n), float("nan"))
    kernels().linear(packed, bias, x, out)
    wanted = x.double().numpy() @ exact.T + bias.double().numpy()
    size = np.abs(x.double().numpy()) @ np.abs(exact).T + np.abs(bias.double().numpy())
    # One rounding of half a unit per step of a chain of k is the worst case; sums of random terms stay far below it.
    assert (np.abs(out.double().numpy() - wanted) / size).max() < 4 * np.sqrt(k) * 2.0**-24


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("k", [1, 7, 127, 129, 300])
def test_any_length_in_plain_types(kind: str, k: int) -> None:
    packed, exact = weight(kind, 5, k)
    x = numbers(3, 6, k)
    out = torch.full((6, 5), float("nan"))
    kernels(2).linear(packed, None, x, out)
    np.testing.assert_allclose(out.numpy(), x.double().numpy() @ exact.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bytes_of_a_row(kind: str, n: int, k: int) -> None:
    """Any number of rows, one or more threads, any distance between rows, poison behind the last."""
    assert row_differences(kernels(1), kernels(3), kind, n, k) == []


def row_differences(one: Kernels, many: Kernels, kind: str, n: int, k: int, of: Library | None = None) -> list[str]:
    packed, _ = weight(kind, n, k, 0, of)
    x, bias = numbers(4, max(ROWS), k), numbers(5, n)
    alone = torch.empty(max(ROWS), n)
    for row in range(len(x)):
        one.linear(packed, bias, x[row : row + 1], alone[row : row + 1])
    wrong = []
    for rows in ROWS:
        for name, kernel in (("one thread", one), ("threads", many)):
            wide = torch.full((rows + 1, k + 3), float("nan"))
            wide[:rows, :k] = x[:rows]
            room = torch.full((rows + 1, n + 5), 7.0)
            kernel.linear(packed, bias, wide[:rows, :k], room[:rows, :n])
            if not same_bytes(room[:rows, :n], alone[:rows]):
                wrong.append(f"{rows} rows, {name}")
            if not (room[rows:] == 7).all() or not (room[:, n:] == 7).all():
                wrong.append(f"{rows} rows, {name}: wrote beyond its columns")
    return wrong


def many_rows_differ(one: Kernels, many: Kernels, kind: str, of: Library | None = None) -> bool:
    """131 rows, which go through k in two long pieces, against some of them alone."""
    packed, _ = weight(kind, 20, 1568, 0, of)
    x, alone, together = numbers(4, 131, 1568), torch.empty(1, 20), torch.empty(131, 20)
    many.linear(packed, None, x, together)
    differ = False
    for row in (0, 7, 64, 127, 130):
        one.linear(packed, None, x[row : row + 1], alone)
        differ = differ or not same_bytes(together[row : row + 1], alone)
    return differ


@pytest.mark.parametrize("kind", TYPES)
def test_bytes_of_a_row_among_many(kind: str) -> None:
    assert not many_rows_differ(kernels(1), kernels(2), kind)


@pytest.mark.parametrize("kind", TYPES)
def test_place_and_neighbours(kind: str) -> None:
    """One row in every place of the batch, beside rows of NaN."""
    packed, _ = weight(kind, 48, 64)
    x = numbers(6, 1, 64)
    alone = torch.empty(1, 48)
    kernels().linear(packed, None, x, alone)
    for rows in (2, 5, 8, 11):
        for place in range(rows):
            batch = torch.full((rows, 64), float("nan"))
            batch[place] = x[0]
            out = torch.empty(rows, 48)
            kernels(2).linear(packed, None, batch, out)
            assert same_bytes(out[place], alone[0])


@pytest.mark.parametrize("kind", TYPES)
def test_embedding_is_the_stored_row(kind: str) -> None:
    packed, exact = weight(kind, 50, 96)
    out = torch.empty(4, 96)
    kernels().embed(packed, torch.tensor([0, 49, 17, 16]), out)
    assert np.array_equal(out.numpy(), exact[[0, 49, 17, 16]].astype(np.float32))


def test_token_outside_the_table_reads_nothing() -> None:
    packed, _ = weight("F32", 50, 96)
    out = torch.zeros(4, 96)
    kernels().embed(packed, torch.tensor([50, -1, 2**62, 3]), out)
    assert out[:3].isnan().all()
    assert out[3].isfinite().all()
