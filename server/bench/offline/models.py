"""The model files that engines are measured on: the shipped GGUF, and the same weights dequantised exactly.

    f32.gguf                        every tensor in fp32, otherwise the same file
    f16, bf16, q8_0, q4_0 .gguf     its matrices rounded to another type; what had that type before stays as it was
    hf/                             the fp32 weights as a Hugging Face folder, for ``transformers``
    ct2/, ov/                       the same in the formats of CTranslate2 and OpenVINO, made by their own packages

They are made once, into a folder named after the source file's content, and a stamp is written last.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from engine.loading.load import default_model_path, load_model
from engine.loading.model import LoadedModel, ModelConfig
from engine.native.library import INTEGER

Tell = Callable[[str], None]
KINDS = {"F32": 0, "BF16": 32, "F16": 1, "Q8_0": 7, "Q4_0": 2}  # with the number of the file type in a GGUF header
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@attrs.frozen
class Files:
    """Where everything lies. ``shipped`` is the file that was given; the rest is in ``folder``."""

    shipped: Path
    folder: Path

    def gguf(self, kind: str) -> Path:
        """``kind``: F32, BF16, F16, Q8_0, Q4_0."""
        return self.folder / f"{kind.lower()}.gguf"

    @property
    def hf(self) -> Path:
        return self.folder / "hf"

    @property
    def ct2(self) -> Path:
        return self.folder / "ct2"

    @property
    def openvino(self) -> Path:
        return self.folder / "ov"


def files_of(model: Path | None, cache: Path) -> Files:
    """Places for ``model`` (a .gguf file; None is the default model) under ``cache``; nothing is made."""
    shipped = model or default_model_path()
    with shipped.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return Files(shipped, cache / f"{shipped.stem}-{digest}")


def quantised(model: Path) -> bool:
    """Whether any linear layer of ``model`` can be multiplied by 8-bit activations. Raises ``LoadError``."""
    source = load_model(model).source
    return any(source.stored(name).type in INTEGER for name in source if name.endswith("_proj.weight"))


def prepare(files: Files, tell: Tell) -> Files:
    """Makes what is missing of the GGUF files and hf/; ``tell`` hears of each. Raises ``LoadError``, ``OSError``."""
    for kind in KINDS:
        once(files, files.gguf(kind), tell, functools.partial(_rewrite, files.shipped, kind=kind))
    once(files, files.hf, tell, lambda out: write_folder(load_model(files.shipped), out))
    return files


def once(files: Files, place: Path, tell: Tell, make: Callable[[Path], None]) -> None:
    """Has ``make`` write ``place`` unless it did so before; what an interrupted run left is made again."""
    stamp = files.folder / f".{place.name}.made"
    if stamp.exists() and place.exists():
        return
    of = "" if place == files.shipped else f" of {files.shipped.name}"
    tell(f"making {place.name}{of}")
    files.folder.mkdir(parents=True, exist_ok=True)
    half = files.folder / f"{place.name}.part"
    for old in (half, place):
        _remove(old)
    make(half)
    half.rename(place)
    stamp.touch()


def _remove(place: Path) -> None:
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)


def _rewrite(shipped: Path, out: Path, *, kind: str) -> None:
    """The GGUF file with its matrices in another type; vectors are fp32 in any case."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(shipped)
    wanted = GGMLQuantizationType[kind]
    file_type = KINDS[kind]
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        value = file_type if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, field.types[0], sub)
    for tensor in reader.tensors:
        rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if len(tensor.shape) < 2 or kind == "F32":
            writer.add_tensor(tensor.name, rows)
        elif tensor.tensor_type == wanted:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, quantize(rows, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(model: LoadedModel, out: Path) -> None:
    """``model`` in fp32 as a Hugging Face folder: config.json, model.safetensors, tokenizer.json."""
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    tensors = {name: model.source.load(name) for name in model.source}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config_json(model.config), indent=1), encoding="utf-8")
    if model.tokenizer is not None:
        model.tokenizer.backend.save(str(out / "tokenizer.json"))


def config_json(config: ModelConfig) -> Mapping[str, Any]:
    """``config`` as Hugging Face's config.json has it."""
    return {
        "architectures": [ARCHITECTURES[config.family]],
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
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": None,
    }
