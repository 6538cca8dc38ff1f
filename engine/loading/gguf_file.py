"""A GGUF file as a ``LoadedModel``: names, shapes and row order become Hugging Face's, tensors are read on demand.

Writers of GGUF reorder the rows of q and k for the ``llama`` architecture, because their kernels rotate neighbouring
pairs where Hugging Face rotates halves; the rows are put back here, in whole rows, so a quantised tensor stays
quantised. Other architectures are stored as they are.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from engine.loading.gguf_header import GGUFHeader, TensorInfo, read_header
from engine.loading.gguf_tokenizer import gguf_template, gguf_tokenizer
from engine.loading.model import LoadedModel, LoadError, ModelConfig, RopeScaling, StoredTensor

_FAMILIES = ("llama", "qwen2", "qwen3")
MAX_LAYERS = 1024
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor that Hugging Face calls ``name``."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


@functools.cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """Type code -> (elements, bytes) of one block, for every type that the format knows."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(code): (int(sizes[0]), int(sizes[1])) for code, sizes in GGML_QUANT_SIZES.items()}


def _type_name(code: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(code).name


@functools.cache
def _readable(code: int) -> bool:
    """Whether the type can be turned into floats; asked of the library with one block of zeros."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, _block_sizes()[code][1]), np.uint8), GGMLQuantizationType(code))
    except NotImplementedError:
        return False
    return True


@attrs.frozen
class GGUFSource:
    """The tensors of a checked file. ``heads``: how many heads' rows are interleaved, for the names that are."""

    path: Path
    infos: Mapping[str, TensorInfo]
    heads: Mapping[str, int]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.infos[name].dims

    def load(self, name: str) -> torch.Tensor:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.infos[name]
        values = dequantize(self._rows(name), GGMLQuantizationType(info.type_code))
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(info.dims))

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(_type_name(self.infos[name].type_code), torch.from_numpy(self._rows(name)))

    def _rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 (rows, bytes per row), in Hugging Face's row order."""
        info = self.infos[name]
        data = np.fromfile(self.path, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        if data.size != info.nbytes:
            raise LoadError(f"{self.path}: tensor {name!r} ended early; the file changed after it was opened")
        heads = self.heads.get(name)
        if heads is None:
            return data.reshape(-1, info.row_bytes)
        # (head, pair, half, row) -> (head, half, pair, row); for a bias a "row" is one element.
        width = info.row_bytes if len(info.dims) > 1 else info.nbytes // info.dims[0]
        half = info.dims[0] // heads // 2
        return np.ascontiguousarray(data.reshape(heads, half, 2, width).swapaxes(1, 2)).reshape(-1, info.row_bytes)


def load_gguf(path: Path) -> LoadedModel:
    """Reads the header, checks every tensor against the configuration and rebuilds the tokenizer; no weights are read.
    Raises ``LoadError``."""
    header = read_header(path, _block_sizes())
    metadata, where = header.metadata, str(path)
    if metadata.get("split.count", 1) not in (0, 1):
        raise LoadError(
            f"{where}: one part of {metadata['split.count']} of a split GGUF; merge the parts into one file"
        )
    config = _config(header)
    source = _source(header, config)
    tokenizer = gguf_tokenizer(metadata, config.vocab_size, where)
    counts = Counter(_type_name(info.type_code) for info in source.infos.values())
    name = metadata.get("general.name")
    return LoadedModel(
        name=name if isinstance(name, str) and name else path.stem,
        config=config,
        source=source,
        tokenizer=tokenizer,
        template=gguf_template(metadata, tokenizer, where),
        eos_token_ids=tokenizer.eos_ids,
        weight_types=", ".join(f"{kind} ({count})" for kind, count in counts.most_common()),
    )


def _source(header: GGUFHeader, config: ModelConfig) -> GGUFSource:
    """Matches the file's tensors with the configuration's: none missing, none extra, none misshapen."""
    left = {name: info for name, info in header.tensors.items() if name != _ROPE_FACTORS}
    infos: dict[str, TensorInfo] = {}
    for name, shape in config.tensors().items():
        stored = gguf_name(name)
        info = left.pop(stored, None)
        if info is None:
            raise LoadError(f"{header.path}: tensor {stored!r} is missing")
        if info.dims != shape:
            raise LoadError(f"{header.path}: tensor {stored!r} has shape {info.dims}, but the model needs {shape}")
        if not _readable(info.type_code):
            kind = _type_name(info.type_code)
            raise LoadError(f"{header.path}: tensor {stored!r} is of type {kind}, which cannot be read as floats")
        infos[name] = info
    if left:
        raise LoadError(
            f"{header.path}: {len(left)} tensors that the model does not have, such as {next(iter(left))!r}"
        )
    heads = {}
    if config.family == "llama":
        of = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        heads = {name: of[part] for name in infos for part in of if f".{part}." in name}
    return GGUFSource(header.path, infos, heads)


class _Keys:
    """The ``<arch>.*`` keys with their types checked."""

    def __init__(self, header: GGUFHeader, arch: str) -> None:
        self.header, self.arch = header, arch

    def fail(self, key: str, value: object, allowed: str) -> LoadError:
        return LoadError(f"{self.header.path}: {self.arch}.{key} is {value!r}, but must be {allowed}")

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None, *, high: int = 1 << 31) -> int:
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and len(set(value.tolist())) == 1:
            value = value.tolist()[0]  # per-layer values that do not differ
        if value is None:
            if default is None:
                raise LoadError(f"{self.header.path}: key {self.arch}.{key} is missing")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.fail(key, value, f"one integer in [1, {high}] for all layers")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            if default is None:
                raise LoadError(f"{self.header.path}: key {self.arch}.{key} is missing")
            return default
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, value, "a positive number")
        return _shortest(float(value))


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: where the author wrote 1e-05, the file holds 9.99999975e-06."""
    return float(str(np.float32(value)))


def _config(header: GGUFHeader) -> ModelConfig:
    arch = header.metadata.get("general.architecture")
    if arch not in _FAMILIES:
        raise LoadError(f"{header.path}: architecture is {arch!r}, but must be one of {', '.join(_FAMILIES)}")
    keys = _Keys(header, arch)
    if keys.get("expert_count"):
        raise keys.fail("expert_count", keys.get("expert_count"), "0; mixtures of experts are not supported")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dims) != 2:
        raise LoadError(f"{header.path}: tensor 'token_embd.weight' is missing or not a matrix")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.fail(key, keys.get(key), f"{head_dim}, the length of a key")
    if head_dim % 2:
        raise keys.fail("attention.key_length", head_dim, "even")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.fail("attention.head_count_kv", kv_heads, f"a divisor of the {heads} heads")
    layers, context = keys.integer("block_count", high=MAX_LAYERS), keys.integer("context_length")
    has = header.tensors.__contains__
    return ModelConfig(
        family=arch,
        vocab_size=embedding.dims[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.real("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(header, keys, head_dim, context),
        tie_word_embeddings=not has("output.weight"),
        qkv_bias=has("blk.0.attn_q.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_down.bias"),
        qk_norm=arch == "qwen3",
        sliding_windows=_windows(keys, layers, context),
    )


def _windows(keys: _Keys, layers: int, context: int) -> tuple[int | None, ...]:
    window = keys.get("attention.sliding_window")
    if not window:
        return ()
    window = keys.integer("attention.sliding_window")
    if keys.arch != "llama" and window < context:
        raise keys.fail("attention.sliding_window", window, "absent: the file does not say which layers have a window")
    return (window,) * layers


def _rope_scaling(header: GGUFHeader, keys: _Keys, head_dim: int, context: int) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.fail("rope.scaling.type", kind, "none, linear or yarn")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if keys.get(f"rope.scaling.{key}") not in (None, 1.0):
            raise keys.fail(f"rope.scaling.{key}", keys.get(f"rope.scaling.{key}"), "1 or absent")
    if keys.get("rope.scaling.yarn_log_multiplier"):
        raise keys.fail("rope.scaling.yarn_log_multiplier", keys.get("rope.scaling.yarn_log_multiplier"), "0 or absent")
    if _ROPE_FACTORS in header.tensors:
        if kind in ("linear", "yarn"):
            raise LoadError(f"{header.path}: both {_ROPE_FACTORS} and rope.scaling.type {kind!r} scale the positions")
        return _llama3_scaling(header, keys, head_dim)
    legacy = keys.real("rope.scale_linear", 1.0)
    factor = keys.real("rope.scaling.factor", legacy)
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=keys.integer("rope.scaling.original_context_length", context),
            beta_fast=keys.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1.0),
        )
    scaled = kind == "linear" or (kind is None and factor != 1.0)
    return RopeScaling(kind="linear", factor=factor) if scaled and factor != 1.0 else None


def _llama3_scaling(header: GGUFHeader, keys: _Keys, head_dim: int) -> RopeScaling | None:
    """The parameters of Llama 3's scaling, recovered from the divisors of each frequency that the file stores.

    The largest divisor is the factor; the original length is the power of two that gives the same divisors, with the
    published low and high frequency factors 1 and 4. Divisors that this does not reproduce are refused.
    """
    info = header.tensors[_ROPE_FACTORS]
    if info.type_code != 0 or info.dims != (head_dim // 2,):
        raise LoadError(f"{header.path}: tensor {_ROPE_FACTORS!r} must be F32 of shape {(head_dim // 2,)}")
    stored = np.fromfile(header.path, dtype="<f4", count=head_dim // 2, offset=info.offset).astype(np.float64)
    if stored.size and np.all(stored == 1.0):
        return None
    factor = _shortest(float(stored.max())) if stored.size else 0.0
    frequencies = keys.real("rope.freq_base", 10000.0) ** (-np.arange(0, head_dim, 2) / head_dim)
    for exponent in range(4, 24):
        length = 1 << exponent
        turns = length * frequencies / (2 * math.pi)
        smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
        if factor > 1 and np.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-4):
            return RopeScaling("llama3", factor, 1.0, 4.0, original_max_position_embeddings=length)
    raise LoadError(
        f"{header.path}: the divisors in {_ROPE_FACTORS!r} are not Llama 3's scaling; others are unsupported"
    )
