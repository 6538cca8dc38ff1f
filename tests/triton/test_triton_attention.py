"""Paged attention against fp64, over poisoned memory; equal bytes whoever else is there; and kernels broken on purpose.

On a machine without a GPU everything here runs in Triton's interpreter, on the same programs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ci import triton_errors as errors
from engine.cuda import kernels as launching
from engine.cuda.kernels import Kernels, Layout

# Lanes that no query stands on divide 0 by 0; nobody stores them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning"),
    pytest.mark.timeout(1800),  # the interpreter takes seconds where a GPU takes microseconds
]

GROUPED = Layout(heads=6, kv_heads=2, dim=64, block_size=8)  # three heads on one K/V head: no power of two
FP32 = errors.BOUNDS["float32"]


@pytest.mark.parametrize("dim", errors.DIMS)
@pytest.mark.parametrize("name", errors.TYPES)
def test_errors_are_within_their_bounds(dim: int, name: str) -> None:
    """Rows of one, two and five splits in blocks of random order; NaN in every cell that nobody wrote."""
    (line,) = errors.lines((dim,), (name,))
    assert line.holds, line


def test_the_bounds_notice_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the check: bf16's errors are above fp32's bound."""
    monkeypatch.setitem(errors.BOUNDS, "bfloat16", FP32)
    (line,) = errors.lines((64,), ("bfloat16",))
    assert not line.holds


@pytest.fixture(scope="module")
def case() -> errors.Case:
    return errors.make_case(GROUPED, torch.float32, errors.LENGTHS)


def positions(*values: int) -> Tensor:
    return torch.tensor(values, device=errors.device())


def deviation(kernels: Kernels, case: errors.Case, window: int | None = None) -> tuple[float, float]:
    """The errors of decode, at the last position of every row, and of a prefill chunk over a border of two splits."""
    lasts = [length - 1 for length in errors.LENGTHS]
    qkv = errors.queries(GROUPED, torch.float32, len(lasts))
    asked = errors.asked(GROUPED, qkv)
    wanted = torch.stack([case.attention(row, last, asked[row], window) for row, last in enumerate(lasts)])
    decoded = errors.error(errors.decode(kernels, case, qkv, positions(*lasts), window), wanted)
    chunk = errors.queries(GROUPED, torch.float32, 9, seed=2)
    asked = errors.asked(GROUPED, chunk)
    start = 2 * errors.SPLIT - 4
    wanted = torch.stack([case.attention(2, start + i, asked[i], window) for i in range(9)])
    return decoded, errors.error(errors.prefill(kernels, case, 2, chunk, start, window), wanted)


@pytest.mark.parametrize(
    "window", [None, 9, 70, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 64, 1000))]
)
def test_grouped_queries_and_windows(case: errors.Case, window: int | None) -> None:
    kernels = Kernels(GROUPED, errors.device(), split=errors.SPLIT)
    assert max(deviation(kernels, case, window)) <= FP32


@pytest.mark.slow
@pytest.mark.parametrize("split", [64, 128, 256, 512])
def test_any_split_gives_the_same_numbers(case: errors.Case, split: int) -> None:
    kernels = Kernels(GROUPED, errors.device(), split=split)
    assert max(deviation(kernels, case)) <= FP32


# Equal bytes -------------------------------------------------------------------------------------------------------


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def picked(case: errors.Case, rows: list[int], width: int) -> errors.Case:
    """Rows of ``case`` in another order, with tables of another width."""
    trash = int(case.tables.max())
    wide = torch.full((len(rows), width), trash, device=case.tables.device)
    most = min(width, case.tables.shape[1])
    wide[:, :most] = case.tables[rows, :most]
    return errors.Case(case.layout, case.cache, wide, case.keys, case.values)


def test_bytes_do_not_depend_on_rows_places_or_widths(case: errors.Case) -> None:
    kernels = Kernels(GROUPED, errors.device(), split=errors.SPLIT)
    lasts = [length - 1 for length in errors.LENGTHS]
    qkv = errors.queries(GROUPED, torch.float32, len(lasts))
    for row, last in enumerate(lasts):
        need = last // GROUPED.block_size + 1
        alone = errors.decode(kernels, picked(case, [row], need), qkv[row : row + 1], positions(last))[0]
        for rows, width in (([0, 1, 2], 41), ([2, 1, 0], 60), ([row, row, 1, row], 47)):
            where = positions(*(lasts[other] for other in rows))
            crowd = errors.decode(kernels, picked(case, rows, width), qkv[rows].contiguous(), where)
            assert same(crowd[rows.index(row)], alone), (row, rows, width)


@pytest.mark.parametrize("window", [None, 70])
def test_prefill_gives_the_bytes_of_decode(case: errors.Case, window: int | None) -> None:
    """Any chunk, any place in a chunk: what decode gives for the same query. So preemption and chunking change nothing."""
    kernels = Kernels(GROUPED, errors.device(), split=errors.SPLIT)
    start, count = 2 * errors.SPLIT - 3, 7
    qkv = errors.queries(GROUPED, torch.float32, count)
    whole = errors.prefill(kernels, case, 2, qkv, start, window)
    parts = [errors.prefill(kernels, case, 2, qkv[i : i + 2].contiguous(), start + i, window) for i in (0, 2, 4)]
    assert same(whole[:6], torch.cat(parts))
    for i in (0, 2, 3, count - 1):
        one = errors.decode(kernels, picked(case, [2], 60), qkv[i : i + 1].contiguous(), positions(start + i), window)
        assert same(one[0], whole[i]), i


def test_products_and_norms_by_row() -> None:
    """A row's product and norm have the same bytes alone, in every place of a batch, and beside rows of NaN."""
    kernels = Kernels(GROUPED, errors.device())
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(19, 72, generator=generator).to(errors.device())
    weight = torch.randn(70, 72, generator=generator).to(errors.device())

    def product(rows: Tensor) -> Tensor:
        out = torch.full((len(rows), 70), float("nan"), device=rows.device)
        kernels.linear(rows.contiguous(), weight, None, out)
        return out

    def normed(rows: Tensor) -> Tensor:
        out = torch.full(rows.shape, float("nan"), device=rows.device)
        kernels.norm(weight[0], 1e-5, rows.clone(), rows.clone(), None, out)
        return out

    for compute in (product, normed):
        whole = compute(x)
        turned = compute(x.flip(0)).flip(0)
        assert same(whole, turned)
        poisoned = torch.full_like(x, float("nan"))
        for row in (0, 7, 15, 16, 18):
            assert same(compute(x[row : row + 1])[0], whole[row])
            poisoned[row] = x[row]
        kept = [0, 7, 15, 16, 18]
        assert same(compute(poisoned)[kept], whole[kept])


def test_the_product_that_a_gpu_runs_gives_the_same_numbers(case: errors.Case) -> None:
    """In the interpreter programs add their products up themselves; here they use the operator that a GPU is given."""
    kernels = Kernels(GROUPED, errors.device(), split=errors.SPLIT)
    kernels._wide = kernels._heads["WIDE"] = False
    assert max(deviation(kernels, case, 70)) <= FP32
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(rows, 72, generator=generator) for rows in (19, 70))
    out = torch.full((19, 70), float("nan"), device=errors.device())
    kernels.linear(x.to(errors.device()), weight.to(errors.device()), None, out)
    assert errors.error(out, x.double() @ weight.double().T) <= 10 * FP32  # outputs of the order of 10


# Broken on purpose -------------------------------------------------------------------------------------------------

RESCALE = "        total = total * old + new_total * fresh\n        acc = acc * old + new * fresh\n"
BREAKS = {
    "splits are merged without rescaling": (RESCALE, "        total += new_total\n        acc += new\n"),
    "the last split is left out": ("// SPLIT + 1\n", "// SPLIT + 0\n"),
    "a query does not see itself": ("position[None, :] <= query[:, None]", "position[None, :] < query[:, None]"),
    "a query sees what comes after it": ("(position[None, :] <= query[:, None]) & ", ""),
    "lanes beyond the end are read": ("written = position < end ", "written = position < end + TILE "),
    "tiles are folded without rescaling": ("acc = acc * old[:, None] + _product", "acc = acc + _product"),
    "one block too far": ("table + position // BLOCK_SIZE", "table + (position + 1) // BLOCK_SIZE"),
    "the neighbour's head": ("head = kv_head * GROUP + member", "head = kv_head + member"),
    "all heads read the first K/V head": ("(block * KV_HEADS + kv_head)", "(block * KV_HEADS)"),
}


def broken(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, instead: str) -> Kernels:
    """Kernels over a copy of the device programs in which every ``text`` says ``instead``."""
    from engine.cuda import programs

    assert programs.__file__ is not None
    source = Path(programs.__file__).read_text(encoding="utf-8")
    assert text in source
    copy = folder / "broken_programs.py"
    copy.write_text(source.replace(text, instead), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("broken_programs", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "triton_device", lambda device: module)
        return Kernels(GROUPED, errors.device(), split=2 * errors.SPLIT)  # two tiles in a split, three splits in a row


QUICK = ("splits are merged without rescaling", "tiles are folded without rescaling", "a query does not see itself")


@pytest.mark.parametrize(
    "what", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BREAKS]
)
def test_a_broken_kernel_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: errors.Case, what: str) -> None:
    kernels = broken(monkeypatch, tmp_path, *BREAKS[what])
    assert max(deviation(kernels, case)) > 100 * FP32


def test_the_window_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: errors.Case) -> None:
    kernels = broken(monkeypatch, tmp_path, "query[:, None] - window", "query[:, None] - window - 1")
    assert max(deviation(kernels, case)) <= FP32
    assert max(deviation(kernels, case, 9)) > 100 * FP32


# What may be asked -------------------------------------------------------------------------------------------------


def arguments() -> dict[str, Any]:
    layout = Layout(2, 1, 16, 4)
    return {
        "qkv": torch.zeros(2, layout.width),
        "cache": torch.zeros(2, 3, 1, 4, 16),
        "tables": torch.zeros(2, 2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "window": None,
        "scratch": (torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 2)),
        "out": torch.zeros(2, 32),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qkv", torch.zeros(2, 65)),
        ("qkv", torch.zeros(2, 64, dtype=torch.float64)),
        ("cache", torch.zeros(2, 3, 1, 8, 16)),
        ("cache", torch.zeros(2, 3, 1, 4, 16, dtype=torch.float16)),
        ("tables", torch.zeros(3, 2, dtype=torch.int64)),
        ("out", torch.zeros(3, 32)),
        ("stats", (torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 2, 2))),
        ("partial", (torch.zeros(2, 2, 0, 16), torch.zeros(2, 2, 0, 2))),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Any) -> None:
    kernels = Kernels(Layout(2, 1, 16, 4), errors.device())
    given = arguments()
    given["scratch" if name in ("stats", "partial") else name] = value
    with pytest.raises(ValueError, match=rf"^{name} is torch\.\w+ \("):
        kernels.attend_decode(**given)


@pytest.mark.parametrize("split", [0, 32, 100])
def test_a_split_is_whole_tiles(split: int) -> None:
    with pytest.raises(ValueError, match=f"split is {split} positions, but must be a multiple of 64"):
        Kernels(GROUPED, errors.device(), split=split)


def test_a_device_that_the_process_cannot_serve() -> None:
    other = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(launching.NoTriton, match="TRITON_INTERPRET"):
        launching.triton_device(torch.device(other))


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "has_triton", lambda: False)
    with pytest.raises(launching.NoTriton, match=r"pip install 'lockstep-engine\[cuda\]'"):
        launching.triton_device(torch.device("cpu"))
