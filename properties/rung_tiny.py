"""The tiny rung: a small random transformer in fp32, real attention, real sampler, recorded graphs. ``native`` is the same on
the native kernels and their tape with K/V in fp16, ``triton`` on the GPU's kernels in their interpreter, ``gpu`` on CUDA with
CUDA graphs.

The solo run of each request is computed first and feeds the specification; what a request is told beside its tokens, logprobs and
digests of logits, is compared with it, too. Before every step the harness fills every cache
cell that nobody owns with NaN, so that whoever reads one is seen; after it, exactly the scheduled cells may have changed.
What it cannot see: a mistake in arithmetic that the solo run makes as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from engine.compute.kv import KVPool
from engine.control.plan import Sampled
from engine.control.record import StepRecord
from engine.trace import Shape, Submit, prompt_tokens
from properties.cache_cells import Touched, place
from properties.checks import Fact
from properties.compute_rung import ComputeRung, must_fit, some
from properties.diff import Known
from properties.reports import Reports
from properties.sampled import Sampling, sampling_of
from properties.solo import askable
from properties.solo_transformer import Question, alone
from properties.tiny_network import tiny_network

NOBODY = float("nan")
MOST_CELLS = 1 << 18
_BITS = {2: torch.int16, 4: torch.int32}


class SoloOracle:
    """A request alone on the tiny transformer."""

    def __init__(self, kernels: str, shape: Shape) -> None:
        self._kernels, self._shape = kernels, shape
        self._requests: dict[int, tuple[Question, int]] = {}  # and how many tokens may be wanted

    def stop_ids(self, first_id: int, event: Submit) -> frozenset[int]:
        prompt = prompt_tokens(event.prompt)
        longest = self._shape.max_model_len
        if not askable(prompt) or len(prompt) >= longest:
            return frozenset()  # the door refuses it, so nobody will ask
        stops: frozenset[int] = frozenset()
        if event.stop_at is not None and len(prompt) + event.stop_at <= longest:
            free = [self._question(prompt, sampling) for sampling in sampling_of(event, frozenset())]
            stops = frozenset(alone(question).tokens(event.stop_at)[-1] for question in free)
        wanted = min(event.max_tokens or longest, longest - len(prompt))
        for request, sampling in enumerate(sampling_of(event, stops), first_id):
            self._requests[request] = self._question(prompt, sampling), wanted
        return stops

    def token(self, request: int, k: int) -> int:
        question, wanted = self._requests[request]
        return alone(question).tokens(max(wanted, k + 1))[k]

    def sample(self, request: int, k: int) -> Sampled | None:
        """See ``reports.Oracle``."""
        question, wanted = self._requests[request]
        return alone(question).samples(max(wanted, k + 1))[k] if question.sampling.asks else None

    def _question(self, prompt: tuple[int, ...], sampling: Sampling) -> Question:
        return Question(self._kernels, self._shape.max_model_len, prompt, sampling)


class TensorWatch:
    """Keys and values of all layers, cell by cell and byte by byte. A cell's numbers: [K and V, heads, dim] of each layer."""

    def __init__(self, pool: KVPool, shape: Shape) -> None:
        self._pool, self._block_size = pool, shape.block_size
        self._before: list[Tensor] = []

    def before(self, expected: Touched) -> None:
        device = self._pool.layers[0].device
        nobody = np.ones((self._pool.zero_block + 1, self._block_size), dtype=np.bool_)
        nobody[: len(expected.owned)] = ~expected.owned
        nobody[self._pool.zero_block] = False
        where = torch.from_numpy(nobody).to(device)[:, None, :, None]
        for part in self._pool.parts:
            part.masked_fill_(where, NOBODY)
        self._before = [part.clone() for part in self._pool.parts]

    def after(self, expected: Touched) -> tuple[Fact, ...]:
        changed, missing = self._seen()
        trash = changed[self._pool.trash_block].any()
        changed, missing = changed.ravel(), missing.ravel()
        cells = range(self._pool.trash_block * self._block_size)
        facts = [
            self._fact(cell, expected, "written", "untouched")
            for cell in cells
            if changed[cell] and cell not in expected.scheduled
        ]
        if not expected.failed:
            facts += [
                self._fact(cell, expected, "not written", "written") for cell in expected.scheduled if missing[cell]
            ]
            if trash != expected.padded:
                said = ("written", "untouched")
                facts.append(Fact("trash block", *(said if trash else said[::-1])))
        if changed[self._pool.zero_block * self._block_size :].any():
            facts.append(Fact("zero block", "written", "untouched"))
        return some(facts)

    def _seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Bool [blocks, block_size]: cells in which any byte changed, and cells in which any number is NaN now."""
        changed, missing = [], []
        for part, before in zip(self._pool.parts, self._before, strict=True):
            bits = _BITS[part.element_size()]
            changed.append((part.view(bits) != before.view(bits)).any(1).any(-1))
            missing.append(part.isnan().any(1).any(-1))
        return torch.stack(changed).any(0).cpu().numpy(), torch.stack(missing).any(0).cpu().numpy()

    def _fact(self, cell: int, expected: Touched, mine: str, theirs: str) -> Fact:
        return Fact(place(cell, self._block_size, expected.scheduled.get(cell)), mine, theirs)


class TinyRung(ComputeRung):
    """Raises ``Unavailable`` where this machine has no such kernels."""

    name: ClassVar[str] = "tiny"
    kernels: ClassVar[str] = "torch"

    def __init__(self, shape: Shape) -> None:
        must_fit(shape, self.name, MOST_CELLS)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # on CPU the bits of a row may depend on their number
        oracle = SoloOracle(self.kernels, shape)
        super().__init__(shape, tiny_network(self.kernels), oracle)
        self._reports = Reports(oracle)

    def misled(self, record: StepRecord, known: Mapping[int, Known]) -> tuple[Fact, ...]:
        return self._reports.facts(record, known)

    def happened(self) -> Mapping[str, int]:
        return self._reports.happened

    def watch(self) -> TensorWatch:
        pool = self.network.pool
        assert isinstance(pool, KVPool)
        return TensorWatch(pool, self._shape)


class NativeRung(TinyRung):
    name: ClassVar[str] = "native"
    kernels: ClassVar[str] = "native"


class TritonRung(TinyRung):
    name: ClassVar[str] = "triton"
    kernels: ClassVar[str] = "triton"
    staged: ClassVar[bool | None] = True  # as on a GPU


class GpuRung(TinyRung):
    name: ClassVar[str] = "gpu"
    kernels: ClassVar[str] = "cuda"
