"""P2 over logits, to the byte, in every weight type: a real file is loaded, packed and decoded in many surroundings.

Combinations cover each pair of: weight type, rows 1..64 and place, chunk, threads, tape or none, padding, context across a
tile's border, recomputation; all over a pool of NaN. tests/compute/test_content.py does the same for every family in F32.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.control.plan import Eager, Replay
from engine.loading import load_model
from engine.loading.model import LoadedModel
from engine.native.build import built
from engine.native.library import TYPES, Library
from engine.native.runner import library
from engine.native.weights import NativeWeights, load_native
from tests.compute.driver import Driver, text
from tests.models import write_gguf
from tests.native.kit import changed_source, kernels_of
from tests.native.test_native_linear import ROWS, many_rows_differ, row_differences

PROMPT, TOTAL = 61, 67  # decoding crosses the first tile's end
NEIGHBOURS = (1, 5, 64, 17, 33)
SHAPE = {
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "hidden_size": 192,
    "intermediate_size": 224,
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@functools.cache
def model(kind: str, folder: Path) -> LoadedModel:
    return load_model(write_gguf(folder / f"{kind}.gguf", "llama", kind, **SHAPE))


@functools.cache
def weights(kind: str, folder: Path) -> NativeWeights:
    return load_native(model(kind, folder), library())


@functools.cache
def alone(kind: str, folder: Path) -> dict[int, bytes]:
    """Logits by position: one row, one thread, no tape, the prompt in one piece."""
    driver, tokens = Driver(weights(kind, folder), rows=1, threads=1, poison=float("nan")), text(0, TOTAL)
    driver.start({0: tokens[:PROMPT]})
    for position in range(PROMPT, TOTAL):
        driver.decode({0: (position, tokens[position])})
    return {position: logits for (_, position), logits in driver.spy.logits.items()}


def crowd(
    loaded: NativeWeights, rows: int, place: int, chunk: int, threads: int, recorded: int | None
) -> dict[int, bytes]:
    """The same request in row ``place`` among others; ``recorded``: rows of the tape, or no tape."""
    captures = () if recorded is None else ((recorded, 20),)
    driver = Driver(loaded, rows=64, num_blocks=1400, captures=captures, threads=threads, poison=float("nan"))
    texts, lengths = {}, {}
    for row in range(rows):
        lengths[row] = PROMPT if row == place else NEIGHBOURS[row % 5]
        texts[row] = text(0 if row == place else row + 1, lengths[row] + TOTAL - PROMPT)
    driver.start({row: texts[row][: lengths[row]] for row in range(rows)}, chunk)
    launch = Eager("test") if recorded is None else Replay(recorded, 20, recorded - rows)
    for step in range(TOTAL - PROMPT):
        driver.decode({row: (lengths[row] + step, texts[row][lengths[row] + step]) for row in range(rows)}, launch)
    return {position: logits for (row, position), logits in driver.spy.logits.items() if row == place}


# rows, place, chunk, threads, rows of the tape
SURROUNDINGS = (
    (1, 0, 1, 2, 1),
    (2, 1, 7, 1, 4),
    (3, 0, 16, 2, None),
    (4, 3, 64, 3, 4),
    (5, 2, 1000, 1, 8),
    (8, 7, 1000, 2, 8),
    (9, 4, 16, 3, 64),
    (16, 15, 7, 2, None),
    (33, 16, 64, 1, 33),
    (64, 63, 1000, 2, 64),
)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("surroundings", SURROUNDINGS, ids=str)
def test_surroundings(kind: str, surroundings: tuple[int, int, int, int, int | None], folder: Path) -> None:
    wanted = alone(kind, folder)
    assert len(wanted) == TOTAL - PROMPT + 1
    assert crowd(weights(kind, folder), *surroundings) == wanted


@pytest.mark.parametrize("kind", TYPES)
def test_recomputed_after_preemption(kind: str, folder: Path) -> None:
    """What was decoded token by token is prefilled as one chunk, in other blocks."""
    tokens = text(0, TOTAL)
    for kept in (PROMPT + 1, PROMPT + 4, TOTAL):
        driver = Driver(weights(kind, folder), rows=2, order=list(range(255, -1, -1)), poison=float("nan"))
        driver.start({1: tokens[:kept]})
        assert driver.spy.logits[1, kept] == alone(kind, folder)[kept]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", TYPES)
def test_every_row_count(kind: str, folder: Path) -> None:
    for rows in range(1, 65):
        assert crowd(weights(kind, folder), rows, rows // 2, 1000, 2, 64) == alone(kind, folder)


@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_those_of_the_file(kind: str, folder: Path) -> None:
    """Packed in their own type, and equal to the dequantised model on torch kernels up to fp32 rounding."""
    from engine.compute.weights import load_weights

    packed = weights(kind, folder)
    assert set(packed.types) == {kind}
    with torch.inference_mode():
        dequantised = load_weights(model(kind, folder), torch.device("cpu"), torch.float32)
    driver = Driver(dequantised, rows=1)
    driver.start({0: text(0, PROMPT)})
    other = np.frombuffer(driver.spy.logits[0, PROMPT], np.float32)
    mine = np.frombuffer(alone(kind, folder)[PROMPT], np.float32)
    assert other.std() > 1
    assert np.abs(mine - other).max() < 1e-4


def test_types_side_by_side(folder: Path) -> None:
    """Parts of one linear layer in different types, and a type that no kernel knows: columns stay where they belong."""
    from engine.compute.weights import load_weights
    from engine.loading.model import StoredTensor, TensorSource

    class Mixed:
        """q of Q8_0, k of a type without a kernel, v and gate of F32, up of Q4_1."""

        def __init__(self, sources: dict[str, TensorSource]) -> None:
            self.sources = sources

        def of(self, name: str) -> TensorSource:
            kinds = {"q_proj": "Q8_0", "k_proj": "Q5_0", "up_proj": "Q4_1"}
            return self.sources[next((kind for part, kind in kinds.items() if part in name), "F32")]

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(self.sources["F32"])

        def shape(self, name: str) -> tuple[int, ...]:
            return self.of(name).shape(name)

        def load(self, name: str) -> torch.Tensor:
            return self.of(name).load(name)

        def stored(self, name: str) -> StoredTensor:
            return self.of(name).stored(name)

    import attrs

    sources = {kind: model(kind, folder).source for kind in ("F32", "Q8_0", "Q5_0", "Q4_1")}
    mixed = attrs.evolve(model("F32", folder), source=Mixed(sources))
    packed = load_native(mixed, library())
    assert [part.weight.type for part in packed.layers[0].qkv.parts] == ["Q8_0", "F32"]
    assert [part.column for part in packed.layers[0].gate_up.parts] == [0, SHAPE["intermediate_size"]]
    with torch.inference_mode():
        dequantised = load_weights(mixed, torch.device("cpu"), torch.float32)
    found = []
    for loaded in (packed, dequantised):
        driver = Driver(loaded, rows=1)
        driver.start({0: text(0, PROMPT)})
        found.append(np.frombuffer(driver.spy.logits[0, PROMPT], np.float32))
    assert np.abs(found[0] - found[1]).max() < 1e-4


@pytest.mark.timeout(300)
def test_broken_order_is_noticed(folder: Path, tmp_path: Path) -> None:
    """Pieces of k in descending order, which only the path for many rows cuts at all: both comparisons fire."""
    source = changed_source(
        tmp_path,
        "product.h",
        (
            "for (int64_t k = 0; k < a.k; k += longest) {",
            "for (int64_t k = (a.k - 1) / longest * longest; k >= 0; k -= longest) {",
        ),
        ("a.rows < MANY, k == 0);", "a.rows < MANY, k == (a.k - 1) / longest * longest);"),
    )
    broken = Library(built(folder=source, cache=tmp_path / "cache", extra=("-O1",)))
    direct = 8 if broken.vector_bits == 512 else 4  # rows that dequantise in registers (product.h)
    found = row_differences(kernels_of(broken, 1), kernels_of(broken, 2), "F32", 33, 160, broken)
    assert {wrong.split(",")[0] for wrong in found} == {f"{rows} rows" for rows in ROWS if rows > direct}
    assert many_rows_differ(kernels_of(broken, 1), kernels_of(broken, 2), "F32", broken)
    loaded = load_native(model("F32", folder), broken)
    few = (1, 4, direct, direct + 1, 16)
    agrees = {rows: crowd(loaded, rows, 0, 1, 2, None) == alone("F32", folder) for rows in few}
    assert agrees == {rows: rows <= direct for rows in few}
