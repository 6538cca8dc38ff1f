"""The model's tensors as the native kernels want them: packed in the type that they came in, one at a time.

q, k and v read the same input, and so do gate and up: parts of one type become one weight, whose outputs lie side by side;
parts of different types stay apart and write to their own columns of the same buffer. A type that no kernel knows is
dequantised to F32. A tied head is the embedding itself, since a row of the table can be read from the panels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from engine.loading.model import LoadedModel, ModelConfig, StoredTensor, TensorSource
from engine.native.library import Library, Packed, can_pack

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@attrs.frozen(eq=False)
class Part:
    """Some of a linear layer's outputs: those from ``column`` on."""

    weight: Packed
    bias: Tensor | None
    column: int


@attrs.frozen(eq=False)
class Linear:
    """One input, all outputs [n], k numbers each."""

    parts: tuple[Part, ...]

    @property
    def n(self) -> int:
        return sum(part.weight.n for part in self.parts)


@attrs.frozen(eq=False)
class Layer:
    input_norm: Tensor  # [hidden]
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor, float] | None  # of q and of k, each [head_dim], and eps
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@attrs.frozen(eq=False)
class NativeWeights:
    """Everything that runners of one model can share. ``types``: how many bytes of packed weights are of which type."""

    config: ModelConfig
    library: Library
    embedding: Packed
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Packed
    types: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.types.values())


def load_native(model: LoadedModel, library: Library, progress: Progress | None = None) -> NativeWeights:
    """Reads and packs the weights. Raises ``LoadError`` for a tensor that cannot be read."""
    config = model.config
    reader = _Reader(config, model.source, library)
    total = config.num_layers + 1
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(config, reader, index))
        if progress is not None:
            progress("loading weights", index + 1, total)
    embedding = reader.packed("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else reader.packed("lm_head.weight")
    final_norm = reader.vector("model.norm.weight")
    if progress is not None:
        progress("loading weights", total, total)
    return NativeWeights(config, library, embedding, tuple(layers), final_norm, head, reader.types)


class _Reader:
    """Tensors by name; counts what it packed."""

    def __init__(self, config: ModelConfig, source: TensorSource, library: Library) -> None:
        self._shapes = config.tensors()
        self._source, self._library = source, library
        self.types: dict[str, int] = {}

    def vector(self, name: str) -> Tensor:
        return self._source.load(name).reshape(-1).contiguous()

    def find(self, name: str) -> Tensor | None:
        """A vector that the configuration may not have."""
        return self.vector(name) if name in self._shapes else None

    def packed(self, name: str) -> Packed:
        return self._pack([self._stored(name)], self._shapes[name][1])

    def linear(self, *names: str) -> Linear:
        """``names`` without ``.weight`` and ``.bias``, all of one input."""
        groups: list[list[tuple[str, StoredTensor]]] = []
        for name in names:
            stored = self._stored(f"{name}.weight")
            if not groups or groups[-1][0][1].type != stored.type:
                groups.append([])
            groups[-1].append((name, stored))
        parts: list[Part] = []
        column = 0
        for group in groups:
            weight = self._pack([stored for _, stored in group], self._shapes[f"{names[0]}.weight"][1])
            biases = [bias for name, _ in group if (bias := self.find(f"{name}.bias")) is not None]
            parts.append(Part(weight, torch.cat(biases) if biases else None, column))
            column += weight.n
        return Linear(tuple(parts))

    def _stored(self, name: str) -> StoredTensor:
        """As the file holds it, or as F32 where no kernel knows the type."""
        stored = self._source.stored(name)
        if can_pack(stored.type, self._shapes[name][-1]):
            return stored
        return StoredTensor("F32", self._source.load(name).view(torch.uint8))

    def _pack(self, parts: Sequence[StoredTensor], k: int) -> Packed:
        rows = parts[0].data if len(parts) == 1 else torch.cat([part.data for part in parts])
        packed = self._library.pack(parts[0].type, rows, k)
        self.types[packed.type] = self.types.get(packed.type, 0) + packed.nbytes
        return packed


def _layer(config: ModelConfig, reader: _Reader, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qk_norms = None
    if config.qk_norm:
        q_norm, k_norm = reader.vector(f"{attention}q_norm.weight"), reader.vector(f"{attention}k_norm.weight")
        qk_norms = (q_norm, k_norm, config.rms_norm_eps)
    return Layer(
        input_norm=reader.vector(f"{prefix}input_layernorm.weight"),
        qkv=reader.linear(*(f"{attention}{part}_proj" for part in "qkv")),
        qk_norms=qk_norms,
        output=reader.linear(f"{attention}o_proj"),
        post_norm=reader.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=reader.linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=reader.linear(f"{mlp}down_proj"),
        window=config.sliding_windows[index] if config.sliding_windows else None,
    )
