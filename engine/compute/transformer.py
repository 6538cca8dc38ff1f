"""The transformer on torch kernels, as a ``Network``: decoder, cache and one arena measured for the largest steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.compute.arena import Arena
from engine.compute.decoder import Decoder
from engine.compute.graphs import Do, graphs_for
from engine.compute.kv import KVPool
from engine.compute.network import Sizes, Span, Tokens
from engine.compute.weights import Weights


class Transformer:
    def __init__(self, weights: Weights, sizes: Sizes) -> None:
        self.vocab_size = weights.config.vocab_size
        self.device = weights.device
        self.pool = KVPool(weights.config, sizes.num_blocks, sizes.block_size, weights.device, weights.dtype)
        self.arena = Arena(weights.device)
        self.graphs = graphs_for(weights.device)
        with torch.inference_mode():
            self._decoder = Decoder(weights, self.pool, self.arena, sizes.positions)
            self._measure(sizes)
        self.arena.allocate()

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        return self._decoder.decode(do, step, tables)

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        return self._decoder.prefill(do, step, spans, sampling)

    def _measure(self, sizes: Sizes) -> None:
        """Walks through the largest steps without computing, so that the arena knows their sizes."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        tables = zeros(sizes.rows, sizes.width)
        self._decoder.decode(_nothing, Tokens(*(zeros(sizes.rows) for _ in range(3))), tables)
        start, count = sizes.span
        step = Tokens(*(zeros(sizes.prefill_tokens) for _ in range(3)))
        self._decoder.prefill(_nothing, step, [Span(0, count, start, tables[:1])], zeros(sizes.prefill_samples))


def _nothing(kernel: Any, *arguments: Any) -> None:
    """The ``do`` of a step that is only measured."""
