"""The worker around CTranslate2, and the conversion of a Hugging Face folder to its format without torch.

    python -m server.bench.offline.drive_ctranslate2 convert HF_FOLDER OUT
    python -m server.bench.offline.drive_ctranslate2 serve CT2_FOLDER THREADS COMPUTE_TYPE

It has no continuous batching: a batch is static. Prompts of different lengths are read token by token from the shortest
one's length on, so a list is handed over in groups of prompts that differ by at most SPREAD tokens.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.bench.offline.drive import Reading, Request, clock, serve

SPREAD = 16


def convert(hf: Path, out: Path) -> None:
    np: Any = importlib.import_module("numpy")  # of this worker's own environment, as are the others
    specs: Any = importlib.import_module("ctranslate2.specs")
    common: Any = importlib.import_module("ctranslate2.specs.common_spec")
    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    tensors = read_safetensors(hf / "model.safetensors", np)
    spec = specs.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        activation=common.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=config["rope_theta"],
        num_heads_kv=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = tensors["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = tensors["model.norm.weight"]
    tied = config["tie_word_embeddings"]
    decoder.projection.weight = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    for number, layer in enumerate(decoder.layer):
        attention, mlp = f"model.layers.{number}.self_attn.", f"model.layers.{number}.mlp."
        layer.self_attention.layer_norm.gamma = tensors[f"model.layers.{number}.input_layernorm.weight"]
        qkv = [tensors[f"{attention}{part}_proj.weight"] for part in "qkv"]
        layer.self_attention.linear[0].weight = np.concatenate(qkv)
        layer.self_attention.linear[1].weight = tensors[f"{attention}o_proj.weight"]
        layer.ffn.layer_norm.gamma = tensors[f"model.layers.{number}.post_attention_layernorm.weight"]
        layer.ffn.linear_0.weight = tensors[f"{mlp}gate_proj.weight"]
        layer.ffn.linear_0_noact.weight = tensors[f"{mlp}up_proj.weight"]
        layer.ffn.linear_1.weight = tensors[f"{mlp}down_proj.weight"]
    # Requests are token ids; the vocabulary is only the way in, so the ids stand for themselves.
    names = [str(number) for number in range(config["vocab_size"])]
    spec.register_vocabulary(names)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = names[1], names[2], names[0]
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    spec.validate()
    spec.optimize(quantization=None)
    out.mkdir(parents=True, exist_ok=True)
    spec.save(str(out))


def read_safetensors(path: Path, np: Any) -> dict[str, Any]:
    """fp32 tensors by name. The format: header length u64, a JSON header with offsets, then the data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        if info["dtype"] != "F32":
            raise ValueError(f"{path}: {name} is {info['dtype']}, but must be F32")
        start, end = info["data_offsets"]
        flat = np.fromfile(path, dtype=np.float32, count=(end - start) // 4, offset=8 + size + start)
        tensors[name] = flat.reshape(info["shape"])
    return tensors


def similar(requests: Sequence[Request]) -> list[list[int]]:
    """Places of requests whose prompts differ by at most SPREAD tokens; shorter prompts first."""
    groups: list[list[int]] = []
    for at in sorted(range(len(requests)), key=lambda at: len(requests[at].prompt)):
        if not groups or len(requests[at].prompt) - len(requests[groups[-1][0]].prompt) > SPREAD:
            groups.append([])
        groups[-1].append(at)
    return groups


def drive(folder: str, threads: int, compute_type: str) -> None:
    ctranslate2: Any = importlib.import_module("ctranslate2")
    generator = ctranslate2.Generator(
        folder, device="cpu", intra_threads=threads, inter_threads=1, compute_type=compute_type
    )

    def run(requests: Sequence[Request], _: bool) -> Reading:
        begin = clock()
        stamps: list[float] = []
        tokens: dict[int, list[int]] = {}
        for group in similar(requests):
            gen = max(requests[at].gen for at in group)

            def stamp(step: Any, leads: bool = 0 in group, place: int = group.index(0) if 0 in group else 0) -> bool:
                if leads and step.batch_id == place:
                    stamps.append(clock() - begin)
                return False

            results = generator.generate_batch(
                [[str(token) for token in requests[at].prompt] for at in group],
                max_length=gen,
                min_length=gen,
                beam_size=1,
                sampling_topk=1,
                include_prompt_in_result=False,
                end_token=[],
                callback=stamp,
            )
            for at, result in zip(group, results, strict=True):
                tokens[at] = result.sequences_ids[0][: requests[at].gen]
        return Reading(clock() - begin, stamps[0], stamps[-1], [tokens[at] for at in range(len(requests))])

    serve({"engine": "CTranslate2", "version": ctranslate2.__version__, "compute": generator.compute_type}, run)


def main() -> None:
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        drive(sys.argv[2], int(sys.argv[3]), sys.argv[4])


if __name__ == "__main__":
    main()
