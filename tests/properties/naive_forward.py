"""A transformer written down once more, in fp64: full attention over the whole text, no cache, no tiles, no batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.loading.model import LoadedModel


def naive_logits(model: LoadedModel, tokens: Sequence[int]) -> Tensor:
    """fp64 [len(tokens), vocab]: what follows each position. Grouped queries, rotary halves, sliding windows."""
    config, count = model.config, len(tokens)

    def weight(name: str) -> Tensor:
        return model.source.load(f"{name}.weight").double()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight(name)

    place = torch.arange(count, dtype=torch.float64)
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    turn = torch.polar(torch.ones(count, config.head_dim // 2, dtype=torch.float64), place[:, None] * frequency)

    def rotated(x: Tensor) -> Tensor:  # [positions, heads, dim]; the two halves of a head are real and imaginary parts
        turned = torch.complex(*x.chunk(2, -1)) * turn[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    x = weight("model.embed_tokens")[list(tokens)]
    distance = place[:, None] - place[None, :]
    for number, window in enumerate(config.sliding_windows or [None] * config.num_layers):
        layer = f"model.layers.{number}"
        inner = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (inner @ weight(f"{layer}.self_attn.{part}_proj").T).unflatten(-1, (-1, config.head_dim)) for part in "qkv"
        )
        q, k = rotated(q), rotated(k)
        seen = (distance >= 0) & (distance < (window or count))
        heads = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = (q[:, head] @ k[:, shared].T / config.head_dim**0.5).masked_fill(~seen, -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, -1) @ weight(f"{layer}.self_attn.o_proj").T
        inner = norm(x, f"{layer}.post_attention_layernorm")
        gate = inner @ weight(f"{layer}.mlp.gate_proj").T
        activated = gate * torch.sigmoid(gate) * (inner @ weight(f"{layer}.mlp.up_proj").T)
        x = x + activated @ weight(f"{layer}.mlp.down_proj").T
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return norm(x, "model.norm") @ weight(head).T
