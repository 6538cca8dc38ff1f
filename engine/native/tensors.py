"""The tensors of a model in the form that the kernels take, from wherever they are: a checkpoint, or a packed file.

q, k and v read the same input, and so do gate and up: parts of one type become one weight, whose outputs lie side by side;
parts of different types stay apart and write to their own columns of the same buffer. A type that no kernel knows is
dequantised to F32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from engine.loading.model import ModelConfig, StoredTensor, TensorSource
from engine.native.library import INTEGER, Library, Packed, can_pack

Keep = Callable[[str, "Packed | Tensor"], "Packed | Tensor"]  # (name, made) -> what to hold on to
JOINED = "+"  # between the names of the parts that one weight is made of


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


class Tensors(Protocol):
    """Raises ``LoadError`` for a tensor that cannot be read."""

    def vector(self, name: str) -> Tensor:
        """fp32, contiguous."""
        ...

    def packed(self, name: str) -> Packed: ...

    def linear(self, *names: str) -> Linear:
        """``names`` without ``.weight`` and ``.bias``, all of one input."""
        ...


class SourceTensors:
    """From a checkpoint, packed one at a time. ``integer``: quantised linear layers are laid out for 8-bit activations.
    ``keep`` sees all that was made and says what is held."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        library: Library,
        *,
        integer: bool = False,
        keep: Keep | None = None,
    ) -> None:
        self._shapes = config.tensors()
        self._source, self._library = source, library
        self._integer = INTEGER if integer else {}
        self._keep = keep or (lambda name, made: made)

    def vector(self, name: str) -> Tensor:
        return self._held(name, self._source.load(name).reshape(-1).contiguous())

    def packed(self, name: str) -> Packed:
        stored = self._stored(name)
        return self._pack(name, stored.type, [stored], self._shapes[name][1])

    def linear(self, *names: str) -> Linear:
        groups: list[list[tuple[str, StoredTensor]]] = []
        for name in names:
            stored = self._stored(f"{name}.weight")
            if not groups or groups[-1][0][1].type != stored.type:
                groups.append([])
            groups[-1].append((name, stored))
        return joined(self._part(group, self._shapes[f"{names[0]}.weight"][1]) for group in groups)

    def _part(self, group: Sequence[tuple[str, StoredTensor]], k: int) -> tuple[Packed, Tensor | None]:
        name = JOINED.join(name for name, _ in group)
        kind = group[0][1].type
        weight = self._pack(f"{name}.weight", self._integer.get(kind, kind), [stored for _, stored in group], k)
        biases = [self._source.load(f"{part}.bias").reshape(-1) for part, _ in group if f"{part}.bias" in self._shapes]
        return weight, self._held(f"{name}.bias", torch.cat(biases)) if biases else None

    def _stored(self, name: str) -> StoredTensor:
        """As the file holds it, or as F32 where no kernel knows the type."""
        stored = self._source.stored(name)
        if can_pack(stored.type, self._shapes[name][-1]):
            return stored
        return StoredTensor("F32", self._source.load(name).view(torch.uint8))

    def _pack(self, name: str, kind: str, parts: Sequence[StoredTensor], k: int) -> Packed:
        rows = parts[0].data if len(parts) == 1 else torch.cat([part.data for part in parts])
        held = self._keep(name, self._library.pack(kind, rows, k))
        assert isinstance(held, Packed)
        return held

    def _held(self, name: str, made: Tensor) -> Tensor:
        held = self._keep(name, made)
        assert isinstance(held, Tensor)
        return held


def joined(made: Iterator[tuple[Packed, Tensor | None]]) -> Linear:
    parts: list[Part] = []
    for weight, bias in made:
        parts.append(Part(weight, bias, parts[-1].column + parts[-1].weight.n if parts else 0))
    return Linear(tuple(parts))
