"""config.json: what ``transformers`` makes of it is what we make of it, and what we do not know is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from engine.loading import LoadError, ModelConfig, RopeScaling
from engine.loading.hf_config import parse_config
from engine.loading.synthetic import FAMILIES, synthetic_config
from tests.models import config_json

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def values(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of the small model with fields changed, or removed where the value is ``...``."""
    merged = config_json(synthetic_config(family)) | changes
    return {name: value for name, value in merged.items() if value is not ...}


def parse(family: str = "llama", **changes: Any) -> ModelConfig:
    return parse_config(values(family, **changes), "config.json")


ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_scaling null": ("llama", {"rope_scaling": None}),
    "rope_scaling empty": ("llama", {"rope_scaling": {}}),
    "rope_scaling absent": ("llama", {"rope_scaling": ...}),
    "rope_theta absent": ("llama", {"rope_theta": ...}),
    "linear, old key": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "linear, new key": ("mistral", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "linear, both keys": ("llama", {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 3}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama3 in rope_parameters": (
        "llama",
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ),
    "default in rope_parameters": (
        "qwen3",
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "yarn": ("qwen2", {"rope_scaling": YARN}),
    "yarn, old key": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, **dict(list(YARN.items())[2:])}}),
    "yarn without original": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "yarn, original beside": (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
    ),
    "yarn, every field": (
        "qwen3",
        {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "head_dim absent": ("llama", {"head_dim": ...}),
    "head_dim null": ("llama", {"head_dim": None}),
    "head_dim given": ("llama", {"head_dim": 32}),
    "head_dim absent, qwen3 has 128": ("qwen3", {"head_dim": ...}),
    "head_dim absent, qwen2": ("qwen2", {"head_dim": ...}),
    "kv heads null": ("llama", {"num_key_value_heads": None}),
    "kv heads absent": ("llama", {"num_key_value_heads": ...}),
    "kv heads absent, mistral has 8": ("mistral", {"num_key_value_heads": ..., "num_attention_heads": 16}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "bias, qwen3": ("qwen3", {"attention_bias": True}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "tie absent": ("llama", {"tie_word_embeddings": ...}),
    "eps absent": ("llama", {"rms_norm_eps": ...}),
    "positions absent": ("llama", {"max_position_embeddings": ...}),
    "window": ("mistral", {"sliding_window": 32}),
    "window null": ("mistral", {"sliding_window": None}),
    "window absent, mistral has 4096": ("mistral", {"sliding_window": ...}),
    "window not in use": ("qwen2", {"sliding_window": 32, "use_sliding_window": False}),
    "window from layer 1": ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}),
    "window beyond the layers": ("qwen3", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 9}),
    "window by layer_types": (
        "qwen3",
        {
            "sliding_window": 32,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "model_type without architectures": ("qwen2", {"architectures": ...}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_equal_to_transformers(name: str) -> None:
    family, changes = ACCEPTED[name]
    given = values(family, **changes)
    ours = parse_config(given, "config.json")
    theirs = AutoConfig.for_model(**given)
    theirs.standardize_rope_params()  # as its rotary embedding does when the model is built
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == (family == "qwen2" or getattr(theirs, "attention_bias", False))
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling.kind if ours.rope_scaling else "default") == rope["rope_type"]
    if ours.rope_scaling is not None:
        for field in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            assert rope.get(field) is None or getattr(ours.rope_scaling, field) == rope[field], field
        for field in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            assert rope.get(field) is None or getattr(ours.rope_scaling, field) == rope[field], field
    if ours.rope_scaling is None or ours.rope_scaling.kind != "yarn":
        assert ours.max_position_embeddings == theirs.max_position_embeddings
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    windows = (
        [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        if (getattr(theirs, "sliding_window", None))
        else []
    )
    assert list(ours.sliding_windows) == (windows if any(windows) else [])


def test_yarn_extends_the_positions_to_what_it_was_made_for() -> None:
    assert parse("qwen2", rope_scaling=YARN, max_position_embeddings=128).max_position_embeddings == 512
    assert parse("qwen2", rope_scaling=YARN, max_position_embeddings=1024).max_position_embeddings == 1024


def test_sizes_that_do_not_divide_load_when_head_dim_is_given() -> None:
    config = parse(hidden_size=60, num_attention_heads=8, num_key_value_heads=None, head_dim=16)
    assert (config.num_kv_heads, config.head_dim) == (8, 16)
    assert config.tensors()["model.layers.0.self_attn.q_proj.weight"] == (128, 60)


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "unknown architecture": (
        "llama",
        {"architectures": ["MambaForCausalLM"]},
        ("MambaForCausalLM", "LlamaForCausalLM"),
    ),
    "a classifier": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, ("Qwen3ForCausalLM",)),
    "no architecture at all": ("llama", {"architectures": [], "model_type": ...}, ("None", "MistralForCausalLM")),
    "unknown scaling": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic", "yarn")),
    "scaling without a factor": ("llama", {"rope_scaling": {"type": "linear"}}, ("factor", "missing")),
    "scaling factor a string": ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, ("factor", "'2'")),
    "scaling factor NaN": ("llama", {"rope_scaling": {"type": "linear", "factor": float("nan")}}, ("factor", "nan")),
    "scaling a string": ("llama", {"rope_scaling": "linear"}, ("rope_scaling", "an object or null")),
    "scaling with a stray key": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}},
        ("alpha", "linear"),
    ),
    "scaling by layer": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        ("rope_parameters", "all layers"),
    ),
    "llama3 without bounds": ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
    "llama3 with equal bounds": ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ("high_freq_factor",)),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    "gelu": ("llama", {"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
    "quantised": ("llama", {"quantization_config": {"quant_method": "awq"}}, ("quantization_config", "awq")),
    "no vocab_size": ("llama", {"vocab_size": ...}, ("vocab_size", "missing")),
    "hidden_size a string": ("llama", {"hidden_size": "64"}, ("hidden_size", "'64'")),
    "layers a float": ("llama", {"num_hidden_layers": 2.0}, ("num_hidden_layers", "2.0")),
    "layers true": ("llama", {"num_hidden_layers": True}, ("num_hidden_layers", "True")),
    "10^9 layers": ("llama", {"num_hidden_layers": 10**9}, ("num_hidden_layers", "1024")),
    "odd head_dim": ("llama", {"head_dim": 15}, ("head_dim", "even")),
    "kv heads do not divide": ("llama", {"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
    "negative eps": ("llama", {"rms_norm_eps": -1e-5}, ("rms_norm_eps",)),
    "tie a string": ("llama", {"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "'yes'")),
    "layer_types too short": ("qwen3", {"layer_types": ["full_attention"]}, ("layer_types", "2 items")),
    "layer_types unknown": (
        "qwen3",
        {"layer_types": ["full_attention", "linear"]},
        ("layer_types", "sliding_attention"),
    ),
    "layer_types without a window": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        ("layer_types", "sliding_window"),
    ),
    "window 0": ("mistral", {"sliding_window": 0}, ("sliding_window", "0")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    family, changes, words = REFUSED[name]
    with pytest.raises(LoadError) as caught:
        parse(family, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_of_the_test_helpers_reads_back(family: str) -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=128)
    config = synthetic_config(family, rope_scaling=scaling, rope_theta=5e5, tie_word_embeddings=True)
    assert parse_config(config_json(config), "config.json") == config
