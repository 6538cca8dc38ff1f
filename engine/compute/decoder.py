"""The decoder: Llama, Mistral, Qwen2 and Qwen3 as one sequence of kernel calls, steered by ``ModelConfig``.

    x = embedding[tokens]
    each layer:  x += output(attention(rotate(qk_norm(qkv(norm(x))))))     keys and values are written to the pool first
                 x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x)), only for rows that sample

Decode steps and prefill differ in how attention is batched and in nothing else. Every buffer comes from the arena, so one
and the same code is run eagerly and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from engine.compute.arena import Arena
from engine.compute.attention import Attention, Span
from engine.compute.graphs import Do
from engine.compute.kernels import add, add_offsets, rms_norm, rotate, select_rows, silu_mul, write_rows
from engine.compute.kv import KVPool
from engine.compute.rope import rope_tables
from engine.compute.weights import Layer, Weights

Attend = Callable[[int, int | None, Tensor, Tensor], None]  # layer, window, queries and out [n, heads, dim]


@attrs.frozen(eq=False)
class Tokens:
    """What a step computes: int64 [n] each. ``slots`` are where each position's keys and values go."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor


@attrs.frozen(eq=False)
class _Scratch:
    """Buffers of one step of n tokens; those that matrix products touch have room for padded pieces."""

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    projected: Tensor
    gate_up: Tensor
    activated: Tensor
    cos: Tensor
    sin: Tensor
    turned: tuple[Tensor, Tensor, Tensor]
    cache_rows: Tensor


class Decoder:
    """Builds steps over one pool and one arena. ``max_positions`` bounds positions, rounded up to what shapes need."""

    def __init__(self, weights: Weights, pool: KVPool, arena: Arena, max_positions: int) -> None:
        config = self._config = weights.config
        self._weights, self._pool, self._arena = weights, pool, arena
        self._attention = Attention(config, pool, weights.attention, arena, max_positions)
        cos, sin = rope_tables(config, max_positions)
        self._cos, self._sin = (table.to(weights.device, weights.dtype) for table in (cos, sin))

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        """One token for each of R requests with block tables [R, W]; returns the buffer of logits [R, vocab]."""
        attention, rows = self._attention, len(step.tokens)
        positions = tables.shape[1] * self._pool.block_size
        context = attention.context(do, self._arena.take, tables, step.positions, step.positions, positions)

        def attend(layer: int, window: int | None, queries: Tensor, out: Tensor) -> None:
            attention.decode(do, context, layer, window, queries, out)

        hidden = self._layers(do, step, attend)
        return self._logits(do, hidden, rows, "logits")

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        """Runs of positions of several requests at once. ``sampling`` int64 [m] are the tokens whose logits are wanted;
        returns the buffer of logits [m, vocab], or ``None`` when none are."""
        attention, device = self._attention, self._weights.device

        def fresh(name: str, *shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)  # prefill is never recorded, and spans are many

        parts = [slice(span.first, span.first + span.count) for span in spans]
        contexts = []
        for span, part in zip(spans, parts, strict=True):
            asking = step.positions[part]
            contexts.append(attention.context(do, fresh, span.table, asking[-1:], asking, span.start + span.count))

        def attend(layer: int, window: int | None, queries: Tensor, out: Tensor) -> None:
            for span, part, context in zip(spans, parts, contexts, strict=True):
                attention.prefill(do, context, span, layer, window, queries[part], out[part])

        hidden = self._layers(do, step, attend)
        if sampling is None:
            return None
        count = len(sampling)
        selected = self._take("selected", self._weights.head.ladder.padded(count), self._config.hidden_size)
        do(select_rows, hidden, sampling, selected[:count])
        return self._logits(do, selected, count, "prefill logits")

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._arena.take(name, *shape, dtype=self._weights.dtype)

    def _scratch(self, n: int) -> _Scratch:
        config, take = self._config, self._take
        room = self._weights.padded(n)
        heads, dim = config.num_heads + config.num_kv_heads, config.head_dim
        turned = take("turned", n, heads, dim)
        return _Scratch(
            hidden=take("hidden", max(room, self._weights.head.ladder.padded(n)), config.hidden_size),
            normed=take("normed", room, config.hidden_size),
            qkv=take("qkv", room, (heads + config.num_kv_heads) * dim),
            attended=take("attended", room, config.num_heads * dim),
            projected=take("projected", room, config.hidden_size),
            gate_up=take("gate up", room, 2 * config.intermediate_size),
            activated=take("activated", room, config.intermediate_size),
            cos=take("cos", n, dim),
            sin=take("sin", n, dim),
            turned=(turned, turned[..., : dim // 2], turned[..., dim // 2 :]),
            cache_rows=self._arena.take("cache rows", n, 2, config.num_kv_heads, dtype=torch.int64),
        )

    def _layers(self, do: Do, step: Tokens, attend: Attend) -> Tensor:
        """All layers; returns the buffer of hidden states, [:n] of which are meant."""
        n, config = len(step.tokens), self._config
        buffers = self._scratch(n)
        hidden = buffers.hidden[:n]
        do(select_rows, self._weights.embedding, step.tokens, hidden)
        do(select_rows, self._cos, step.positions, buffers.cos)
        do(select_rows, self._sin, step.positions, buffers.sin)
        do(add_offsets, step.slots[:, None, None], self._attention.offsets, buffers.cache_rows)
        for index, layer in enumerate(self._weights.layers):
            self._norm(do, hidden, layer.input_norm, buffers.normed[:n])
            self._attend(do, index, layer, buffers, attend, n)
            do(add, hidden, buffers.projected[:n])
            self._norm(do, hidden, layer.post_norm, buffers.normed[:n])
            layer.gate_up.apply(do, buffers.normed, n, buffers.gate_up)
            gate, up = buffers.gate_up[:n].chunk(2, dim=1)
            do(silu_mul, gate, up, buffers.activated[:n])
            layer.down.apply(do, buffers.activated, n, buffers.projected)
            do(add, hidden, buffers.projected[:n])
        assert config.num_layers == len(self._weights.layers)
        return buffers.hidden

    def _attend(self, do: Do, index: int, layer: Layer, buffers: _Scratch, attend: Attend, n: int) -> None:
        """projected = output(attention(...)) of the normed hidden states; writes this step's keys and values first."""
        config = self._config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        layer.qkv.apply(do, buffers.normed, n, buffers.qkv)
        qkv = buffers.qkv[:n].view(n, heads + 2 * kv_heads, dim)
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            self._norm(do, qk, layer.qk_norm, qk)
        halves = qk[..., : dim // 2], qk[..., dim // 2 :]
        do(rotate, qk, *halves, buffers.cos[:, None], buffers.sin[:, None], buffers.turned)
        rows = buffers.cache_rows.view(n, 2 * kv_heads)
        do(write_rows, self._pool.rows[index], rows, qkv[:, heads:])
        attend(index, layer.window, qkv[:, :heads], buffers.attended[:n].view(n, heads, dim))
        layer.output.apply(do, buffers.attended, n, buffers.projected)

    def _norm(self, do: Do, x: Tensor, weight: Tensor, out: Tensor) -> None:
        wide = x if x.dtype == torch.float32 else self._arena.take("norm wide", *x.shape)
        square = self._arena.take("norm square", *x.shape)
        scale = self._arena.take("norm scale", *x.shape[:-1], 1)
        do(rms_norm, x, weight, self._config.rms_norm_eps, wide, square, scale, out)

    def _logits(self, do: Do, hidden: Tensor, n: int, name: str) -> Tensor:
        """fp32 logits of the first n rows of ``hidden``, which has room for the head's padded rows."""
        room = self._weights.head.ladder.padded(n)
        normed = self._take("head normed", room, self._config.hidden_size)
        logits = self._take(name, room, self._config.vocab_size)
        self._norm(do, hidden[:n], self._weights.final_norm, normed[:n])
        self._weights.head.apply(do, normed, n, logits)
        return logits[:n]
