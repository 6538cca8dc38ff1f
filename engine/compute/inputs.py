"""The static inputs of decode steps, each with the value that its padded rows hold.

    row        0 .. n-1                         n .. rows-1 (padding)
    tokens     the row's last token             0
    positions  where it sits                    0
    slots      where its K/V goes               the trash block's first
    tables     its block table, rest is trash   the trash block

So a padded row computes something finite, reads and writes the trash block only, and nobody reads its logits. The
declaration is a table, so that a test can poison every buffer and see that nothing of it survives ``fill``.

A step of the same rows in the same shape, each one position further, is written by ``go_on``: what did not change stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.compute.network import Pool, Tokens
from engine.compute.staging import Upload


@attrs.frozen
class Padding:
    """One static buffer: its name, whether it has a column per block of the table, and its value in padded rows."""

    name: str
    wide: bool
    fill: int


def declare(pool: Pool) -> tuple[Padding, ...]:
    return (
        Padding("tokens", False, 0),
        Padding("positions", False, 0),
        Padding("slots", False, pool.trash_slot),
        Padding("tables", True, pool.trash_block),
    )


class StaticInputs:
    """Buffers of ``rows`` rows and tables of ``width`` blocks, int64.

    ``staged``, they go to the device in one copy, and a step reads them there; by default on CUDA.
    """

    def __init__(self, rows: int, width: int, pool: Pool, device: torch.device, *, staged: bool | None = None) -> None:
        self.padding = declare(pool)
        staged = device.type == "cuda" if staged is None else staged
        self._upload = Upload(sum(rows * (width if e.wide else 1) for e in self.padding), device) if staged else None
        self.host: dict[str, Tensor] = {}
        # The host's memory again. Numpy writes it at less cost than torch, and single cells cost least as those of a memoryview:
        # after a step of kernels, each library function that is entered is first fetched into the caches.
        self._arrays: dict[str, npt.NDArray[np.int64]] = {}
        self._cells: dict[str, memoryview[int]] = {}
        for entry in self.padding:
            shape = (rows, width) if entry.wide else (rows,)
            host = torch.full(shape, entry.fill, dtype=torch.int64)
            self.host[entry.name] = host
            array = self._arrays[entry.name] = host.numpy()
            self._cells[entry.name] = array.reshape(-1).data

    def fill(self, values: dict[str, npt.NDArray[np.int64]], rows: int, width: int) -> None:
        """Writes n rows of ``values`` and pads to ``rows``; every cell of the shape (rows, width) is written.

        Raises ``ValueError`` when a value has more rows than the shape.
        """
        for entry in self.padding:
            value = values[entry.name]
            n = len(value)
            if n > rows:
                raise ValueError(f"{entry.name} has {n} rows, but the step has {rows}")
            host = self._arrays[entry.name][:rows]
            if entry.wide:
                host, value = host[:, :width], value[:, :width]
            host[:n] = value
            host[n:] = entry.fill
        self.send(rows, width)

    def go_on(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        entered: Mapping[int, int],
        grown: Mapping[int, npt.NDArray[np.int64]],
        rows: int,
        width: int,
    ) -> None:
        """Writes what differs from the step before, of which every row is one position behind. The shape is the same, so padded
        rows stand. ``entered``: the slots of rows that enter a block; others stay in theirs, where the next slot is one further.
        ``grown``: the whole tables of rows with a new block."""
        cells, slots = self._cells, self._cells["slots"]
        for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            cells["tokens"][row] = token
            cells["positions"][row] = position
            slots[row] = entered[row] if row in entered else slots[row] + 1
        for row, table in grown.items():
            self._arrays["tables"][row, :width] = table[:width]
        self.send(rows, width)

    def send(self, rows: int, width: int) -> None:
        """What was written into ``host`` to where a step of this shape reads it, if that is elsewhere."""
        if self._upload is not None:
            written = {entry.name: self._view(entry, rows, width).numpy() for entry in self.padding}
            self._upload.write(written)

    def step(self, rows: int, width: int) -> tuple[Tokens, Tensor]:
        """The device buffers as a step of this shape sees them: tokens and tables [rows, width]."""
        if self._upload is not None:
            shapes = {entry.name: (rows, width) if entry.wide else (rows,) for entry in self.padding}
            views = self._upload.views(shapes)
        else:
            views = {entry.name: self._view(entry, rows, width) for entry in self.padding}
        return Tokens(views["tokens"], views["positions"], views["slots"]), views["tables"]

    def _view(self, entry: Padding, rows: int, width: int) -> Tensor:
        buffer = self.host[entry.name]
        return buffer[:rows, :width] if entry.wide else buffer[:rows]


def as_rows(values: Sequence[int] | Sequence[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
