"""Scratch of a step: places that several tensors use change no byte, and the arena of the default model stays small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from engine.compute.arena import Arena
from engine.compute.runner import sizes_of
from engine.control.limits import Limits
from engine.loading import load_model
from engine.loading.synthetic import synthetic_model
from engine.native.network import NativeNetwork
from engine.native.runner import library
from engine.native.weights import NativeWeights, load_native
from tests.native.test_native_pairs import Case, alone_on, crowd_on, loaded

ARENA = "engine.native.network.Arena"
MOST = 14 * 2**20  # bytes, for the default model under default settings; with a place for each tensor it is 22.2 MiB


class Apart(Arena):
    """Every tensor has a buffer of its own."""

    def pack(self, name: str, *shapes: Sequence[int]) -> list[Tensor]:
        widths = [shape[-1] for shape in shapes]
        return [self.take(f"{name} {widths} {i}", *shape) for i, shape in enumerate(shapes)]


class Overlaid(Arena):
    """Tensors that are packed together lie on one another."""

    def pack(self, name: str, *shapes: Sequence[int]) -> list[Tensor]:
        return [self.take(name, *shape) for shape in shapes]


class OnePlace(Arena):
    """Everything that is packed lies in one place, whatever it is called."""

    def pack(self, name: str, *shapes: Sequence[int]) -> list[Tensor]:
        return super().pack("one", *shapes)


def default_weights() -> NativeWeights:
    """As far as sizes depend on them: the default model's configuration, and next to no numbers."""
    tiny = load_native(synthetic_model(num_layers=1), library())
    return attrs.evolve(tiny, config=attrs.evolve(load_model().config, num_layers=1))


def arena_of(weights: NativeWeights) -> Arena:
    """Default settings, but for the pool."""
    limits = Limits(
        num_blocks=512,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        vocab_size=weights.config.vocab_size,
        captures=tuple((rows, 512) for rows in range(1, 17)),
    )
    sizes = attrs.evolve(sizes_of(limits), num_blocks=1)
    return NativeNetwork(weights, sizes, weights.library.pool(2)).arena


def test_the_default_models_arena_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = default_weights()
    assert arena_of(weights).nbytes <= MOST
    monkeypatch.setattr(ARENA, Apart)
    assert MOST * 1.5 < arena_of(weights).nbytes < 23 * 2**20


def logits_of(weights: NativeWeights) -> list[dict[int, bytes]]:
    case = Case(
        "", torch.float32, rows=5, place="middle", chunk=16, prompt=61, threads=2, tape="padded", history="fresh"
    )
    return [alone_on(weights, torch.float32, 61), crowd_on(weights, case)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "Q4_1", "Q4_1 x int8"])
def test_places_that_several_tensors_use_change_no_byte(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, norms of heads, and the quantised rows that 8-bit activations write on the way."""
    weights = loaded(kind, tmp_path) if kind.startswith("Q") else load_native(synthetic_model(kind), library())
    shared = logits_of(weights)
    monkeypatch.setattr(ARENA, Apart)
    assert logits_of(weights) == shared
    # With 8-bit activations a linear layer reads a copy of its input, so that one place is wrong only where threads race.
    for wrong in (Overlaid,) if "int8" in kind else (Overlaid, OnePlace):
        monkeypatch.setattr(ARENA, wrong)
        assert logits_of(weights) != shared


@pytest.mark.parametrize("shapes", [[(3, 5), (2, 7), (1, 16)], [(1, 1)] * 4])
def test_packed_tensors_lie_behind_one_another(shapes: list[tuple[int, int]]) -> None:
    arena = Arena(torch.device("cpu"))
    assert all(tensor.is_meta for tensor in arena.pack("x", *shapes))
    arena.allocate()
    made: list[Any] = arena.pack("x", *shapes)
    for number, tensor in enumerate(made):
        tensor.fill_(number)
        assert tensor.is_contiguous()
        assert (tensor.data_ptr() - made[0].data_ptr()) % 64 == 0
    assert [set(tensor.flatten().tolist()) for tensor in made] == [{number} for number in range(len(shapes))]
    assert [tuple(tensor.shape) for tensor in made] == shapes
    with pytest.raises(RuntimeError, match="'x' holds"):
        arena.pack("x", *shapes, (1, 1))
