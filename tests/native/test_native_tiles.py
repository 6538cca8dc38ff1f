"""Quantised linear layers on matrix tiles: the same bytes for few rows and many, as exact as fp32, and not where refused."""

from __future__ import annotations

import functools
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from engine.native import build
from engine.native.build import NO_TILES, TARGET, BuildError, built, native_target, tiles_granted
from engine.native.kernels import BadCall, Kernels
from engine.native.library import Library
from engine.native.runner import library
from engine.native.tape import NativeTape
from tests.native.kit import changed_source, kernels, kernels_of, numbers, same_bytes, weight

QUANTISED = ("Q8_0", "Q4_0", "Q4_1")


def tiled_target() -> tuple[str, ...]:
    """The processor's own tiles, or vectors that do what the instruction was found to do."""
    return TARGET if tiles_granted() else (*TARGET, "-DLOCKSTEP_EMULATED_TILES")


@functools.cache
def tiled() -> Library:
    return library() if tiles_granted() else Library(built(target=tiled_target()))


def alone(kernel: Kernels, kind: str, x: torch.Tensor, n: int, of: Library | None = None) -> torch.Tensor:
    packed, _ = weight(kind, n, x.shape[1], 0, of)
    out = torch.empty(len(x), n)
    for row in range(len(x)):
        kernel.linear(packed, None, x[row : row + 1], out[row : row + 1])
    return out


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_number_of_rows(kind: str) -> None:
    """1..64, which few rows and many compute in different ways, and more than one chunk of tiles."""
    n, k = 72, 96
    packed, _ = weight(kind, n, k, 0, tiled())
    x = numbers(1, 300, k)
    wanted = alone(kernels_of(tiled(), 1), kind, x, n, tiled())
    for rows in (*range(1, 65), 127, 128, 129, 300):
        out = torch.full((rows, n), float("nan"))
        kernels_of(tiled(), 2).linear(packed, None, x[:rows], out)
        assert same_bytes(out, wanted[:rows]), rows


@pytest.mark.parametrize("kind", QUANTISED)
def test_extreme_numbers(kind: str) -> None:
    """Zeros of both signs, subnormals, sizes that cancel, infinity and NaN: one row's bytes in a crowd too."""
    n, k = 40, 64
    packed, _ = weight(kind, n, k, 0, tiled())
    x = numbers(2, 20, k)
    x[1], x[2], x[3] = 0.0, -0.0, x[3] * 1e-39
    x[4], x[5], x[6] = x[4] * 1e30, x[5] * 1e-30, x[6] * torch.logspace(-38, 30, k)
    x[7, 5], x[8, 40] = float("inf"), float("nan")
    out = torch.empty(20, n)
    kernels_of(tiled(), 2).linear(packed, None, x, out)
    assert same_bytes(out, alone(kernels_of(tiled(), 1), kind, x, n, tiled()))
    ordinary = [row for row in range(20) if row not in (7, 8)]
    assert out[ordinary].isfinite().all()
    assert out[7:9].isfinite().logical_not().all()


@pytest.mark.parametrize("kind", QUANTISED)
def test_more_exact_than_one_chain(kind: str) -> None:
    """Activations enter with all of their 24 bits: below two roundings of the whole sum, where bf16 would be at 2^15."""
    n, k = 48, 1536
    packed, exact = weight(kind, n, k, 0, tiled())
    x, out = numbers(3, 24, k), torch.empty(24, n)
    kernels_of(tiled(), 1).linear(packed, None, x, out)
    values = x.double().numpy()
    error = np.abs(out.double().numpy() - values @ exact.T) / (np.abs(values) @ np.abs(exact).T)
    assert error.max() < 2 * 2.0**-24


@pytest.mark.parametrize("kind", QUANTISED)
def test_layers_in_a_row_share_activations(kind: str) -> None:
    """Parts of activations are made once for layers that follow one another, and anew where these were written to."""
    k = 64
    (first, _), (second, _) = weight(kind, k, k, 1), weight(kind, k, k, 2)
    for rows in (3, 20):
        x, kernel = numbers(4, rows, k), kernels(2)
        wanted = [torch.empty(rows, k) for _ in range(3)]
        kernel.linear(first, None, x, wanted[0])
        kernel.linear(second, None, x, wanted[1])
        kernel.linear(second, None, wanted[0], wanted[2])
        tape, shared = NativeTape(), [torch.empty(rows, k) for _ in range(2)]
        tape.do(kernel.linear, first, None, x, shared[0])
        tape.do(kernel.linear, second, None, x, shared[1])
        tape.replay()
        assert same_bytes(shared[0], wanted[0])
        assert same_bytes(shared[1], wanted[1])
        tape, chained = NativeTape(), torch.empty(rows, 2 * k)  # into the second half, then from it
        chained[:, :k] = x
        tape.do(kernel.linear, first, None, chained[:, :k], chained[:, k:])
        tape.do(kernel.linear, second, None, chained[:, k:], shared[1])
        tape.replay()
        assert same_bytes(shared[1], wanted[2])
        live, tape = x + 1, NativeTape()  # the next replay sees what lies there then
        tape.do(kernel.linear, first, None, live, shared[0])
        tape.do(kernel.linear, second, None, live, shared[1])
        tape.replay()
        live.copy_(x)
        tape.replay()
        assert same_bytes(shared[0], wanted[0])
        assert same_bytes(shared[1], wanted[1])


def test_tiles_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TILES", "off")
    assert native_target() == (*TARGET, *NO_TILES)
    monkeypatch.setenv("LOCKSTEP_TILES", "perhaps")
    with pytest.raises(BuildError, match="LOCKSTEP_TILES is 'perhaps', but must be on or off"):
        native_target()
    monkeypatch.delenv("LOCKSTEP_TILES")
    monkeypatch.setattr(
        build, "tiles_granted", lambda: False
    )  # another processor, or a system that does not grant them
    assert native_target() == (*TARGET, *NO_TILES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_tiles(tmp_path: Path) -> None:
    """Chains of fp32 then, close to what tiles give; packed weights of the two are told apart."""
    plain = Library(built(target=(*TARGET, *NO_TILES), cache=tmp_path))
    assert not plain.tiles
    for kind in QUANTISED:
        x, found = numbers(5, 9, 160), []
        for of in (plain, library()):
            packed, _ = weight(kind, 50, 160, 0, of)
            out = torch.empty(9, 50)
            kernels_of(of, 1).linear(packed, None, x, out)
            assert same_bytes(out, alone(kernels_of(of, 1), kind, x, 50, of))
            found.append(out)
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_weight_packed_for_another_library_is_refused(kind: str) -> None:
    """Two builds in one process: as many bytes in another order, which without the check are other numbers, silently."""
    plain = Library(built(target=(*TARGET, *NO_TILES)))
    x, out, wanted = numbers(5, 9, 160), torch.empty(9, 50), torch.empty(9, 50)
    for of, other in ((plain, tiled()), (tiled(), plain)):
        mine, theirs = weight(kind, 50, 160, 0, of)[0], weight(kind, 50, 160, 0, other)[0]
        told = f"is packed as '{other.layouts[kind]}', but these kernels read '{of.layouts[kind]}'"
        with pytest.raises(BadCall, match=told):
            kernels_of(of, 1).linear(theirs, None, x, out)
        with pytest.raises(BadCall, match=told):
            NativeTape().do(kernels_of(of, 1).linear, theirs, None, x, out)
        kernels_of(of, 1).linear(mine, None, x, wanted)
        kernels_of(of, 1).linear(attrs.evolve(theirs, layout=mine.layout), None, x, out)
        assert not torch.allclose(out, wanted, atol=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "change",
    [
        ("add(add(load16(low), load16(mid)), load16(high))", "add(add(load16(high), load16(mid)), load16(low))"),
        ("_mm_setcsr(before_ | 0x8040)", "_mm_setcsr(before_)"),
        ("for (int64_t i = PARTS - 1; i >= 0; --i,", "for (int64_t i = PARTS - 1; i >= 1; --i,"),
    ],
    ids=["another order of parts", "subnormals are kept", "the low part is left out"],
)
def test_a_broken_order_is_noticed(tmp_path: Path, change: tuple[str, str]) -> None:
    """Few rows against many, and exactness."""
    source = changed_source(tmp_path, "tiles.h", change)
    of = Library(built(folder=source, cache=tmp_path / "cache", target=tiled_target(), extra=("-O1",)))
    x = torch.cat([numbers(6, 20, 608), numbers(7, 20, 608) * 1e-38])
    packed, _ = weight("Q8_0", 48, 608, 0, of)
    true, _ = weight("Q8_0", 48, 608, 0, tiled())
    out, wanted = torch.empty(40, 48), torch.empty(40, 48)
    kernels_of(of, 1).linear(packed, None, x, out)
    kernels_of(tiled(), 1).linear(true, None, x, wanted)
    assert not same_bytes(out, alone(kernels_of(of, 1), "Q8_0", x, 48, of)) or not same_bytes(out, wanted)
