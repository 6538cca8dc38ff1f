"""Recorded steps of native kernels: records in a row, replayed by one native call without the interpreter lock.

The contract is that of engine/compute/graphs.py: addresses are frozen, values are live, recording executes nothing, and an
output is valid until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.compute.graphs import CALL_BYTES
from engine.native.kernels import Kernel
from engine.native.library import RECORD, Pool, Records


class NativeTape:
    """One recorded step. ``do`` appends; whatever a record points to is kept alive with it."""

    def __init__(self) -> None:
        self._encoded = bytearray()
        self._kept: list[Any] = []
        self._pool: Pool | None = None
        self._records: Records | None = None

    def __len__(self) -> int:
        return len(self._encoded) // RECORD

    @property
    def nbytes(self) -> int:
        return len(self._encoded)

    def do(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Raises ``TypeError`` for a kernel that is not native, ``BadCall`` for arguments that it must not see."""
        if not isinstance(kernel, Kernel):
            raise TypeError(f"{kernel!r} cannot be recorded on a native tape, which holds native kernels only")
        if self._pool is not None and kernel.pool is not self._pool:
            raise ValueError("one tape holds kernels of one pool of threads")
        self._encoded += kernel.encode(*arguments)
        self._kept.append(arguments)
        self._pool, self._records = kernel.pool, None

    def replay(self) -> None:
        if self._pool is None:
            return
        if self._records is None:
            self._records = Records.of(self._encoded)
        self._pool.run(self._records)


class NativeGraphs:
    """Tapes by shape, behind ``engine.compute.graphs.Graphs``."""

    def __init__(self) -> None:
        self.tapes: dict[tuple[int, int], NativeTape] = {}

    def record(self, shape: tuple[int, int], step: Callable[[Callable[..., None]], None]) -> None:
        tape = NativeTape()
        step(tape.do)
        self.tapes[shape] = tape

    def replay(self, shape: tuple[int, int]) -> None:
        """Raises ``KeyError`` when ``shape`` was never recorded."""
        self.tapes[shape].replay()

    def __contains__(self, shape: tuple[int, int]) -> bool:
        return shape in self.tapes

    @property
    def nbytes(self) -> int:
        return CALL_BYTES * sum(len(tape) for tape in self.tapes.values())
