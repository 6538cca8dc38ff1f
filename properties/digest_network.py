"""A network of digests: what a transformer does with its cache, without the arithmetic in between.

The cache is one int64 tensor [cache rows, 2]: the digest of the position that lies there, and the number of the step that
wrote it. A decode step writes each row's digest to its slot, computed from what it reads through its block table, and then
reads all positions through the table again to say what follows. Prefill does the same, one position after the other. All
of the decode step goes through ``do``, over the runner's static buffers, so it is recorded and replayed like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.compute.graphs import Do, TapeGraphs
from engine.compute.network import Sizes, Span, Tokens
from engine.trace import VOCAB
from properties.digests import FACTOR, MASK, NEXT, PLACE, TOKEN, digest, following, read

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_SHIFT_29, _SHIFT_32 = np.uint64(29), np.uint64(32)
_FACTOR, _NEXT, _TOKEN, _PLACE = (np.uint64(value) for value in (FACTOR, NEXT, TOKEN, PLACE))
_VOCAB = np.uint64(VOCAB)
STEPS = 30  # likelihoods that are told apart, far more than a request can mask


class DigestPool:
    """One cache row a position. Behind the requests' blocks lies the trash block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.trash_block = num_blocks
        self.rows = torch.zeros(((num_blocks + 1) * block_size, 2), dtype=torch.int64)

    @property
    def trash_slot(self) -> int:
        return self.trash_block * self.block_size

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def slots(self, blocks: I64, offsets: I64) -> I64:
        return blocks * self.block_size + offsets


class DigestNetwork:
    """``stamp`` is written beside every digest; the harness counts it up."""

    def __init__(self, sizes: Sizes) -> None:
        self.vocab_size = VOCAB
        self.device = torch.device("cpu")
        self.pool = DigestPool(sizes.num_blocks, sizes.block_size)
        self.graphs = TapeGraphs()
        self.stamp = 0
        self._rows: U64 = self.pool.rows.numpy().view(np.uint64)
        lanes = np.arange(max(sizes.width * sizes.block_size, sizes.positions))
        self._lanes: I64 = lanes
        self._blocks, self._offsets = lanes // sizes.block_size, lanes % sizes.block_size
        self._places: U64 = lanes.astype(np.uint64) * _PLACE
        self._ladder = torch.from_numpy(ladder())
        self._logits = torch.empty((max(sizes.rows, sizes.prefill_samples), VOCAB), dtype=torch.float32)

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        rows, lanes = tables.shape[0], tables.shape[1] * self.pool.block_size
        tokens, positions, slots = (part.numpy() for part in (step.tokens, step.positions, step.slots))
        logits = self._logits[:rows]
        do(self._write, tokens, positions, slots, tables.numpy(), lanes)
        do(self._answer, positions, tables.numpy(), lanes, logits)
        return logits

    # The kernels of a decode step ----------------------------------------------------------------------------------

    def _write(self, tokens: I64, positions: I64, slots: I64, tables: I64, lanes: int) -> None:
        before = self._read(tables, positions, lanes)
        text = tokens.astype(np.uint64) * _TOKEN + positions.astype(np.uint64) * _PLACE
        self._rows[slots, 0] = _mix(text + before)
        self._rows[slots, 1] = self.stamp

    def _answer(self, positions: I64, tables: I64, lanes: int, logits: Tensor) -> None:
        total = self._read(tables, positions + 1, lanes)
        likeliest = (_mix(total ^ _NEXT) % _VOCAB).astype(np.int64)
        torch.index_select(self._ladder, 0, torch.from_numpy(likeliest), out=logits)

    def _read(self, tables: I64, counts: I64, lanes: int) -> U64:
        """The sums of the first ``counts`` positions [R] of each table [R, W]."""
        cells = tables[:, self._blocks[:lanes]] * self.pool.block_size + self._offsets[:lanes]
        seen = _mix(self._rows[cells, 0] ^ self._places[:lanes])
        seen[self._lanes[:lanes] >= counts[:, None]] = 0
        total: U64 = seen.sum(axis=1, dtype=np.uint64)
        return total

    # Prefill -------------------------------------------------------------------------------------------------------

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        tokens, positions, slots = (part.tolist() for part in (step.tokens, step.positions, step.slots))
        totals = [0] * len(tokens)
        for span in spans:
            self._span(span, tokens, positions, slots, totals)
        if sampling is None:
            return None
        chosen = torch.tensor([following(totals[at]) for at in sampling.tolist()], dtype=torch.int64)
        return torch.index_select(self._ladder, 0, chosen, out=self._logits[: len(sampling)])

    def _span(self, span: Span, tokens: list[int], positions: list[int], slots: list[int], totals: list[int]) -> None:
        """Each position is written to its slot and read back through the table before the next one is computed."""
        table = span.table.numpy()
        cells = (table[0, self._blocks[: span.start + span.count]]) * self.pool.block_size
        cells += self._offsets[: span.start + span.count]
        held = self._rows[:, 0]
        total = int(self._read(table, np.array([span.start]), table.shape[1] * self.pool.block_size)[0])
        for at in range(span.first, span.first + span.count):
            held[slots[at]] = digest(tokens[at], positions[at], total)
            self._rows[slots[at], 1] = self.stamp
            visible = span.start + at - span.first
            total = total + read(int(held[cells[visible]]), visible) & MASK
            totals[at] = total


def ladder() -> npt.NDArray[np.float32]:
    """Logits [likeliest token, token]: likelihood falls from the likeliest upwards, and around. Each step is ten times the one
    before and the first is large, so that no temperature, noise, bias or penalty changes the order; only a mask does."""
    tokens = np.arange(VOCAB)
    place = (tokens[None, :] - tokens[:, None]) % VOCAB
    below = -1e4 * 10.0 ** np.minimum(place - 1, STEPS)
    return np.where(place == 0, 0.0, below).astype(np.float32)


def _mix(x: U64) -> U64:
    """``digests.mix`` of many numbers."""
    x = x ^ (x >> _SHIFT_32)
    x = x * _FACTOR
    x ^= x >> _SHIFT_29
    x *= _FACTOR
    x ^= x >> _SHIFT_32
    return x
