"""The decoder on native kernels, as a ``Network``: Llama, Mistral, Qwen2 and Qwen3 by ``ModelConfig``.

    x = embedding[tokens]
    each layer:  x += output(attention(rotate(qkv(norm(x)))))      keys and values are written to the pool on the way
                 x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x)), only for rows that sample

The addition to x is done by the norm that follows it. Lengths are read from ``positions`` when a step runs, so what a step
costs follows the contexts and not the width that it was recorded with. Decode and prefill differ in one argument of
attention: a table for each row, or one table for all rows of a span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from engine.compute.arena import Arena
from engine.compute.graphs import Do, eagerly
from engine.compute.kv import KVPool
from engine.compute.network import Sizes, Span, Tokens
from engine.compute.rope import rope_tables
from engine.compute.tiles import tiles_for
from engine.native.draw import NativeDraw
from engine.native.kernels import GROUP, LANES, HeadLayout, Kernels, panels_of
from engine.native.library import TYPES, Pool
from engine.native.tape import NativeGraphs, NativeTape
from engine.native.tensors import Linear
from engine.native.weights import Layer, NativeWeights

UNITS_PER_THREAD = 4  # so that threads which the machine slows down leave their share to the others

T = TypeVar("T")
Attend = Callable[[Do, Tensor, int | None], None]  # do, one layer of the pool, window


@attrs.frozen(eq=False)
class _Buffers:
    """What passes between the kernels of a layer. Two places are used by several, each when the one before was read:

    wide     qkv | attended | delta      gate up            . . . . | delta      in the end the logits of a prefill
    narrow   normed                      normed, activated
             attention                   MLP                next layer
    """

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    delta: Tensor
    gate_up: Tensor
    activated: Tensor


class NativeNetwork:
    """Steps over one cache and one arena; ``threads`` may be shared by several networks. ``kv_dtype``: fp32, fp16 or bf16."""

    def __init__(
        self, weights: NativeWeights, sizes: Sizes, threads: Pool, kv_dtype: torch.dtype = torch.float32
    ) -> None:
        config = self._config = weights.config
        self._weights, self._kernels = weights, Kernels(threads)
        self.vocab_size = config.vocab_size
        self.device = torch.device("cpu")
        self.pool = KVPool(config, sizes.num_blocks, sizes.block_size, self.device, kv_dtype, turned=True)
        self.graphs = NativeGraphs()
        blocks = self.pool.layers[0].shape[1]
        self._heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, sizes.block_size, blocks)
        self._rope = rope_tables(config, sizes.positions)
        self.arena = Arena(self.device)
        self._measure(sizes)
        self.arena.allocate()
        self.draw = NativeDraw(
            self._kernels, sizes.rows, self.vocab_size, self.arena.take("logits", 1, self.vocab_size), self._peaks
        )

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        """One token for each of R requests with block tables [R, W]; returns the buffer of logits [R, vocab]."""
        return _together(do, lambda do: self._decode(do, step, tables))

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        """Runs of positions of several requests at once; logits [m, vocab] of the tokens ``sampling`` [m], valid until the
        next step of either kind."""
        return _together(do, lambda do: self._prefill(do, step, spans, sampling))

    def _decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        buffers = self._buffers(len(step.tokens))
        split = self._split(*tables.shape)

        def attend(do: Do, cache: Tensor, window: int | None) -> None:
            where = (buffers.qkv, step.positions, tables)
            do(self._kernels.attend, self._heads, *where, cache, window, buffers.attended, split)

        self._layers(do, step, buffers, attend)
        rows = len(buffers.hidden)
        normed, logits = self._head_normed(rows), self.arena.take("logits", rows, self.vocab_size)
        norm = (self._weights.final_norm, self._config.rms_norm_eps, buffers.hidden, buffers.delta, None, normed)
        do(self._kernels.norm, *norm)
        do(self._kernels.head, self._weights.head, normed, logits, self._peaks(rows))
        return logits

    def _prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        buffers = self._buffers(len(step.tokens))

        def attend(do: Do, cache: Tensor, window: int | None) -> None:
            for span in spans:
                part = slice(span.first, span.first + span.count)
                rows = (buffers.qkv[part], step.positions[part], span.table, cache, window, buffers.attended[part])
                do(self._kernels.attend, self._heads, *rows)

        self._layers(do, step, buffers, attend)
        if sampling is None:
            return None
        normed, (logits,) = self._head_normed(len(sampling)), self.arena.pack("wide", (len(sampling), self.vocab_size))
        norm = (self._weights.final_norm, self._config.rms_norm_eps, buffers.hidden, buffers.delta, sampling, normed)
        do(self._kernels.norm, *norm)
        do(self._kernels.linear, self._weights.head, None, normed, logits)
        return logits

    def _is_split(self, rows: int) -> bool:
        threads = self._kernels.pool.threads
        return threads > 1 and rows * self._heads.kv_heads < UNITS_PER_THREAD * threads

    def _split(self, rows: int, width: int) -> tuple[Tensor, int] | None:
        """Where rows and K/V heads alone are too few to keep all threads busy, their tiles are spread over more units."""
        if not self._is_split(rows):
            return None
        heads, units = self._heads, rows * self._heads.kv_heads
        wanted = UNITS_PER_THREAD * self._kernels.pool.threads
        shape = (rows, heads.heads, tiles_for(width * heads.block_size), 2 + -(-heads.dim // LANES) * LANES)
        return self.arena.take("attention partials", *shape), -(-wanted // units)

    def _layers(self, do: Do, step: Tokens, buffers: _Buffers, attend: Attend) -> None:
        """All layers; what the last one adds to the residual stream is left in ``delta``."""
        kernels, eps = self._kernels, self._config.rms_norm_eps
        do(kernels.embed, self._weights.embedding, step.tokens, buffers.hidden)
        delta: Tensor | None = None
        for layer, cache in zip(self._weights.layers, self.pool.layers, strict=True):
            do(kernels.norm, layer.input_norm, eps, buffers.hidden, delta, None, buffers.normed)
            self._linear(do, layer.qkv, buffers.normed, buffers.qkv)
            where = (step.positions, step.slots)
            do(kernels.rotate, self._heads, buffers.qkv, where, self._rope, layer.qk_norms, cache)
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
        quantised: tuple[Tensor, Tensor] | None = None
        for part in linear.parts:
            columns = out[:, part.column : part.column + part.weight.n]
            if part.weight.type in TYPES:
                do(self._kernels.linear, part.weight, part.bias, x, columns)
                continue
            if quantised is None:
                quantised = self._quantised(*x.shape)
                do(self._kernels.quantise, x, *quantised)
            do(self._kernels.multiply, part.weight, part.bias, *quantised, columns)

    def _quantised(self, rows: int, k: int) -> tuple[Tensor, Tensor]:
        take = self.arena.take
        return take("activations in int8", rows, k, dtype=torch.int8), take("their scales", rows, 2 * k // GROUP)

    def _head_normed(self, rows: int) -> Tensor:
        return self.arena.take("head normed", rows, self._config.hidden_size)

    def _peaks(self, rows: int) -> Tensor:
        return self.arena.take("head peaks", rows, panels_of(self._config.vocab_size))

    def _buffers(self, n: int) -> _Buffers:
        config, pack = self._config, self.arena.pack
        hidden, inner = (n, config.hidden_size), config.intermediate_size
        heads = (n, config.num_heads * config.head_dim)
        qkv, attended, delta = pack("wide", (n, self._heads.width), heads, hidden)
        (gate_up,) = pack("wide", (n, 2 * inner))
        (normed,), (activated,) = pack("narrow", hidden), pack("narrow", (n, inner))
        return _Buffers(self.arena.take("hidden", *hidden), normed, qkv, attended, delta, gate_up, activated)

    def _measure(self, sizes: Sizes) -> None:
        """Walks through the largest steps without computing, so that the arena knows their sizes."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64)

        for rows in range(1, sizes.rows + 1):  # fewer rows can need more: those whose tiles are spread
            if rows == sizes.rows or self._is_split(rows):
                self._decode(_nothing, Tokens(*(zeros(rows) for _ in range(3))), zeros(rows, sizes.width))
        step = Tokens(*(zeros(sizes.prefill_tokens) for _ in range(3)))
        self._prefill(_nothing, step, [], zeros(sizes.prefill_samples))


def _together(do: Do, calls: Callable[[Do], T]) -> T:
    """A step that is not recorded is a tape that is run once: one native call instead of hundreds."""
    if do is not eagerly:
        return calls(do)
    tape = NativeTape()
    result = calls(tape.do)
    tape.replay()
    return result


def _nothing(kernel: Any, *arguments: Any) -> None:
    """The ``do`` of a step that is only measured."""
