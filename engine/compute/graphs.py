"""Recorded decode steps: a tape on CPU, CUDA graphs on CUDA, under one contract.

A step is a function that calls ``do(kernel, *tensors)`` for everything that it computes. Run eagerly, ``do`` calls the
kernel. Recorded, the addresses are frozen and the values are not: a replay reads whatever its input buffers hold by
then, and its output buffer is valid until the next replay. On CPU recording executes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Do = Callable[..., None]  # do(kernel, *arguments)
Step = Callable[[Do], None]
Shape = tuple[int, int]  # rows, width in blocks
CALL_BYTES = 1024  # what a call on a tape keeps: views of tensors, and the tuple that holds them


def eagerly(kernel: Callable[..., None], *arguments: Any) -> None:
    """The ``do`` of a step that is not recorded."""
    kernel(*arguments)


class Tape:
    """One recorded step: kernel calls with the tensors, hence the addresses, that they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def do(self, kernel: Callable[..., None], *arguments: Any) -> None:
        self.calls.append((kernel, arguments))

    def replay(self) -> None:
        for kernel, arguments in self.calls:
            kernel(*arguments)


class Graphs(Protocol):
    def record(self, shape: Shape, step: Step) -> None: ...

    def replay(self, shape: Shape) -> None:
        """Raises ``KeyError`` when ``shape`` was never recorded."""
        ...

    def __contains__(self, shape: Shape) -> bool: ...

    @property
    def nbytes(self) -> int:
        """What the graphs hold: measured on CUDA; on CPU about, by the number of calls."""
        ...


class TapeGraphs:
    """Tapes by shape, for the CPU."""

    def __init__(self) -> None:
        self._tapes: dict[Shape, Tape] = {}

    def record(self, shape: Shape, step: Step) -> None:
        tape = Tape()
        step(tape.do)
        self._tapes[shape] = tape

    def replay(self, shape: Shape) -> None:
        self._tapes[shape].replay()

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._tapes

    @property
    def nbytes(self) -> int:
        return CALL_BYTES * sum(len(tape.calls) for tape in self._tapes.values())


class CudaGraphs:
    """CUDA graphs by shape. All share one memory pool, so the largest shape is best recorded first."""

    def __init__(self, device: torch.device, warmups: int = 2) -> None:
        self._device = device
        self._warmups = warmups
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self.nbytes = 0

    def record(self, shape: Shape, step: Step) -> None:
        """Runs the step on a side stream first: libraries set themselves up lazily, which must not be captured."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(self._warmups):
                step(eagerly)
        torch.cuda.current_stream(self._device).wait_stream(side)
        free = torch.cuda.mem_get_info(self._device)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step(eagerly)
        self._pool = self._pool or graph.pool()
        self._graphs[shape] = graph
        self.nbytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])

    def replay(self, shape: Shape) -> None:
        self._graphs[shape].replay()

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._graphs


def graphs_for(device: torch.device) -> Graphs:
    return CudaGraphs(device) if device.type == "cuda" else TapeGraphs()
