"""The decoder: Llama, Mistral, Qwen2 and Qwen3 as one sequence of kernel calls, steered by ``ModelConfig``.

    x = embedding[tokens]
    each layer:  x += output(attention(rotate(qk_norm(qkv(norm(x))))))     keys and values are written to the pool first
                 x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x)), only for rows that sample

Decode steps and prefill differ in how attention is batched and in nothing else. Every buffer comes from the arena, so
one and the same code is run eagerly and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.compute.arena import Arena
from engine.compute.attention import AttendLayer, Attention
from engine.compute.graphs import Do
from engine.compute.kernels import add, add_offsets, rms_norm, rotate, select_rows, silu_mul, write_rows
from engine.compute.kv import KVPool
from engine.compute.network import Span, Tokens
from engine.compute.rope import rope_tables
from engine.compute.weights import Weights

MakeAttend = Callable[[Tensor, Tensor], AttendLayer]  # from the buffers of queries and output, each [n, heads, dim]


@attrs.frozen(eq=False)
class _Padded:
    """The buffers that matrix products read and write; they have room for padded pieces."""

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    projected: Tensor
    gate_up: Tensor
    activated: Tensor


@attrs.frozen(eq=False)
class _Scratch:
    """What all layers of a step of n tokens share, made once per step: buffers, views of them, and whole calls."""

    padded: _Padded
    norm: tuple[Any, ...]
    qk_norm: tuple[Any, ...]
    residual: tuple[Any, ...]
    silu_mul: tuple[Any, ...]
    rotate: tuple[Any, ...]
    cos: Tensor
    sin: Tensor
    cache_rows: Tensor
    queries: Tensor
    keys_values: Tensor
    out: Tensor


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

        hidden = self._layers(do, step, lambda queries, out: attention.decode(context, queries, out))
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

        def make(queries: Tensor, out: Tensor) -> AttendLayer:
            def attend(do: Do, layer: int, window: int | None) -> None:
                for span, part, context in zip(spans, parts, contexts, strict=True):
                    attention.prefill(do, context, span, layer, window, queries[part], out[part])

            return attend

        hidden = self._layers(do, step, make)
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
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        turned = take("turned", n, heads + kv_heads, dim)
        hidden = take("hidden", max(room, self._weights.head.ladder.padded(n)), config.hidden_size)
        normed = take("normed", room, config.hidden_size)
        qkv = take("qkv", room, (heads + 2 * kv_heads) * dim)
        by_head = qkv[:n].view(n, heads + 2 * kv_heads, dim)
        qk = by_head[:, : heads + kv_heads]
        attended = take("attended", room, heads * dim)
        projected = take("projected", room, config.hidden_size)
        gate_up = take("gate up", room, 2 * config.intermediate_size)
        activated = take("activated", room, config.intermediate_size)
        gate, up = gate_up[:n].chunk(2, dim=1)
        cos, sin = take("cos", n, dim), take("sin", n, dim)
        return _Scratch(
            padded=_Padded(hidden, normed, qkv, attended, projected, gate_up, activated),
            norm=self._norm_call(hidden[:n], normed[:n]),
            qk_norm=self._norm_call(qk, qk),
            residual=(add, hidden[:n], projected[:n]),
            silu_mul=(silu_mul, gate, up, activated[:n]),
            cos=cos,
            sin=sin,
            rotate=(rotate, qk, qk[..., : dim // 2], qk[..., dim // 2 :], cos[:, None], sin[:, None])
            + ((turned, turned[..., : dim // 2], turned[..., dim // 2 :]),),
            cache_rows=self._arena.take("cache rows", n, 2, kv_heads, dtype=torch.int64),
            queries=by_head[:, :heads],
            keys_values=by_head[:, heads:],
            out=attended[:n].view(n, heads, dim),
        )

    def _layers(self, do: Do, step: Tokens, make_attend: MakeAttend) -> Tensor:
        """All layers; returns the buffer of hidden states, [:n] of which are meant."""
        n = len(step.tokens)
        scratch = self._scratch(n)
        buffers = scratch.padded
        attend = make_attend(scratch.queries, scratch.out)
        do(select_rows, self._weights.embedding, step.tokens, buffers.hidden[:n])
        do(select_rows, self._cos, step.positions, scratch.cos)
        do(select_rows, self._sin, step.positions, scratch.sin)
        do(add_offsets, step.slots[:, None, None], self._attention.offsets, scratch.cache_rows)
        cache_rows = scratch.cache_rows.view(n, -1)
        for index, layer in enumerate(self._weights.layers):
            do(rms_norm, layer.input_norm, *scratch.norm)
            layer.qkv.apply(do, buffers.normed, n, buffers.qkv)
            if layer.qk_norm is not None:
                do(rms_norm, layer.qk_norm, *scratch.qk_norm)
            do(*scratch.rotate)
            do(write_rows, self._pool.rows[index], cache_rows, scratch.keys_values)
            attend(do, index, layer.window)
            layer.output.apply(do, buffers.attended, n, buffers.projected)
            do(*scratch.residual)
            do(rms_norm, layer.post_norm, *scratch.norm)
            layer.gate_up.apply(do, buffers.normed, n, buffers.gate_up)
            do(*scratch.silu_mul)
            layer.down.apply(do, buffers.activated, n, buffers.projected)
            do(*scratch.residual)
        return buffers.hidden

    def _norm_call(self, x: Tensor, out: Tensor) -> tuple[Any, ...]:
        """The arguments of ``rms_norm`` after the weight."""
        take = self._arena.take
        wide = x if x.dtype == torch.float32 else take("norm wide", *x.shape)
        return (
            self._config.rms_norm_eps,
            x,
            wide,
            take("norm square", *x.shape),
            take("norm scale", *x.shape[:-1], 1),
            out,
        )

    def _logits(self, do: Do, hidden: Tensor, n: int, name: str) -> Tensor:
        """fp32 logits of the first n rows of ``hidden``, which has room for the head's padded rows."""
        room = self._weights.head.ladder.padded(n)
        normed = self._take("head normed", room, self._config.hidden_size)
        logits = self._take(name, room, self._config.vocab_size)
        do(rms_norm, self._weights.final_norm, *self._norm_call(hidden[:n], normed[:n]))
        self._weights.head.apply(do, normed, n, logits)
        return logits[:n]
