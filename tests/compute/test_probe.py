"""The probe: which row counts it accepts, when it refuses, and what it makes of a machine that is not this one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.compute import linear as linear_module
from engine.compute import probe as probe_module
from engine.compute.attention_probe import probe_attention
from engine.compute.linear import Linears, packed_product, plain_product
from engine.compute.probe import Ladder, ProbeReport, UnstableMachine, check_rowwise, probe, pseudo_random, same_bytes
from engine.loading.synthetic import synthetic_config

CPU = torch.device("cpu")
INPUTS = pseudo_random(512, 8, CPU, torch.float32)


def machine(classes: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """A product whose last bits depend on the class of the row count."""
    return lambda x: x * (1 + classes(len(x)) * 2**-20)


@pytest.mark.parametrize(
    ("classes", "rungs"),
    [
        (lambda n: 0, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
        (lambda n: n > 1, (2, 4, 8, 16, 32, 64, 128, 256, 512)),
        (lambda n: 0 if n < 2 else 1 if n < 16 else 2, (16, 32, 64, 128, 256, 512)),
        (lambda n: 0 if n < 2 else 1 if n < 16 else 3 if 63 <= n <= 130 else 2, (16, 32, 256, 512)),
        (lambda n: 0 if n <= 128 else 1, (1, 2, 4, 8, 16, 32, 64, 128)),
        (lambda n: n, (16,)),
    ],
    ids=["one class", "single rows differ", "three classes", "a class with a hole", "small is better", "none equal"],
)
def test_ladder_of_a_machine(classes: Callable[[int], int], rungs: tuple[int, ...]) -> None:
    found = probe("x", machine(classes), INPUTS)
    if rungs == (16,):  # one fixed size is invariant whatever the others do; which one is a matter of cost
        assert len(found.rungs) == 1
    else:
        assert found.rungs == rungs


def test_every_way_of_cutting_gives_the_same_bits() -> None:
    product = machine(lambda n: 0 if n < 2 else 1 if n < 16 else 3 if 63 <= n <= 130 else 2)
    ladder = probe("x", product, INPUTS)
    alone = product(INPUTS[: ladder.rungs[0]])[0]
    for rows in range(1, 600):
        for piece in ladder.pieces(rows):
            assert same_bytes(product(INPUTS[:piece])[0], alone)


def test_pieces_cover_and_waste_little() -> None:
    ladder = Ladder("x", (4, 8, 64))
    assert ladder.pieces(1) == (4,)
    assert ladder.pieces(9) == (64,)
    assert ladder.pieces(64) == (64,)
    assert ladder.pieces(130) == (64, 64, 4)
    for rows in range(1, 300):
        assert rows <= ladder.padded(rows)
        assert set(ladder.pieces(rows)) <= {4, 8, 64}
        assert ladder.padded(rows) <= ladder.padded(rows + 1)  # or the arena, measured at the largest, were too small


def test_place_in_the_batch_matters() -> None:
    def product(x: Tensor) -> Tensor:
        return x + torch.arange(len(x))[:, None] * 2**-20

    assert probe("x", product, INPUTS).rungs == (1,)  # a single row has only one place
    with pytest.raises(UnstableMachine, match=r"qkv: with every row count tried \(2, 4"):
        _probe_without_single_rows(product)


def test_places_that_mirror_each_other() -> None:
    """The outer rows are computed in another way than the inner ones: turning the batch around would not show it."""

    def product(x: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        outer = torch.minimum(rows, rows.flip(0)) < len(x) // 4
        return x + outer[:, None] * 2**-20

    assert probe("x", product, INPUTS).rungs == (1, 2)


def test_neighbours_leak() -> None:
    def product(x: Tensor) -> Tensor:
        return x + x.sum(0, keepdim=True) * 2**-20

    with pytest.raises(UnstableMachine, match="neighbours"):
        _probe_without_single_rows(product)


def _probe_without_single_rows(product: Callable[[Tensor], Tensor]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "CANDIDATES", (2, 4, 8))
        probe("qkv", product, INPUTS)


def test_same_bytes_is_about_bytes() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(zero, -zero)


@pytest.mark.parametrize("shape", [(64, 40), (33, 96), (283, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_pads_and_cuts(shape: tuple[int, int], bias: bool) -> None:
    """Real products: any row count gives each row the bytes that it has alone, and about the right value."""
    n, k = shape
    weight, offset = pseudo_random(n, k, CPU, torch.float32), pseudo_random(1, n, CPU, torch.float32)[0]
    layer = Linears().make("x", weight, offset if bias else None)
    x = pseudo_random(700, k, CPU, torch.float32)

    def run(values: Tensor) -> Tensor:
        rows, room = len(values), layer.ladder.padded(len(values))
        padded, out = torch.full((room, k), float("nan")), torch.empty(room, n)
        padded[:rows] = values
        layer.apply(lambda kernel, *arguments: kernel(*arguments), padded, rows, out)
        return out[:rows]

    whole = run(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, offset if bias else None))
    for rows in (*range(1, 18), 33, 65, 100, 513, 699):
        assert same_bytes(run(x[:rows]), whole[:rows])
    assert same_bytes(run(x[5:6]), whole[5:6])


def test_second_backend_is_used_when_the_first_is_unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        packed_product(x, weight, bias, out)
        out.mul_(1 + len(x) * 2**-20)

    monkeypatch.setattr(linear_module, "packed_product", noisy)
    monkeypatch.setattr(linear_module, "can_pack", lambda weight: True)
    layer = Linears().make("x", pseudo_random(64, 64, CPU, torch.float32), None)
    assert layer.kernel is plain_product
    assert layer.ladder.backend == "matmul"


def test_without_packing() -> None:
    layer = Linears().make("x", pseudo_random(64, 64, CPU, torch.float64), None)
    assert layer.kernel is plain_product


def test_attention_ladder_and_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    config = synthetic_config()
    assert probe_attention(config, CPU).rungs[-1] >= config.num_heads // config.num_kv_heads
    wide = synthetic_config(num_heads=512, num_kv_heads=1)
    with pytest.raises(UnstableMachine, match="512 query heads share"):
        probe_attention(wide, CPU)


def test_rowwise_check(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rowwise(CPU)
    exp = Tensor.exp
    monkeypatch.setattr(Tensor, "exp", lambda x: exp(x) * (1 + (len(x) % 2) * 2**-20))
    with pytest.raises(UnstableMachine, match="exp of"):
        check_rowwise(CPU)


def test_rowwise_check_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    total = Tensor.sum
    monkeypatch.setattr(Tensor, "sum", lambda x, dim: total(x, dim) * (1 + len(x) * 2**-20))
    with pytest.raises(UnstableMachine, match="sums of"):
        check_rowwise(CPU)


def test_report_for_people() -> None:
    report = ProbeReport(
        2, (Ladder("qkv 8x8", (2, 4), ((1,), (2, 4)), "oneDNN"), Ladder("head 9x8", (1, 2), ((1, 2),), "oneDNN"))
    )
    assert report.lines() == (
        "qkv 8x8: oneDNN, rows in pieces of 2, 4 (2 classes of equal bytes)",
        "head 9x8: oneDNN, rows in pieces of 1, 2",
    )
    assert report.summary == "2 products probed on 2 threads; rows in pieces of 1..2 or 2..4"
