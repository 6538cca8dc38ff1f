"""One place for everything that a step writes on its way: named flat buffers, shared by all shapes.

    measure   the largest steps are walked through once without computing; ``take`` notes what they ask for
    allocate  each name gets one flat buffer of the largest size
    take      a contiguous tensor at the front of that buffer; the same address for every shape

Since a step uses a buffer only between two of its own kernels, shapes can share it; only one step runs at a time.
"""

from __future__ import annotations

import math

import torch


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

    def allocate(self) -> None:
        """Ends measuring. Pages are touched only when used, so a size that never occurs costs nothing on CPU."""
        self._buffers = {
            name: torch.empty(numel, dtype=dtype, device=self._device) for name, (numel, dtype) in self._sizes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(numel * dtype.itemsize for numel, dtype in self._sizes.values())
