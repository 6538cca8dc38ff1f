"""The seam between the runner, which turns plans into steps, and the network, which computes a step.

    runner    rows, block tables, slots, padding, static inputs, chunks cut into batches, record and replay, sampling
    network   a cache and kernels: reads and writes cache rows where the step's slots and tables say, answers with logits

A network calls ``do(kernel, *arguments)`` for everything that it computes in a decode step and takes all memory before that,
so that its recorder can keep the calls and repeat them over whatever the input buffers then hold. Kernels are the only thing
in which two networks may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.compute.graphs import Do, Graphs
from engine.compute.sampler import Draw


@attrs.frozen(eq=False)
class Tokens:
    """What a step computes: int64 [n] each. ``slots`` are where each position's keys and values go."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor


@attrs.frozen
class Span:
    """A run of positions ``start .. start + count - 1`` of one request, at ``first`` in the batch's tokens.

    ``table`` is int64 [1, blocks] on the compute device.
    """

    first: int
    count: int
    start: int
    table: Tensor


@attrs.frozen
class Sizes:
    """How large the steps of one runner can become; a network takes its memory by these."""

    num_blocks: int
    block_size: int
    rows: int  # of a decode step, padding included
    width: int  # blocks in the widest table
    prefill_tokens: int  # in one batch
    prefill_samples: int  # rows of one batch whose logits are wanted
    positions: int  # every position is below this
    span: tuple[int, int]  # start and count of the longest run of positions that ends at the length limit


class Pool(Protocol):
    """Where cache rows lie, as far as the runner must know it."""

    @property
    def trash_block(self) -> int:
        """The block that padded rows read and write, and that no request can own."""
        ...

    @property
    def trash_slot(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def slots(self, blocks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The slot of each (block, offset in it), int64 [n]. Slots of neighbouring offsets are neighbours."""
        ...


class Network(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def pool(self) -> Pool: ...

    @property
    def graphs(self) -> Graphs:
        """The recorder that fits these kernels."""
        ...

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        """One token for each of R requests with block tables [R, W]; returns the buffer of logits [R, vocab]."""
        ...

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        """Runs of positions of several requests at once. ``sampling`` int64 [m] are the tokens whose logits are wanted;
        returns the buffer of logits [m, vocab], or ``None`` when none are."""
        ...


@runtime_checkable
class Draws(Protocol):
    """A network that may draw tokens itself, where its logits are."""

    @property
    def draw(self) -> Draw | None: ...


def draw_of(network: Network) -> Draw | None:
    """How ``network`` draws tokens; None where it leaves that to the sampler."""
    return network.draw if isinstance(network, Draws) else None


MakeNetwork = Callable[[Sizes], Network]
