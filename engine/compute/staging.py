"""Between host and device without waiting: what a step reads goes there in one copy, what it answers comes back in one.

    Upload      page-locked memory -> device, asynchronous. The host may write the memory again when the copy is done.
    Readback    device -> page-locked memory, asynchronous, and then the only wait of a step, on an event

A copy of pageable memory waits for the device where nobody sees it, and so does a copy between memory of unlike strides; both
classes copy flat page-locked buffers only. On a CPU the same code runs over ordinary memory, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Parts = Mapping[str, tuple[int, ...]]  # the shape of each part, in the order in which they lie


class Event(Protocol):
    """What ``torch.cuda.Event`` does."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Done:
    """On a CPU everything has happened by the time that the call returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _event(device: torch.device) -> Event:
    if device.type != "cuda":
        return _Done()
    event: Event = torch.cuda.Event()
    return event


class Upload:
    """``numel`` int64 numbers, on the host and on the device. Parts of a shape lie one behind the other, without gaps."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._host = torch.empty(numel, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers: npt.NDArray[np.int64] = self._host.numpy()
        self._device = torch.zeros(numel, dtype=torch.int64, device=device)
        self._done = _event(device)
        self.copies = 0

    def write(self, parts: dict[str, npt.NDArray[np.int64]]) -> dict[str, Tensor]:
        """All parts to the device, in one copy; returns them there, contiguous. Raises ``ValueError`` if they do not fit."""
        shapes = {name: part.shape for name, part in parts.items()}
        views = self.views(shapes)
        self._done.synchronize()  # the copy before this one may be under way still, after a step that failed
        end = 0
        for part in parts.values():
            self._numbers[end : end + part.size] = part.reshape(-1)
            end += part.size
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        self._done.record()
        self.copies += 1
        return views

    def views(self, shapes: Parts) -> dict[str, Tensor]:
        """Where parts of these shapes lie on the device: the same addresses for the same shapes."""
        views: dict[str, Tensor] = {}
        end = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            if end + size > self._device.numel():
                raise ValueError(f"{name} ends at {end + size}, but {self._device.numel()} numbers fit")
            views[name] = self._device[end : end + size].view(shape)
            end += size
        return views


def finite_argmax(logits: Tensor) -> Tensor:
    """int64 [n]: the argmax of each row of ``logits`` [n, vocab], of equals the first; -1 where it is not finite, which is so
    where the row holds NaN. Nothing waits."""
    best = logits.argmax(dim=1)
    return torch.where(logits.gather(1, best[:, None])[:, 0].isfinite(), best, -1)


class Readback:
    """The answers of a step over up to ``rows`` rows: each one's likeliest token, and whole rows of logits where asked."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        numel = rows * (1 + vocab_size)
        self._device = torch.empty(numel, dtype=torch.float32, device=device)
        self._host = torch.empty(numel, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._done = _event(device)
        self._upload = Upload(rows, device)
        self.copies = 0

    def read(self, logits: Tensor, chosen: Sequence[int]) -> tuple[list[int], npt.NDArray[np.float32]]:
        """The argmax of each row of ``logits`` [n, vocab] fp32 (of equals the first; -1 where it is not finite), and rows
        ``chosen`` [k, vocab].

        The rows are a view that the next call overwrites.
        """
        n, k = len(logits), len(chosen)
        end = n + k * self._vocab_size
        if end > self._device.numel():
            raise ValueError(f"{n} rows and {k} of them whole need {end} numbers, but {self._device.numel()} fit")
        self._device[:n].view(torch.int32).copy_(finite_argmax(logits))
        if k:
            where = self._upload.write({"rows": np.asarray(chosen, dtype=np.int64)})["rows"]
            torch.index_select(logits, 0, where, out=self._device[n:end].view(k, self._vocab_size))
        self._host[:end].copy_(self._device[:end], non_blocking=True)
        self._done.record()
        self.copies += 1
        self._done.synchronize()
        tokens: list[int] = self._host[:n].view(torch.int32).tolist()
        return tokens, self._host[n:end].view(k, self._vocab_size).numpy()
