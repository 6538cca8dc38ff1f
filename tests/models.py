"""Small model files for tests: one random model, written as a Hugging Face folder or as a GGUF file.

Both writers take the tensors of ``engine.loading.synthetic`` under the same seed, so a folder, a GGUF file and
``synthetic_model`` of one family and seed are the same model (up to the rounding of the type that was asked for), and
``transformers`` can load the folder. Logits spread by about 2, so a comparison of greedy tokens means something.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine.loading.gguf_file import gguf_name
from engine.loading.hf_config import FAMILIES
from engine.loading.model import ModelConfig
from engine.loading.synthetic import (
    CHATML,
    SPECIAL_TOKENS,
    SyntheticSource,
    synthetic_backend,
    synthetic_config,
)

BOS, EOS = "<|im_start|>", "<|im_end|>"
TEMPLATE_PLACES = ("tokenizer_config", "named", "jinja", "json", None)
K_QUANT_SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 16, "num_kv_heads": 4}
"""Overrides with which every matrix row is a multiple of 256, as K-quants need."""


def config_json(config: ModelConfig) -> dict[str, Any]:
    """``config`` as Hugging Face's config.json has it."""
    name = next(name for name, family in FAMILIES.items() if family == config.family)
    values: dict[str, Any] = {
        "architectures": [name],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_json(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
    }
    if config.family in ("llama", "qwen3"):
        values["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        values["sliding_window"] = next(iter(config.sliding_windows), None)
    if config.family in ("qwen2", "qwen3") and config.sliding_windows:
        values["use_sliding_window"] = True
        values["sliding_window"] = next(window for window in config.sliding_windows if window)
        values["layer_types"] = ["sliding_attention" if w else "full_attention" for w in config.sliding_windows]
    return values


def _rope_json(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values["low_freq_factor"], values["high_freq_factor"] = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "yarn":
        names = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
        values |= {name: getattr(scaling, name) for name in names if getattr(scaling, name) is not None}
    if scaling.original_max_position_embeddings is not None:
        values["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return values


def write_folder(
    path: Path,
    family: str = "llama",
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    template_place: str | None = "tokenizer_config",
    **config_overrides: Any,
) -> Path:
    """Writes a folder that ``load_model`` and ``AutoModelForCausalLM.from_pretrained`` both read; returns ``path``.

    ``config_overrides`` are fields of ``ModelConfig``. ``template_place`` is one of ``TEMPLATE_PLACES``.
    """
    config = synthetic_config(family, **config_overrides)
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config_json(config))
    source = SyntheticSource(config, seed)
    tensors = {name: source.load(name).to(dtype).contiguous() for name in source}
    write_shards(path, tensors, shards)
    backend = synthetic_backend(config.vocab_size)
    backend.save(str(path / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    if template_place == "tokenizer_config":
        settings["chat_template"] = CHATML
    elif template_place == "named":
        settings["chat_template"] = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T"}]
    elif template_place == "jinja":
        (path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    elif template_place == "json":
        write_json(path / "chat_template.json", {"chat_template": CHATML})
    write_json(path / "tokenizer_config.json", settings)
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def write_shards(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """``model.safetensors``, or ``shards`` files and their index."""
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in the order in which GGUF stores them for ``llama``: pairs of a half-split head side by side."""
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, 2, half, -1).transpose(1, 2).reshape(tensor.shape).contiguous()


def rope_divisors(config: ModelConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a GGUF stores for Llama 3's scaling: by how much each frequency is divided."""
    scaling = config.rope_scaling
    assert scaling is not None
    assert scaling.original_max_position_embeddings is not None
    divisors = []
    for i in range(0, config.head_dim, 2):
        turns = scaling.original_max_position_embeddings / (2 * math.pi * config.rope_theta ** (i / config.head_dim))
        if turns > scaling.high_freq_factor:
            divisors.append(1.0)
        elif turns < scaling.low_freq_factor:
            divisors.append(scaling.factor)
        else:
            smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(divisors, np.float32)


def write_gguf(
    path: Path,
    family: str = "llama",
    ftype: str = "F32",
    *,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Writes the model as one GGUF file with its matrices in ``ftype`` (any type that the gguf package can quantise:
    F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1) and its vectors in F32; returns ``path``."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = synthetic_config(family, **config_overrides)
    writer = GGUFWriter(path, "llama" if family == "mistral" else family)
    _write_keys(writer, config)
    _write_tokenizer(writer, config.vocab_size)
    source = SyntheticSource(config, seed)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(config))
    for name in source:
        tensor = source.load(name)
        if family in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave(tensor, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        kind = GGMLQuantizationType[ftype if tensor.ndim == 2 else "F32"]
        data = quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind if data.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_keys(writer: Any, config: ModelConfig) -> None:
    from gguf import RopeScalingType

    writer.add_name(f"tiny {config.family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.sliding_windows:
        writer.add_sliding_window(config.sliding_windows[0])
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)


def _write_tokenizer(writer: Any, vocab_size: int) -> None:
    """The synthetic tokenizer; ids that only the embedding has are unused tokens, as converters write them."""
    from gguf import TokenType

    model = json.loads(synthetic_backend(vocab_size).to_str())["model"]
    by_id = {i: token for token, i in model["vocab"].items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    kinds = [TokenType.NORMAL if i in by_id else TokenType.UNUSED for i in range(vocab_size)]
    for special in SPECIAL_TOKENS:
        kinds[model["vocab"][special]] = TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(SPECIAL_TOKENS.index(BOS))
    writer.add_eos_token_id(SPECIAL_TOKENS.index(EOS))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
