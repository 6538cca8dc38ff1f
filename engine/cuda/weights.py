"""The model's tensors as the Triton kernels want them: in the compute type, q with k and v and gate with up joined."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from engine.compute.weights import Progress, Reader
from engine.loading.model import LoadedModel, ModelConfig


@attrs.frozen(eq=False)
class Linear:
    weight: Tensor  # [n, k]
    bias: Tensor | None  # [n]


@attrs.frozen(eq=False)
class Layer:
    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 kv_heads) * head_dim, hidden]
    qk_norms: tuple[Tensor, float] | None  # weights [2, head_dim] of q and of k, and eps
    output: Linear
    post_norm: Tensor
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear
    window: int | None


@attrs.frozen(eq=False)
class TritonWeights:
    """Everything that runners of one model can share."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Linear
    nbytes: int


def load_triton(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> TritonWeights:
    """Reads and joins the weights. Raises ``LoadError`` for a tensor that cannot be read."""
    config = model.config
    reader = Reader(config, model.source, device, dtype)
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(config, reader, index))
        if progress is not None:
            progress("loading weights", index + 1, config.num_layers + 1)
    embedding = reader.read("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else reader.read("lm_head.weight")
    final_norm = reader.read("model.norm.weight")
    if progress is not None:
        progress("loading weights", config.num_layers + 1, config.num_layers + 1)
    return TritonWeights(config, device, dtype, embedding, tuple(layers), final_norm, Linear(head, None), reader.nbytes)


def _layer(config: ModelConfig, reader: Reader, index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def linear(*parts: str) -> Linear:
        weight = reader.read(*(f"{prefix}{part}.weight" for part in parts))
        return Linear(weight, reader.find(*(f"{prefix}{part}.bias" for part in parts)))

    qk_norms = None
    if config.qk_norm:
        both = torch.stack([reader.read(f"{prefix}self_attn.{part}_norm.weight") for part in "qk"])
        qk_norms = (both, config.rms_norm_eps)
    return Layer(
        input_norm=reader.read(f"{prefix}input_layernorm.weight"),
        qkv=linear(*(f"self_attn.{part}_proj" for part in "qkv")),
        qk_norms=qk_norms,
        output=linear("self_attn.o_proj"),
        post_norm=reader.read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
        window=config.sliding_windows[index] if config.sliding_windows else None,
    )
