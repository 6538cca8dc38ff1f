"""The seam between runner and network: any network will do, and what the runner asks of it is all in ``Sizes`` and steps."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.compute.graphs import Do, TapeGraphs
from engine.compute.network import Sizes, Span, Tokens
from engine.compute.runner import ModelRunner, PlanRunner, sizes_of
from engine.compute.transformer import Transformer
from engine.control.limits import Limits
from engine.control.plan import Chunk, Decode, Eager, Plan, Replay, Seat
from engine.loading.synthetic import synthetic_model
from engine.request import SamplingParams, SamplingSpec
from tests.compute.driver import shared_weights

LIMITS = Limits(
    num_blocks=9,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=20,
    vocab_size=11,
    captures=((1, 3), (4, 8)),
)
GREEDY = SamplingSpec(SamplingParams(temperature=0.0), 0)


class Echo:
    """The next token is the input token plus one. Notes what it was handed; the cache is a list of slots."""

    vocab_size = 11
    device = torch.device("cpu")
    trash_block = 9
    trash_slot = 36
    nbytes = 0

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.graphs = TapeGraphs()
        self.pool = self
        self.written: list[list[int]] = []
        self.batches: list[list[tuple[int, int, int]]] = []
        self.logits = torch.zeros(sizes.rows, 11)

    def slots(self, blocks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return blocks * 4 + offsets

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        out = self.logits[: len(step.tokens)]
        do(lambda slots: self.written.append(slots.tolist()), step.slots)
        do(self._next, step.tokens, out)
        return out

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        self.written.append(step.slots.tolist())
        self.batches.append([(span.first, span.count, span.start) for span in spans])
        if sampling is None:
            return None
        out = self.logits[: len(sampling)]
        self._next(step.tokens[sampling], out)
        return out

    @staticmethod
    def _next(tokens: Tensor, out: Tensor) -> None:
        out.zero_()
        out[torch.arange(len(tokens)), (tokens + 1) % 11] = 1.0


def test_a_runner_over_any_network() -> None:
    runner = PlanRunner(LIMITS, Echo)
    runner.warm()
    network = runner.network
    assert isinstance(network, Echo)
    assert network.written == []  # recording computes nothing
    seat = Seat(5, 1, (3, 4, 5, 6, 7), 5, (2, 8), GREEDY)
    (first,) = runner.execute(Plan(0, seated=(seat,), chunks=(Chunk(5, 1, 0, seat.tokens, True),)))
    assert (first.token, network.written.pop()) == (8, [8, 9, 10, 11, 32])
    (second,) = runner.execute(Plan(1, decodes=(Decode(5, 1, 5, 8),), launch=Replay(4, 8, 3)))
    assert (second.token, network.written.pop()) == (9, [33, 36, 36, 36])  # padded rows write to the trash slot
    (third,) = runner.execute(Plan(2, decodes=(Decode(5, 1, 6, 9),), launch=Eager("scattered")))
    assert (third.token, network.written.pop()) == (10, [34])


@pytest.mark.parametrize(("most", "batches"), [(512, [[(0, 7, 0)]]), (3, [[(0, 3, 0)], [(0, 3, 3)], [(0, 1, 6)]])])
def test_prefill_is_cut_into_batches_of_a_given_size(most: int, batches: list[list[tuple[int, int, int]]]) -> None:
    runner = PlanRunner(LIMITS, Echo, prefill_tokens=most)
    seat = Seat(0, 0, (1, 2, 3, 4, 5, 6, 7), 7, (0, 1), GREEDY)
    (sampled,) = runner.execute(Plan(0, seated=(seat,), chunks=(Chunk(0, 0, 0, seat.tokens, True),)))
    network = runner.network
    assert isinstance(network, Echo)
    assert (sampled.token, network.batches) == (8, batches)


def test_sizes_cover_the_largest_steps() -> None:
    sizes = sizes_of(LIMITS)
    assert sizes == Sizes(
        num_blocks=9,
        block_size=4,
        rows=4,  # of the largest capture, though two requests can run
        width=8,
        prefill_tokens=40,  # two requests of the length limit
        prefill_samples=16,  # for prompt logprobs, though two requests can run
        positions=32,
        span=(0, 20),
    )
    assert sizes_of(LIMITS, 6).span == (14, 6)
    assert sizes_of(attrs.evolve(LIMITS, captures=())).width == 5


def test_the_model_runner_is_the_plan_runner_over_a_transformer() -> None:
    limits = attrs.evolve(LIMITS, vocab_size=512)
    runner = ModelRunner(synthetic_model(), limits, weights=shared_weights("llama"))
    assert isinstance(runner, PlanRunner)
    assert isinstance(runner.network, Transformer)
    assert runner.kv_bytes == runner.network.pool.nbytes > 0
