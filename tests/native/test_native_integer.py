"""Linear layers with 8-bit activations: exactly what the definition says, row by row, on every instruction set."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.build import assemble
from engine.config import ConfigError, EngineConfig
from engine.loading import load_model
from engine.loading.synthetic import synthetic_model
from engine.native.build import built
from engine.native.kernels import BadCall, Kernels
from engine.native.library import INTEGER, Library, Packed
from engine.native.runner import library
from engine.native.weights import load_native
from tests.models import write_gguf
from tests.native.kit import F64, changed_source, kernels, kernels_of, numbers, same_bytes, weight

SHAPES = ((200, 608), (16, 32), (33, 160), (17, 1536))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 33, 64)
TARGETS = {"avx512 without vnni": ("-march=native", "-mno-avx512vnni"), "avx2": ("-march=haswell",), "plain": ()}


def packed(kind: str, n: int, k: int, of: Library | None = None) -> tuple[Packed, F64]:
    rows, exact = _rows(kind, n, k)
    return (of or library()).pack(INTEGER[kind], rows, k), exact


def _rows(kind: str, n: int, k: int) -> tuple[Tensor, F64]:
    from gguf import GGMLQuantizationType, quants

    values = numbers(0, n, k).numpy()
    raw = np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[kind]))
    exact = quants.dequantize(raw, GGMLQuantizationType[kind]).astype(np.float64)
    return torch.from_numpy(raw.view(np.uint8).reshape(n, -1).copy()), exact


def quantised(x: Tensor, on: Kernels | None = None) -> tuple[Tensor, Tensor]:
    q = torch.full(x.shape, 99, dtype=torch.int8)
    scales = torch.full((len(x), x.shape[1] // 16), 7.0)
    (on or kernels()).quantise(x, q, scales)
    return q, scales


def product(
    kind: str,
    n: int,
    k: int,
    x: Tensor,
    bias: Tensor | None = None,
    on: Kernels | None = None,
    of: Library | None = None,
) -> Tensor:
    out = torch.full((len(x), n), float("nan"))
    (on or kernels()).multiply(packed(kind, n, k, of)[0], bias, *quantised(x, on), out)
    return out


def rounded(x: Tensor) -> F64:
    """The definition, in numpy: groups of 32, scale by the largest magnitude, to nearest, ties to even."""
    groups = x.numpy().reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(most > 0, np.float32(127) / most, np.float32(0))
    q = np.rint(groups * factor)
    d = most / np.float32(127)
    found: F64 = (q.astype(np.float64) * d).reshape(len(x), -1)
    return found


def test_quantised_as_defined() -> None:
    x = numbers(1, 7, 96) * 10.0 ** torch.arange(-3, 4)[:, None]
    x[2, :32] = 0
    x[3, 32:64] = torch.arange(32) - 15.5  # halves: ties go to even
    x[3, 32] = -127.0
    q, scales = quantised(x)
    assert q[3, 33:36].tolist() == [-14, -14, -12]
    values = q.reshape(7, 3, 32).double() * scales.reshape(7, 3, 2)[..., :1].double()
    assert np.array_equal(values.reshape(7, 96).numpy(), rounded(x))
    assert torch.equal(q.reshape(7, 3, 32).sum(-1).float(), scales.reshape(7, 3, 2)[..., 1])
    assert q.abs().max() == 127
    # Half of one step of the group's scale is the largest error.
    step = scales.reshape(7, 3, 2)[..., 0].repeat_interleave(32, dim=1)
    assert ((x - values.reshape(7, 96).float()).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("kind", INTEGER)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_close_to_fp64_of_what_was_rounded(kind: str, n: int, k: int) -> None:
    """Against the rounded activations the only error left is that of a chain of k / 32 fp32 additions."""
    x, bias = numbers(2, 9, k), numbers(3, n)
    _, exact = packed(kind, n, k)
    wanted = rounded(x) @ exact.T + bias.double().numpy()
    size = np.abs(rounded(x)) @ np.abs(exact).T + np.abs(bias.double().numpy())
    error = np.abs(product(kind, n, k, x, bias).double().numpy() - wanted) / size
    assert error.max() < 16 * 2.0**-24


@pytest.mark.parametrize("kind", INTEGER)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bytes_of_a_row(kind: str, n: int, k: int) -> None:
    """Any number of rows and threads, any distance between rows, NaN beside them."""
    x, bias = numbers(4, max(ROWS), k), numbers(5, n)
    weight_, _ = packed(kind, n, k)
    alone = torch.cat([product(kind, n, k, row[None], bias) for row in x])
    for rows in ROWS:
        for threads in (1, 3):
            wide = torch.full((rows, k + 5), float("nan"))
            wide[:, :k] = x[:rows]
            q, scales = quantised(wide[:, :k], kernels(threads))
            room = torch.full((rows + 1, n + 3), 7.0)
            kernels(threads).multiply(weight_, bias, q, scales, room[:rows, :n])
            assert same_bytes(room[:rows, :n], alone[:rows]), (rows, threads)
            assert (room[rows:] == 7).all()
            assert (room[:, n:] == 7).all()


@pytest.mark.parametrize("kind", INTEGER)
def test_what_is_no_number_shows_in_its_row_only(kind: str) -> None:
    x = numbers(6, 4, 64)
    clean = product(kind, 48, 64, x)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[2, 40] = bad
        out = product(kind, 48, 64, x)
        assert out[2].isnan().all()
        assert same_bytes(out[[0, 1, 3]], clean[[0, 1, 3]])
    extreme = torch.zeros(1, 64)
    extreme[0, 3], extreme[0, 33] = 3e36, 1e-38
    assert product(kind, 48, 64, extreme).isfinite().all()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_every_instruction_set(target: str, tmp_path: Path) -> None:
    """The same bytes with and without the dot product of bytes; the portable path rounds between multiply and add."""
    other = Library(built(cache=tmp_path, target=TARGETS[target]))
    on = kernels_of(other, 2)
    for kind in INTEGER:
        x = numbers(7, 9, 608)
        for values in (x, odd_numbers()):
            (q, scales), (other_q, other_scales) = quantised(values), quantised(values, on)
            assert torch.equal(q, other_q)
            assert same_bytes(scales.nan_to_num(7.5), other_scales.nan_to_num(7.5))
            assert torch.equal(scales.isnan(), other_scales.isnan())
        mine, theirs = product(kind, 200, 608, x), product(kind, 200, 608, x, None, on, other)
        if other.vector_bits:
            assert same_bytes(mine, theirs)
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-4)


def odd_numbers() -> Tensor:
    """Groups of zeros of both signs, subnormals, extremes, ties and what is no number, each in some of the places."""
    x = numbers(8, 10, 64)
    x[0], x[1], x[2], x[3] = 0.0, -0.0, x[2] * 1e-39, x[3] * 1e-31
    x[4], x[5], x[6] = x[4] * 1e38, torch.arange(64) - 31.5, torch.logspace(-38, 38, 64)
    x[5, ::32] = 127.0
    x[7, 3], x[8, 40], x[9, 31] = float("inf"), float("nan"), -float("inf")
    return x


@pytest.mark.timeout(300)
def test_a_broken_order_is_noticed(tmp_path: Path) -> None:
    """Groups of a row alone from the last to the first: its bytes are no longer those in a crowd."""
    source = changed_source(
        tmp_path,
        "integer.h",
        (
            "for (int64_t g = 0; g < a.k / GROUP; ++g, w += T::BYTES) {",
            "w += R == 1 ? (a.k / GROUP - 1) * T::BYTES : 0;\n"
            "    for (int64_t h = 0; h < a.k / GROUP; ++h, w += R == 1 ? -T::BYTES : T::BYTES) {\n"
            "        const int64_t g = R == 1 ? a.k / GROUP - 1 - h : h;",
        ),
    )
    broken = Library(built(folder=source, cache=tmp_path / "cache", extra=("-O1",)))
    on, x = kernels_of(broken, 1), numbers(4, 8, 608)
    alone = torch.cat([product("Q4_1", 40, 608, row[None], None, on, broken) for row in x])
    assert not same_bytes(product("Q4_1", 40, 608, x, None, on, broken), alone)


def test_hostile_calls_are_refused() -> None:
    weight_, _ = packed("Q4_1", 40, 64)
    q, scales = quantised(numbers(1, 3, 64))
    out = torch.empty(3, 40)
    for arguments, message in (
        ((weight("Q4_1", 40, 64)[0], None, q, scales, out), "type Q4_1, but must be one of Q8_0 x int8"),
        ((attrs.evolve(weight_, layout="panels"), None, q, scales, out), "packed as .panels., but these kernels read"),
        ((weight_, None, q[:2], scales, out), "q has shape"),
        ((weight_, None, q[:, :32], scales, out), "q has shape"),
        ((weight_, None, q.float(), scales, out), "q is torch.float32"),
        ((weight_, None, q, scales[:, :2], out), "scales has shape"),
        ((weight_, numbers(1, 39), q, scales, out), "bias has 39"),
        ((weight_, None, q, scales, out[:, :39]), "out has shape"),
    ):
        with pytest.raises(BadCall, match=message):
            kernels().multiply(*arguments)
    with pytest.raises(BadCall, match="k is 40, but must be a multiple of 32"):
        kernels().quantise(numbers(1, 2, 40), torch.empty(2, 40, dtype=torch.int8), torch.empty(2, 2))
    with pytest.raises(BadCall, match="Q4_1 x int8, but must be one of F32"):
        kernels().linear(weight_, None, numbers(1, 3, 64), out)


def test_setting(tmp_path: Path) -> None:
    small = {"num_kv_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32, "weights_cache": "off"}
    model = load_model(write_gguf(tmp_path / "model.gguf", "llama", "Q8_0"))
    engine = assemble(EngineConfig(compute="int8", **small), model)
    assert "8-bit activations" in dict(engine.capacity())["compute"]
    loaded = load_native(model, library(), integer=True)
    assert set(loaded.types) == {"Q8_0", "Q8_0 x int8"}  # the head stays as it was
    assert loaded.nbytes == load_native(model, library()).nbytes
    with pytest.raises(ConfigError, match="compute is int8, but synthetic-llama has no quantised layers"):
        assemble(EngineConfig(compute="int8", **small), synthetic_model())
