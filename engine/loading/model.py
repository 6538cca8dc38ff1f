"""What loading hands to compute and to text: a checked configuration, a source of tensors, a tokenizer.

Tensor names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``), whatever the file called them; shapes are
torch's (out_features, in_features). A source is checked whole before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    import torch

    from engine.loading.template import ChatTemplate
    from engine.loading.tokenizer import Tokenizer


class LoadError(Exception):
    """A model that cannot be loaded; the message names the file, the tensor or the field."""


@attrs.frozen
class RopeScaling:
    """``kind``: ``linear``, ``llama3`` or ``yarn``, others are refused; factors as in Hugging Face's config.json."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@attrs.frozen
class ModelConfig:
    """Everything the decoder depends on; every family of the README is one setting of these fields."""

    family: str  # llama, mistral, qwen2, qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # o_proj
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE (Qwen3)
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty means full attention everywhere

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a model of this configuration must have: no more, no fewer."""
        h, q, kv, ff = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.intermediate_size,
        )
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, h),
            "model.norm.weight": (h,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        linears = {
            "self_attn.q_proj": ((q, h), self.qkv_bias),
            "self_attn.k_proj": ((kv, h), self.qkv_bias),
            "self_attn.v_proj": ((kv, h), self.qkv_bias),
            "self_attn.o_proj": ((h, q), self.output_bias),
            "mlp.gate_proj": ((ff, h), self.mlp_bias),
            "mlp.up_proj": ((ff, h), self.mlp_bias),
            "mlp.down_proj": ((h, ff), self.mlp_bias),
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, (shape, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = shape
                if bias:
                    shapes[f"{prefix}{name}.bias"] = shape[:1]
            shapes[f"{prefix}input_layernorm.weight"] = (h,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (h,)
            if self.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes


@attrs.frozen(eq=False)
class StoredTensor:
    """A tensor as its file holds it. ``type``: ``F32``, ``F16``, ``BF16`` or the name of a GGUF block type (``Q4_1``).
    ``data``: uint8 (rows, bytes per row), contiguous, on the CPU; a vector is one row."""

    type: str
    data: torch.Tensor


class TensorSource(Protocol):
    """Tensors on demand, so that no more than one float copy of the weights exists while loading."""

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str) -> torch.Tensor:
        """The tensor as contiguous fp32 on the CPU, dequantised exactly where the file is quantised."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """The same tensor in the type that it came in, rows in the same order as ``load`` gives them."""
        ...


@attrs.frozen
class LoadedModel:
    name: str
    config: ModelConfig
    source: TensorSource
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    weight_types: str = "F32"  # for the capacity table, e.g. "Q4_1 (210), Q8_0 (1), F32 (61)"

    @property
    def is_narrow(self) -> bool:
        """Whether any tensor is stored in less than fp32."""
        return any(not kind.startswith(("F32", "F64")) for kind in self.weight_types.split(", "))
