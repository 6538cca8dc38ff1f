"""One place for everything that a step writes on its way: named flat buffers, shared by all shapes.

    measure   the largest steps are walked through once without computing; ``take`` notes what they ask for
    allocate  each name gets one flat buffer of the largest size
    take      a contiguous tensor at the front of that buffer; the same address for every shape
    pack      several, one behind the other

Since a step uses a buffer only between two of its own kernels, shapes can share it; only one step runs at a time. So can
tensors of one step, under one name, where the first is read for the last time before the next is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

ALIGNMENT = 16  # elements: tensors that are packed begin at a cache line, as the buffer itself does


class Arena:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[str, tuple[int, torch.dtype]] = {}
        self._buffers: dict[str, torch.Tensor] | None = None

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of ``shape`` with undefined content. Raises ``RuntimeError`` if it is larger than measured."""
        numel = math.prod(shape)
        if self._buffers is None:
            known, known_dtype = self._sizes.get(name, (0, dtype))
            if known_dtype != dtype:
                raise RuntimeError(f"buffer {name!r} is taken as {dtype} and as {known_dtype}")
            self._sizes[name] = (max(known, numel), dtype)
            return torch.empty(shape, dtype=dtype, device="meta")
        buffer = self._buffers[name]
        if numel > buffer.numel():
            raise RuntimeError(f"buffer {name!r} holds {buffer.numel()} elements, but {shape} needs {numel}")
        return buffer[:numel].view(shape)

    def pack(self, name: str, *shapes: Sequence[int]) -> list[torch.Tensor]:
        """Tensors of these shapes in fp32 that do not overlap, from the front of one buffer. See ``take``."""
        sizes = [-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes]
        whole = self.take(name, sum(sizes))
        starts = itertools.accumulate(sizes, initial=0)
        return [
            whole[start : start + math.prod(shape)].view(*shape) for start, shape in zip(starts, shapes, strict=False)
        ]

    def allocate(self) -> None:
        """Ends measuring. Pages are touched only when used, so a size that never occurs costs nothing on CPU."""
        self._buffers = {
            name: torch.empty(numel, dtype=dtype, device=self._device) for name, (numel, dtype) in self._sizes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(numel * dtype.itemsize for numel, dtype in self._sizes.values())
