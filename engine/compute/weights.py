"""The model's tensors as the decoder wants them, pulled from their source one at a time.

q, k and v are one matrix, and so are gate and up, since each pair or triple reads the same input. At no time do two
float copies of the model exist: a matrix is packed and its source tensor dropped before the next one is read. A tied
embedding is kept twice on CPU, as a table to look up and packed as the head.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from engine.compute.attention_probe import probe_attention
from engine.compute.linear import Linear, Linears
from engine.compute.probe import Ladder, ProbeReport, check_rowwise
from engine.loading.model import LoadedModel, ModelConfig, TensorSource

HEAD_ROWS = 32  # the head runs for sampling rows only, and is too large to probe with hundreds

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@attrs.frozen(eq=False)
class Layer:
    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 kv_heads) * head_dim, hidden]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: one weight per head, the same for all of q, and for all of k
    output: Linear
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear
    window: int | None


@attrs.frozen(eq=False)
class Weights:
    """Everything that runners of one model can share."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Linear
    attention: Ladder
    report: ProbeReport
    nbytes: int

    def padded(self, rows: int) -> int:
        """Rows that buffers need, so that every linear layer can pad its last piece."""
        layer = self.layers[0]  # all layers share the ladders of their shapes
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        return max(linear.ladder.padded(rows) for linear in linears)


def load_weights(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    """Reads, fuses and packs the weights and probes the kernels. Raises ``LoadError`` and ``UnstableMachine``."""
    config = model.config
    reader = Reader(config, model.source, device, dtype)
    linears = Linears()
    check_rowwise(device)
    embedding = reader.read("model.embed_tokens.weight")
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(config, reader, linears, index))
        if progress is not None:
            progress("loading weights", index + 1, config.num_layers + 1)
    head_weight = embedding if config.tie_word_embeddings else reader.read("lm_head.weight")
    head = linears.make("head", head_weight, None, most=HEAD_ROWS)
    twice = config.tie_word_embeddings and head.weight is not embedding
    attention = probe_attention(config, device)
    if progress is not None:
        progress("loading weights", config.num_layers + 1, config.num_layers + 1)
    return Weights(
        config=config,
        device=device,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=reader.read("model.norm.weight"),
        head=head,
        attention=attention,
        report=ProbeReport(torch.get_num_threads(), (*linears.ladders, attention)),
        nbytes=reader.nbytes + (head_weight.nbytes if twice else 0),
    )


class Reader:
    """Tensors by name, on the device in the compute type; counts what it read."""

    def __init__(self, config: ModelConfig, source: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = config.tensors()
        self._source = source
        self._device = device
        self._dtype = dtype
        self.nbytes = 0

    def read(self, *names: str) -> Tensor:
        """One tensor, or several joined along their first dimension."""
        parts = [self._source.load(name) for name in names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        whole = whole.to(self._device, self._dtype)
        self.nbytes += whole.nbytes
        return whole

    def find(self, *names: str) -> Tensor | None:
        """The same for tensors that the configuration may not have."""
        return self.read(*names) if names[0] in self._shapes else None


def _layer(config: ModelConfig, reader: Reader, linears: Linears, index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def linear(name: str, *parts: str) -> Linear:
        weight = reader.read(*(f"{prefix}{part}.weight" for part in parts))
        return linears.make(name, weight, reader.find(*(f"{prefix}{part}.bias" for part in parts)))

    return Layer(
        input_norm=reader.read(f"{prefix}input_layernorm.weight"),
        qkv=linear("qkv", *(f"self_attn.{part}_proj" for part in "qkv")),
        qk_norm=_qk_norm(config, reader, prefix),
        output=linear("output", "self_attn.o_proj"),
        post_norm=reader.read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linear("gate and up", "mlp.gate_proj", "mlp.up_proj"),
        down=linear("down", "mlp.down_proj"),
        window=config.sliding_windows[index] if config.sliding_windows else None,
    )


def _qk_norm(config: ModelConfig, reader: Reader, prefix: str) -> Tensor | None:
    if not config.qk_norm:
        return None
    q, k = reader.read(f"{prefix}self_attn.q_norm.weight"), reader.read(f"{prefix}self_attn.k_norm.weight")
    return torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)]).contiguous()
