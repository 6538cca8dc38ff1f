"""Hostile shapes, types and strides: refused in Python, before an address reaches a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from engine.compute.sampling_choice import WEIGHTS
from engine.native.kernels import BadCall, HeadLayout, Kernel, Kernels
from engine.native.library import INTEGER, RECORD, TYPES, Packed, Pool, Records, aligned, packed_bytes
from engine.native.runner import library
from tests.native.kit import kernels, weight

LAYOUT = HeadLayout(4, 2, 8, 4, 6)
W: Packed = weight("F32", 20, 32)[0]
SWAPPED = attrs.evolve(W, layout="tiles")  # as another library in this process would have packed it


def f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def i(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


class Deaf(Pool):
    """Stands in for the threads: what arrives here would have been run."""

    def __init__(self) -> None:
        self.ran, self.layouts = 0, library().layouts

    def run(self, records: Records) -> None:
        self.ran += 1


def b(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


GOOD: dict[str, Callable[[], list[Any]]] = {
    "embed": lambda: [W, i(3), f(3, 32)],
    "norm": lambda: [f(8), 1e-5, f(3, 8), f(3, 8), None, f(3, 8)],
    "linear": lambda: [W, f(20), f(3, 32), f(3, 20)],
    "rotate": lambda: [LAYOUT, f(3, 64), (i(3), i(3)), (f(9, 8), f(9, 8)), (f(8), f(8), 1e-5), f(2, 6, 2, 32)],
    "attend": lambda: [LAYOUT, f(3, 64), i(3), i(3, 5), f(2, 6, 2, 32), None, f(3, 32), (f(3, 4, 1, 18), 2)],
    "silu_mul": lambda: [f(3, 16), f(3, 8)],
    "head": lambda: [W, f(3, 32), f(3, 20), f(3, 2)],
    "draw": lambda: [f(3, 20), f(3, 2), b(3, 48), torch.from_numpy(WEIGHTS), i(3)],
}

BAD: list[tuple[str, int, Any, str]] = [
    *(
        (name, 0, SWAPPED, "F32 is packed as 'tiles', but these kernels read 'panels'")
        for name in ("embed", "linear", "head")
    ),
    ("embed", 1, i(3, 1), "tokens"),
    ("embed", 1, torch.zeros(3, dtype=torch.int32), "tokens"),
    ("embed", 1, i(6)[::2], "tokens"),
    ("embed", 1, i(0), "tokens has 0"),
    ("embed", 2, f(3, 31), "out has shape"),
    ("embed", 2, f(2, 32), "out has shape"),
    ("embed", 2, f(3, 40)[:, :32], "out has strides"),
    ("embed", 2, f(3, 32).double(), "float64"),
    ("norm", 0, f(9), "x has shape"),
    ("norm", 1, -1.0, "eps"),
    ("norm", 1, float("nan"), "eps"),
    ("norm", 2, f(3, 8).t().contiguous().t(), "strides"),
    ("norm", 3, f(2, 8), "delta has shape"),
    ("norm", 4, i(2), "out has shape"),
    ("norm", 5, f(3, 8).to("meta"), "meta"),
    ("linear", 1, f(19), "bias has 19"),
    ("linear", 2, f(3, 31), "x has shape"),
    ("linear", 2, f(1, 32).expand(3, 32), "x has strides"),
    ("linear", 2, f(3, 64)[:, ::2], "x has strides"),
    ("linear", 3, f(3, 19), "out has shape"),
    ("linear", 3, f(2, 20), "out has shape"),
    ("linear", 3, f(3, 20).bfloat16(), "bfloat16"),
    ("rotate", 1, f(3, 63), "qkv has shape"),
    ("rotate", 2, (i(2), i(3)), "positions has 2"),
    ("rotate", 2, (i(3), i(4)), "slots has 4"),
    ("rotate", 3, (f(9, 7), f(9, 7)), "cos has shape"),
    ("rotate", 3, (f(9, 8), f(8, 8)), "sin has shape"),
    ("rotate", 4, (f(8), f(9), 1e-5), "norm weight has 9"),
    ("rotate", 5, f(2, 6, 2, 28), "pool's layer"),
    ("rotate", 5, f(2, 6, 2, 4, 8), "pool's layer"),
    ("rotate", 5, f(2, 6, 32, 2).transpose(2, 3), "pool's layer"),
    ("rotate", 5, f(2, 6, 2, 32).double(), "float64"),
    ("attend", 1, f(3, 31), "q has 31"),
    ("attend", 1, f(2, 64), "q has shape"),
    ("attend", 3, i(2, 5), "tables has 2"),
    ("attend", 3, i(3, 0), "tables has shape"),
    ("attend", 3, f(3, 5), "tables is"),
    ("attend", 5, 0, "window is 0"),
    ("attend", 5, -3, "window is -3"),
    ("attend", 6, f(3, 33), "out has shape"),
    ("attend", 7, (f(3, 4, 1, 18), 0), "segments is 0"),
    ("attend", 7, (f(3, 4, 2, 18), 2), "split is"),
    ("attend", 7, (f(3, 4, 1, 18).double(), 2), "split is"),
    ("attend", 7, (f(3, 4, 1, 18).to("meta"), 2), "on the CPU"),
    ("silu_mul", 0, f(3, 15), "gate_up has shape"),
    ("silu_mul", 1, f(2, 8), "gate_up has shape"),
    ("head", 1, f(3, 31), "x has shape"),
    ("head", 2, f(3, 21), "out has shape"),
    ("head", 3, f(3, 1), "peaks has shape"),
    ("head", 3, f(2, 2), "peaks has shape"),
    ("head", 3, f(3, 4)[:, :2], "peaks has strides"),
    ("draw", 0, f(3, 40), "peaks has shape"),
    ("draw", 0, f(2, 20), "peaks has shape"),
    ("draw", 0, f(3, 40)[:, ::2], "logits has strides"),
    ("draw", 1, f(3, 1), "peaks has shape"),
    ("draw", 2, b(2, 48), "wishes has shape"),
    ("draw", 2, b(3, 40), "wishes has shape"),
    ("draw", 2, f(3, 48), "wishes is"),
    ("draw", 3, torch.zeros(2585, dtype=torch.float64), "weights has 2585"),
    ("draw", 3, f(2586), "weights is"),
    ("draw", 4, i(2), "tokens has 2"),
]


def deaf(name: str) -> tuple[Kernel, Deaf]:
    pool = Deaf()
    kernel: Kernel = getattr(Kernels(pool), name)
    return kernel, pool


@pytest.mark.parametrize("name", GOOD)
def test_good_calls_arrive(name: str) -> None:
    kernel, pool = deaf(name)
    kernel(*GOOD[name]())
    assert pool.ran == 1
    getattr(kernels(), name)(*GOOD[name]())


@pytest.mark.parametrize(("name", "index", "value", "message"), BAD)
def test_bad_calls_do_not(name: str, index: int, value: Any, message: str) -> None:
    kernel, pool = deaf(name)
    arguments = GOOD[name]()
    arguments[index] = value
    with pytest.raises(BadCall, match=message):
        kernel(*arguments)
    assert pool.ran == 0


@pytest.mark.parametrize(
    "values",
    [(4, 3, 8, 4, 6), (0, 1, 8, 4, 6), (4, 2, 7, 4, 6), (4, 2, 258, 4, 6), (4, 2, 8, 0, 6), (4, 2, 8, 4, 2**40)],
)
def test_bad_layouts(values: tuple[int, ...]) -> None:
    with pytest.raises(BadCall):
        HeadLayout(*values)


@pytest.mark.parametrize(
    ("kind", "rows", "k"),
    [
        ("F64", torch.zeros(2, 32, dtype=torch.uint8), 4),
        ("F32", torch.zeros(2, 32, dtype=torch.uint8), 9),
        ("F32", torch.zeros(2, 32, dtype=torch.int8), 8),
        ("F32", torch.zeros(2, 64, dtype=torch.uint8)[:, :32], 8),
        ("F32", torch.zeros(0, 32, dtype=torch.uint8), 8),
        ("Q4_1", torch.zeros(2, 20, dtype=torch.uint8), 33),
        ("Q4_1", torch.zeros(2, 21, dtype=torch.uint8), 32),
        ("Q8_0", torch.zeros(68, dtype=torch.uint8), 32),
    ],
)
def test_bad_weights(kind: str, rows: torch.Tensor, k: int) -> None:
    with pytest.raises(ValueError, match=r"rows"):
        library().pack(kind, rows, k)


@pytest.mark.parametrize(
    ("kind", "n", "k", "data", "message"),
    [
        ("F32", 100_000, 1024, aligned(64), "has 64 bytes"),
        ("F32", 20, 32, aligned(4097), "has 4097 bytes"),
        ("F32", 16, 2, aligned(192)[4:132], "multiple of 64"),
        ("F32", 16, 2, aligned(128).view(torch.int8), "int8"),
        ("F32", 16, 2, aligned(256)[::2], "contiguous"),
        ("F32", 16, 2, aligned(128).to("meta"), "meta"),
        ("F32", 16, 2, aligned(128).view(16, 8), "vector of uint8"),
        ("F32", 0, 2, aligned(0), "0 rows of 2: both must be"),
        ("F32", 16, -2, aligned(0), "16 rows of -2: both must be"),
        ("F32", 2**40, 2, aligned(64), "both must be"),
        ("F32", 16.0, 2, aligned(128), "both must be"),
        ("Q4_0", 16, 31, aligned(0), "rows of 31: types are"),
        ("Q4_0 x int8", 16, 33, aligned(288), "rows of 33: types are"),
        ("F64", 16, 2, aligned(256), "'F64' of 16 rows of 2: types are"),
    ],
)
def test_bad_packed_weights(kind: str, n: Any, k: int, data: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packed(kind, n, k, data, "panels")


@pytest.mark.parametrize("kind", [*TYPES, *INTEGER.values()])
def test_python_and_kernels_agree_on_sizes(kind: str) -> None:
    for n, k in ((1, 32), (16, 64), (17, 32), (100, 992)):
        assert packed_bytes(kind, n, k) == library().packed_bytes(kind, n, k) > 0
        assert Packed(kind, n, k, aligned(packed_bytes(kind, n, k)), library().layouts[kind]).n == n


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_bad_thread_counts(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        library().pool(threads)


def test_closed_pool() -> None:
    pool = library().pool(2)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        Kernels(pool).silu_mul(f(3, 16), f(3, 8))


def test_a_record_that_was_given_back_is_no_call() -> None:
    """The first word of memory that Python got back is zero or an address, and what was behind it is still there."""
    pool, gate_up, out = library().pool(1), f(3, 16), torch.full((3, 8), 7.0)
    encoded = Kernels(pool).silu_mul.encode(gate_up, out)
    for freed in (0, id(encoded), 7, -1):
        call = Records.of(freed.to_bytes(8, "little", signed=True) + encoded[8:])
        with pytest.raises(RuntimeError, match="record 0 of 1 is no call of a kernel"):
            pool.run(call)
        with pytest.raises(RuntimeError, match="record 1 of 3 is no call"):
            pool.run(Records.of(encoded + bytes(call.memory.tolist()) + encoded))
    pool.run(Records.of(encoded))
    assert (out == 0).all()
    assert len(encoded) == RECORD
