"""The decoder on Triton kernels, as a ``Network``: Llama, Mistral, Qwen2 and Qwen3 by ``ModelConfig``.

    x = embedding[tokens]
    each layer:  x += output(attention(rotate(qkv(norm(x)))))      keys and values are written to the pool on the way
                 x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x)), only for rows that sample

The addition to x is done by the norm that follows it. Lengths are read from ``positions`` when a step runs, so a recorded step
reads no more of the cache than its contexts hold. Batch-invariant, the matrix products are Triton's with one fixed tile, and a
row's bytes do not depend on how many rows there are; otherwise they are the vendor library's, which picks an algorithm by the
number of rows. Everything else is the same in both modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.compute.arena import Arena
from engine.compute.graphs import Do, graphs_for
from engine.compute.kernels import select_rows
from engine.compute.kv import KVPool
from engine.compute.linear import plain_product
from engine.compute.network import Sizes, Span, Tokens
from engine.compute.rope import rope_tables
from engine.cuda.kernels import SPLIT, Kernels, Layout
from engine.cuda.weights import Layer, Linear, TritonWeights

Attend = Callable[[Do, Tensor, int | None], None]  # do, one layer of the pool, window


@attrs.frozen(eq=False)
class _Buffers:
    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    delta: Tensor
    gate_up: Tensor
    activated: Tensor


class TritonNetwork:
    """Steps over one cache and one arena. Raises ``NoTriton`` where the kernels cannot run on the weights' device."""

    def __init__(
        self, weights: TritonWeights, sizes: Sizes, *, batch_invariant: bool = True, split: int = SPLIT
    ) -> None:
        config = self._config = weights.config
        self._weights, self.batch_invariant = weights, batch_invariant
        self.vocab_size = config.vocab_size
        self.device = weights.device
        self.pool = KVPool(config, sizes.num_blocks, sizes.block_size, self.device, weights.dtype)
        self.graphs = graphs_for(self.device)
        layout = self._layout = Layout(config.num_heads, config.num_kv_heads, config.head_dim, sizes.block_size)
        self._kernels = Kernels(layout, self.device, split=split)
        cos, sin = rope_tables(config, sizes.positions)
        self._rope = cos.to(self.device), sin.to(self.device)
        self.arena = Arena(self.device)
        self._measure(sizes)
        self.arena.allocate()

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        """One token for each of R requests with block tables [R, W]; returns the buffer of logits [R, vocab]."""
        rows, width = tables.shape
        buffers = self._buffers(rows)
        heads, splits = self._layout.heads, self._kernels.splits(width * self._layout.block_size)
        scratch = (
            self.arena.take("attention partials", rows, heads, splits, self._layout.dim),
            self.arena.take("attention stats", rows, heads, splits, 2),
        )

        def attend(do: Do, cache: Tensor, window: int | None) -> None:
            where = (cache, tables, step.positions, window, scratch, buffers.attended)
            do(self._kernels.attend_decode, buffers.qkv, *where)

        self._layers(do, step, buffers, attend)
        return self._logits(do, buffers, None, "logits")

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        """Runs of positions of several requests at once; logits [m, vocab] of the tokens ``sampling`` [m]."""
        buffers = self._buffers(len(step.tokens))

        def attend(do: Do, cache: Tensor, window: int | None) -> None:
            for span in spans:
                run = (span.first, span.count, span.start)
                do(self._kernels.attend_prefill, buffers.qkv, cache, span.table, run, window, buffers.attended)

        self._layers(do, step, buffers, attend)
        return None if sampling is None else self._logits(do, buffers, sampling, "prefill logits")

    def _layers(self, do: Do, step: Tokens, buffers: _Buffers, attend: Attend) -> None:
        """All layers; what the last one adds to the residual stream is left in ``delta``."""
        kernels, eps = self._kernels, self._config.rms_norm_eps
        do(select_rows, self._weights.embedding, step.tokens, buffers.hidden)
        delta: Tensor | None = None
        for layer, cache in zip(self._weights.layers, self.pool.layers, strict=True):
            do(kernels.norm, layer.input_norm, eps, buffers.hidden, delta, None, buffers.normed)
            self._linear(do, layer.qkv, buffers.normed, buffers.qkv)
            do(kernels.rotate, buffers.qkv, step.positions, step.slots, self._rope, layer.qk_norms, cache)
            attend(do, cache, layer.window)
            self._linear(do, layer.output, buffers.attended, buffers.delta)
            self._mlp(do, layer, buffers)
            delta = buffers.delta

    def _mlp(self, do: Do, layer: Layer, buffers: _Buffers) -> None:
        norm = (layer.post_norm, self._config.rms_norm_eps, buffers.hidden, buffers.delta, None, buffers.normed)
        do(self._kernels.norm, *norm)
        self._linear(do, layer.gate_up, buffers.normed, buffers.gate_up)
        do(self._kernels.silu_mul, buffers.gate_up, buffers.activated)
        self._linear(do, layer.down, buffers.activated, buffers.delta)

    def _linear(self, do: Do, linear: Linear, x: Tensor, out: Tensor) -> None:
        product = self._kernels.linear if self.batch_invariant else plain_product
        do(product, x, linear.weight, linear.bias, out)

    def _logits(self, do: Do, buffers: _Buffers, chosen: Tensor | None, name: str) -> Tensor:
        rows = len(buffers.hidden) if chosen is None else len(chosen)
        normed = self._take("head normed", rows, self._config.hidden_size)
        # A library's product answers in the type of its inputs; ours adds in fp32 and can leave it at that.
        dtype = torch.float32 if self.batch_invariant else self._weights.dtype
        logits = self.arena.take(name, rows, self._config.vocab_size, dtype=dtype)
        norm = (self._weights.final_norm, self._config.rms_norm_eps, buffers.hidden, buffers.delta, chosen, normed)
        do(self._kernels.norm, *norm)
        self._linear(do, self._weights.head, normed, logits)
        return logits

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.arena.take(name, *shape, dtype=self._weights.dtype)

    def _buffers(self, n: int) -> _Buffers:
        config, take = self._config, self._take
        return _Buffers(
            hidden=take("hidden", n, config.hidden_size),
            normed=take("normed", n, config.hidden_size),
            qkv=take("qkv", n, self._layout.width),
            attended=take("attended", n, config.num_heads * config.head_dim),
            delta=take("delta", n, config.hidden_size),
            gate_up=take("gate up", n, 2 * config.intermediate_size),
            activated=take("activated", n, config.intermediate_size),
        )

    def _measure(self, sizes: Sizes) -> None:
        """Walks through the largest steps without computing, so that the arena knows their sizes."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64)

        self.decode(_nothing, Tokens(*(zeros(sizes.rows) for _ in range(3))), zeros(sizes.rows, sizes.width))
        step = Tokens(*(zeros(sizes.prefill_tokens) for _ in range(3)))
        self.prefill(_nothing, step, [], zeros(sizes.prefill_samples))


def _nothing(kernel: Any, *arguments: Any) -> None:
    """The ``do`` of a step that is only measured."""
