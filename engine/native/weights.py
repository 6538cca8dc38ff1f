"""The decoder's weights on native kernels: packed from a checkpoint, or mapped from where an earlier start left them.

A tied head is the embedding itself, since a row of the table can be read from the panels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
from torch import Tensor

from engine.loading.model import LoadedModel, ModelConfig
from engine.native.library import TYPES, Library, Packed
from engine.native.packed_file import Damaged
from engine.native.tensors import Linear, SourceTensors, Tensors
from engine.native.weights_cache import WeightsCache

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@attrs.frozen(eq=False)
class Layer:
    input_norm: Tensor  # [hidden]
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor, float] | None  # of q and of k, each [head_dim], and eps
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@attrs.frozen(eq=False)
class NativeWeights:
    """Everything that runners of one model can share. ``origin``: the file that they are mapped from, if they are."""

    config: ModelConfig
    library: Library
    embedding: Packed
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Packed
    origin: Path | None = None

    @property
    def integer(self) -> bool:
        """Whether any layer computes with 8-bit activations."""
        return any(kind not in TYPES for kind in self.types)

    @property
    def types(self) -> dict[str, int]:
        """How many bytes of packed weights are of which type."""
        linears = (linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down))
        packed = [part.weight for linear in linears for part in linear.parts]
        packed += [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        found: dict[str, int] = {}
        for weight in packed:
            found[weight.type] = found.get(weight.type, 0) + weight.nbytes
        return found

    @property
    def nbytes(self) -> int:
        return sum(self.types.values())


def load_native(
    model: LoadedModel,
    library: Library,
    progress: Progress | None = None,
    cache: WeightsCache | None = None,
    *,
    integer: bool = False,
) -> NativeWeights:
    """Reads and packs the weights, or finds them in ``cache``; ``integer``: for 8-bit activations, where they are quantised.

    Embedding and head stay as they are: a row of the table is read from them, and the logits decide. Raises ``LoadError``
    for a tensor that cannot be read.
    """
    pack = partial(SourceTensors, model.config, model.source, library, integer=integer)
    layout = f"{'integer' if integer else ''} {sorted(library.layouts.items())}"
    key = None if cache is None else cache.key(model.source, layout)
    if cache is not None and key is not None:
        shapes = model.config.tensors()
        found = cache.open(key, library, shapes)
        if found is None and _fill(cache, key, model.config, library, pack, progress):
            found = cache.open(key, library, shapes)
        if found is not None:
            try:
                return _weights(model.config, library, found, progress, cache.place(key))
            except Damaged as error:  # whole, but of another model
                warnings.warn(f"{cache.place(key)} is not used: {error}", stacklevel=2)
    return _weights(model.config, library, pack(), progress)


def _fill(
    cache: WeightsCache,
    key: str,
    config: ModelConfig,
    library: Library,
    pack: Callable[..., SourceTensors],
    progress: Progress | None,
) -> bool:
    """Packs into a file, one tensor in memory at a time. False, with a warning, where no file can be had."""
    most = 4 * sum(math.prod(shape) for shape in config.tensors().values())  # where everything becomes F32
    try:
        with cache.write(key, most, library) as writer:

            def keep(name: str, made: Packed | Tensor) -> Packed | Tensor:
                writer.add(name, made)
                return made

            tensors = pack(keep=keep)
            _ends(config, tensors)
            for _ in _layers(config, tensors, "packing weights, once", progress):
                pass  # written, and no longer held
    except OSError as error:
        warnings.warn(f"packed weights are not kept: {error}", stacklevel=2)
        return False
    return True


def _weights(
    config: ModelConfig, library: Library, tensors: Tensors, progress: Progress | None, origin: Path | None = None
) -> NativeWeights:
    embedding, head, final_norm = _ends(config, tensors)
    layers = tuple(_layers(config, tensors, "loading weights", progress))
    return NativeWeights(config, library, embedding, layers, final_norm, head, origin)


def _ends(config: ModelConfig, tensors: Tensors) -> tuple[Packed, Packed, Tensor]:
    """Embedding, head, last norm."""
    embedding = tensors.packed("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else tensors.packed("lm_head.weight")
    return embedding, head, tensors.vector("model.norm.weight")


def _layers(config: ModelConfig, tensors: Tensors, stage: str, progress: Progress | None) -> Iterator[Layer]:
    for index in range(config.num_layers):
        yield _layer(config, tensors, index)
        if progress is not None:
            progress(stage, index + 1, config.num_layers)


def _layer(config: ModelConfig, tensors: Tensors, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qk_norms = None
    if config.qk_norm:
        q_norm, k_norm = tensors.vector(f"{attention}q_norm.weight"), tensors.vector(f"{attention}k_norm.weight")
        qk_norms = (q_norm, k_norm, config.rms_norm_eps)
    return Layer(
        input_norm=tensors.vector(f"{prefix}input_layernorm.weight"),
        qkv=tensors.linear(*(f"{attention}{part}_proj" for part in "qkv")),
        qk_norms=qk_norms,
        output=tensors.linear(f"{attention}o_proj"),
        post_norm=tensors.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=tensors.linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=tensors.linear(f"{mlp}down_proj"),
        window=config.sliding_windows[index] if config.sliding_windows else None,
    )
