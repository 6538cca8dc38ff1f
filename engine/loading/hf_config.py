"""Hugging Face's config.json as a ``ModelConfig``: every field that changes the numbers is read or refused.

Absent fields take the defaults of the ``transformers`` class of the family, except for sizes, which must be there. A
field that would change what the model computes and that this decoder does not know is an error, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from engine.loading.model import LoadError, ModelConfig, RopeScaling

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MAX_LAYERS = 1024
MAX_JSON_BYTES = 64 << 20
_MAX_SIZE = 1 << 24


@attrs.frozen
class _Defaults:
    """What ``transformers`` assumes where config.json is silent."""

    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    max_position_embeddings: int = 32768
    sliding_window: int | None = None


_DEFAULTS = {
    "llama": _Defaults(max_position_embeddings=2048),
    "mistral": _Defaults(kv_heads=8, max_position_embeddings=131072, sliding_window=4096),
    "qwen2": _Defaults(kv_heads=32, sliding_window=4096),
    "qwen3": _Defaults(kv_heads=32, head_dim=128, sliding_window=4096),
}
_ROPE_KEYS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", "finetuned"),
    },
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises ``LoadError`` where it cannot be read or is something else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise LoadError(f"{path}: {path.stat().st_size} bytes, but at most {MAX_JSON_BYTES} are allowed")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds a {type(value).__name__}, but must hold an object")
    return value


class _Fields:
    """Typed reading of one JSON object; a wrong value is reported with the file, the field and what is allowed."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, name: str, allowed: str) -> LoadError:
        return LoadError(f"{self.where}: {name} is {self.values.get(name)!r}, but must be {allowed}")

    def integer(self, name: str, default: int | None = None, high: int = _MAX_SIZE) -> int:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise LoadError(f"{self.where}: {name} is missing")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.fail(name, f"an integer in [1, {high}]")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise LoadError(f"{self.where}: {name} is missing")
            return default
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < 1e30 or not math.isfinite(value):
            raise self.fail(name, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value


def parse_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The configuration that ``values`` (config.json) describes. Raises ``LoadError`` naming the field."""
    family = _family(values, where)
    defaults, fields = _DEFAULTS[family], _Fields(values, where)
    _refuse(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    kv_default = defaults.kv_heads if defaults.kv_heads is not None and "num_key_value_heads" not in values else heads
    kv_heads = fields.integer("num_key_value_heads", kv_default)
    if heads % kv_heads:
        raise LoadError(f"{where}: num_key_value_heads is {kv_heads}, but must divide num_attention_heads, {heads}")
    by_default = defaults.head_dim if defaults.head_dim is not None and "head_dim" not in values else None
    if by_default is None and values.get("head_dim") is None and hidden < heads:
        raise LoadError(f"{where}: hidden_size is {hidden}, less than num_attention_heads, {heads}, without a head_dim")
    head_dim = fields.integer("head_dim", by_default or max(1, hidden // heads))
    if head_dim % 2:
        raise LoadError(f"{where}: head_dim is {head_dim}, but must be even")
    attention_bias = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
    positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings, 1 << 40)
    theta, scaling = _rope(fields, positions)
    if scaling is not None and scaling.kind == "yarn" and scaling.original_max_position_embeddings is not None:
        positions = max(positions, int(scaling.original_max_position_embeddings * scaling.factor))
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        sliding_windows=_windows(fields, family, layers, defaults),
    )


def _family(values: Mapping[str, Any], where: str) -> str:
    names = values.get("architectures")
    if names:
        name = names[0] if isinstance(names, list) else names
        if name in FAMILIES:
            return FAMILIES[name]
    else:
        name = values.get("model_type")
        if name in FAMILIES.values():
            return str(name)
    raise LoadError(f"{where}: architecture is {name!r}, but must be one of {', '.join(FAMILIES)}")


def _refuse(fields: _Fields) -> None:
    """Fields that would change the numbers in ways that the decoder does not know."""
    values = fields.values
    for name in ("quantization_config", "compression_config"):
        if values.get(name):
            method = values[name].get("quant_method", "?") if isinstance(values[name], dict) else values[name]
            raise LoadError(
                f"{fields.where}: {name} asks for {method!r}; quantised folders are unsupported, use the"
                " unquantised folder or a GGUF file"
            )
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fail("hidden_act", "silu")
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise fields.fail("partial_rotary_factor", "1 or absent")
    if values.get("use_mrope"):
        raise fields.fail("use_mrope", "false or absent")


def _rope(fields: _Fields, positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_scaling`` or, as newer files have it, ``rope_parameters``."""
    values = fields.values
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name) or {}
    if not isinstance(rope, dict):
        raise fields.fail(name, "an object or null")
    if any(isinstance(value, dict) for value in rope.values()):
        raise fields.fail(name, "one set of parameters for all layers")
    inner = _Fields(rope, f"{fields.where}: {name}")
    theta = inner.real("rope_theta", fields.real("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        allowed = set()
    elif isinstance(kind, str) and kind in _ROPE_KEYS:
        allowed = _ROPE_KEYS[kind]
    else:
        raise LoadError(f"{inner.where}: rope_type is {kind!r}, but must be one of default, {', '.join(_ROPE_KEYS)}")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise inner.fail("partial_rotary_factor", "1 or absent")
    unknown = set(rope) - allowed - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if unknown:
        raise LoadError(f"{inner.where}: {min(unknown)} is not a parameter of {kind!r}; known are {sorted(allowed)}")
    if kind == "default":
        return theta, None
    if kind == "linear":
        factor = inner.real("factor")
        return theta, RopeScaling("linear", factor)
    # Some files keep the original length next to max_position_embeddings, and transformers lets that one win.
    length = "original_max_position_embeddings"
    original = fields.integer(length, inner.integer(length, positions, 1 << 40), 1 << 40)
    if kind == "llama3":
        return theta, _llama3(inner, original)
    return theta, _yarn(inner, original, positions)


def _llama3(inner: _Fields, original: int) -> RopeScaling:
    low, high = inner.real("low_freq_factor"), inner.real("high_freq_factor")
    if high <= low:
        raise inner.fail("high_freq_factor", f"above low_freq_factor, {low}")
    return RopeScaling(
        kind="llama3",
        factor=inner.real("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _yarn(inner: _Fields, original: int, positions: int) -> RopeScaling:
    def optional(name: str) -> float | None:
        return inner.real(name) if inner.values.get(name) else None

    return RopeScaling(
        kind="yarn",
        factor=inner.real("factor", positions / original),
        original_max_position_embeddings=original,
        attention_factor=inner.real("attention_factor") if inner.values.get("attention_factor") is not None else None,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=inner.boolean("truncate", True),
    )


def _windows(fields: _Fields, family: str, layers: int, defaults: _Defaults) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where no layer has one."""
    values = fields.values
    kinds = values.get("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise fields.fail("layer_types", f"a list of {layers} items from {', '.join(known)}")
    if family == "llama":
        if kinds is not None and "sliding_attention" in kinds:
            raise fields.fail("layer_types", "full_attention everywhere for this architecture")
        return ()
    null = "sliding_window" in values and values["sliding_window"] is None
    used = family == "mistral" or fields.boolean("use_sliding_window", False)
    window = None if null or not used else fields.integer("sliding_window", defaults.sliding_window, 1 << 40)
    if family == "mistral":
        if kinds is not None and any(kind != ("sliding_attention" if window else "full_attention") for kind in kinds):
            raise fields.fail("layer_types", "absent, or the same on all layers and in accord with sliding_window")
        return () if window is None else (window,) * layers
    if kinds is None:
        start = values.get("max_window_layers", 28)
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise fields.fail("max_window_layers", "a non-negative integer")
        kinds = ["sliding_attention" if window and i >= start else "full_attention" for i in range(layers)]
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise LoadError(f"{fields.where}: layer_types asks for sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
