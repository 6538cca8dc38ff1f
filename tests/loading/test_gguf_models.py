"""A GGUF file is the same model as the folder: every tensor, every field, in every type that can be written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from engine.loading import LoadedModel, LoadError, RopeScaling, load_model, synthetic_model
from engine.loading.gguf_file import gguf_name
from engine.loading.synthetic import FAMILIES
from tests.models import K_QUANT_SHAPE, interleave, rope_divisors, write_folder, write_gguf

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
# The largest error of a value, as a share of the largest value in its block of 32: half a step of the grid.
GRID = {"F16": 0.0005, "BF16": 0.004, "Q8_0": 0.005, "Q4_0": 0.13, "Q4_1": 0.08, "Q5_0": 0.07, "Q5_1": 0.04}


def rewrite(source: Path, target: Path, change: Any, packed: Mapping[str, tuple[Any, str]] | None = None) -> Path:
    """Copies a GGUF file with ``change(metadata, tensors)`` applied; tensors are (fp32 data, type name) by name, and
    ``packed`` puts (uint8 rows, type name) in the place of some."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    metadata = {name: (field.contents(), field.types) for name, field in fields.items()}
    tensors = {t.name: (quants.dequantize(t.data, t.tensor_type), t.tensor_type.name) for t in reader.tensors}
    change(metadata, tensors)
    writer = GGUFWriter(target, metadata.pop("general.architecture")[0])
    for name, (value, types) in metadata.items():
        writer.add_key_value(name, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
    for name, (data, kind) in tensors.items():
        if packed and name in packed:
            writer.add_tensor(name, packed[name][0], raw_dtype=GGMLQuantizationType[packed[name][1]])
            continue
        raw = quants.quantize(np.ascontiguousarray(data), GGMLQuantizationType[kind])
        is_block = raw.dtype == np.uint8
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind] if is_block else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_folder_and_gguf_hold_the_same_tensors_and_fields(family: str, tied: bool, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"tie_word_embeddings": tied, "rope_theta": 5e5, "head_dim": 32, "vocab_size": 400}
    folder = load_model(write_folder(tmp_path / "folder", family, shards=2, **shape))
    file = load_model(write_gguf(tmp_path / "model.gguf", family, **shape))
    made = synthetic_model(family, **shape)
    assert folder.config == made.config
    expected = attrs.evolve(made.config, family="llama" if family == "mistral" else family)
    assert file.config == expected
    assert set(folder.source) == set(file.source) == set(made.config.tensors())
    for name in folder.source:
        assert folder.source.shape(name) == file.source.shape(name) == made.config.tensors()[name]
        assert torch.equal(folder.source.load(name), made.source.load(name))
        assert torch.equal(file.source.load(name), made.source.load(name)), name
    assert file.eos_token_ids == folder.eos_token_ids == {2}
    assert file.tokenizer is not None
    assert folder.tokenizer is not None
    text = "The answer<|im_end|>\n is  42, naïve."
    assert file.tokenizer.encode(text) == folder.tokenizer.encode(text)
    assert file.template is not None
    assert file.template.source == getattr(folder.template, "source", None)


def test_q_and_k_rows_are_put_back_with_their_own_head_counts(tmp_path: Path) -> None:
    """The test above would pass with an interleaving that changes nothing; this one sees that rows do move."""
    made = synthetic_model("llama")
    for name, heads in ((Q_PROJ, 4), (K_PROJ, 2)):
        original = made.source.load(name)
        moved = interleave(original, heads)
        assert not torch.equal(moved, original)
        assert torch.equal(moved[1], original[8])  # second of the first pair: row head_dim / 2
    assert not torch.equal(interleave(made.source.load(Q_PROJ), 4), interleave(made.source.load(Q_PROJ), 2))


def test_q_and_k_biases_of_llama_are_put_back_too(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    made = synthetic_model("llama", **shape)
    file = load_model(write_gguf(tmp_path / "model.gguf", "llama", **shape))
    assert file.config == made.config
    for name in made.source:
        assert torch.equal(file.source.load(name), made.source.load(name)), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("ftype", GRID)
def test_quantised_types_are_close_and_stored_rows_are_in_order(ftype: str, family: str, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, quants

    model = load_model(write_gguf(tmp_path / "model.gguf", family, ftype))
    made = synthetic_model(family)
    assert ftype in model.weight_types
    for name in made.source:
        want, got = made.source.load(name), model.source.load(name)
        stored = model.source.stored(name)
        again = quants.dequantize(stored.data.numpy(), GGMLQuantizationType[stored.type]).reshape(got.shape)
        assert np.array_equal(again, got.numpy())
        if want.ndim == 1:
            assert stored.type == "F32"
            assert torch.equal(got, want)
            continue
        assert stored.type == ftype
        assert stored.data.shape[0] == want.shape[0]
        largest = want.reshape(-1, 32).abs().amax(1, keepdim=True)
        error = ((got - want).reshape(-1, 32).abs() / largest).max().item()
        assert 0 < error <= GRID[ftype], name


def q6_k(values: np.ndarray[Any, Any]) -> bytes:
    """One block of 256 values in Q6_K: 16 scales of int8, 6-bit values in two planes, one fp16 factor."""
    groups = values.reshape(16, 16)
    scales = np.abs(groups).max(1) / 31
    factor = np.float16(scales.max() / 127)
    steps = np.clip(np.rint(scales / np.float32(factor)), 1, 127).astype(np.int8)
    codes = np.clip(np.rint(groups / (np.float32(factor) * steps[:, None])), -32, 31).astype(int).reshape(-1) + 32
    low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
    for half in range(2):
        quarter = codes[half * 128 :][:128].reshape(4, 32)
        low[half * 64 :][:64] = np.concatenate(
            [(quarter[0] & 15) | (quarter[2] & 15) << 4, (quarter[1] & 15) | (quarter[3] & 15) << 4]
        )
        high[half * 32 :][:32] = sum((quarter[i] >> 4) << 2 * i for i in range(4))
    return b"".join(part.tobytes() for part in (low, high, steps, factor))


def q4_k(values: np.ndarray[Any, Any]) -> bytes:
    """One block of 256 values in Q4_K: 8 groups of 32 with a 6-bit scale and a 6-bit minimum each."""
    groups = values.reshape(8, 32)
    minima = np.maximum(-groups.min(1), 0)
    spans = np.maximum((groups.max(1) + minima) / 15, 1e-8)
    d, dmin = np.float16(spans.max() / 63), np.float16(max(minima.max(), 1e-8) / 63)
    s = np.clip(np.rint(spans / np.float32(d)), 1, 63).astype(int)
    m = np.clip(np.rint(minima / np.float32(dmin)), 0, 63).astype(int)
    codes = np.rint((groups + np.float32(dmin) * m[:, None]) / (np.float32(d) * s[:, None]))
    codes = np.clip(codes, 0, 15).astype(np.uint8)
    packed = [s[i] | (s[i + 4] >> 4) << 6 for i in range(4)] + [m[i] | (m[i + 4] >> 4) << 6 for i in range(4)]
    packed += [(s[i + 4] & 15) | (m[i + 4] & 15) << 4 for i in range(4)]
    nibbles = np.concatenate([codes[2 * i] | codes[2 * i + 1] << 4 for i in range(4)]).astype(np.uint8)
    return d.tobytes() + dmin.tobytes() + bytes(packed) + nibbles.tobytes()


@pytest.mark.parametrize(("kind", "pack", "bound"), [("Q6_K", q6_k, 0.04), ("Q4_K", q4_k, 0.15)])
def test_k_quants_packed_here_by_hand_read_back_close(kind: str, pack: Any, bound: float, tmp_path: Path) -> None:
    made = synthetic_model("llama", **K_QUANT_SHAPE)
    plain = write_gguf(tmp_path / "plain.gguf", "llama", **K_QUANT_SHAPE)
    packed: dict[str, tuple[Any, str]] = {}
    for name, heads in ((Q_PROJ, 16), ("model.layers.0.mlp.down_proj.weight", 0)):
        tensor = made.source.load(name)
        rows = (interleave(tensor, heads) if heads else tensor).numpy()
        data = b"".join(pack(block) for block in rows.reshape(-1, 256))
        packed[gguf_name(name)] = (np.frombuffer(data, np.uint8).reshape(rows.shape[0], -1), kind)
    model = load_model(rewrite(plain, tmp_path / "k.gguf", lambda metadata, tensors: None, packed))
    for name in made.source:
        want, got = made.source.load(name), model.source.load(name)
        if gguf_name(name) not in packed:
            assert torch.equal(want, got)
            continue
        assert model.source.stored(name).type == kind
        error = ((got - want).reshape(-1, 32).abs() / want.reshape(-1, 32).abs().amax(1, keepdim=True)).max().item()
        assert 0 < error < bound


SCALINGS: dict[str, RopeScaling | None] = {
    "none": None,
    "linear": RopeScaling("linear", 2.0),
    "yarn": RopeScaling("yarn", 4.0, original_max_position_embeddings=128),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=256),
    "llama3 as published": RopeScaling("llama3", 32.0, 1.0, 4.0, original_max_position_embeddings=8192),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_position_scaling_reads_back(name: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"rope_scaling": SCALINGS[name], "rope_theta": 5e5, "head_dim": 64}
    file = load_model(write_gguf(tmp_path / "model.gguf", "llama", **shape))
    assert file.config == synthetic_model("llama", **shape).config


def test_a_sliding_window_reads_back(tmp_path: Path) -> None:
    file = load_model(write_gguf(tmp_path / "model.gguf", "mistral", sliding_windows=(32, 32)))
    assert file.config.sliding_windows == (32, 32)
    with pytest.raises(LoadError, match="sliding_window"):
        load_model(write_gguf(tmp_path / "qwen.gguf", "qwen2", sliding_windows=(32, 32)))


def _set(name: str, value: Any) -> Any:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata[name] = (value, metadata[name][1])

    return change


def _drop(name: str) -> Any:
    return lambda metadata, tensors: (metadata if name in metadata else tensors).pop(name)


def _tensor(name: str, data: Any) -> Any:
    return lambda metadata, tensors: tensors.update({name: (np.asarray(data, np.float32), "F32")})


DEFECTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "tensor missing": (_drop("blk.1.ffn_up.weight"), ("blk.1.ffn_up.weight", "missing")),
    "embedding missing": (_drop("token_embd.weight"), ("token_embd.weight",)),
    "tensor extra": (_tensor("blk.2.ffn_up.weight", np.ones((96, 64))), ("blk.2.ffn_up.weight",)),
    "shape transposed": (_tensor("blk.0.ffn_up.weight", np.ones((64, 96))), ("blk.0.ffn_up.weight", "(64, 96)")),
    "no head count": (_drop("llama.attention.head_count"), ("llama.attention.head_count", "missing")),
    "no eps": (_drop("llama.attention.layer_norm_rms_epsilon"), ("layer_norm_rms_epsilon", "missing")),
    "10^6 layers": (_set("llama.block_count", 10**6), ("llama.block_count", "1000000")),
    "kv heads 3": (_set("llama.attention.head_count_kv", 3), ("head_count_kv", "3", "4")),
    "odd key length": (_set("llama.attention.key_length", 15), ("15",)),
    "partial rotary": (_set("llama.rope.dimension_count", 8), ("rope.dimension_count", "8", "16")),
    "unknown pre-tokenizer": (_set("tokenizer.ggml.pre", "tekken"), ("tokenizer.ggml.pre", "tekken", "llama-bpe")),
    "unknown tokenizer": (_set("tokenizer.ggml.model", "t5"), ("tokenizer.ggml.model", "t5")),
    "no merges": (_drop("tokenizer.ggml.merges"), ("tokenizer.ggml.merges",)),
    "merge without a space": (_set("tokenizer.ggml.merges", ["ab"]), ("merge 0", "'ab'")),
    "merge of unknown tokens": (_set("tokenizer.ggml.merges", ["zzz yyy"]), ("cannot be rebuilt", "zzz")),
    "too few token types": (_set("tokenizer.ggml.token_type", [1, 1]), ("tokenizer.ggml.token_type", "512")),
    "more tokens than rows": (_set("tokenizer.ggml.tokens", [f"t{i}" for i in range(513)]), ("513", "512")),
    "the same token twice": (_set("tokenizer.ggml.tokens", ["a"] * 512), ("tokens 0 and 1", "'a'")),
    "bos outside": (_set("tokenizer.ggml.bos_token_id", 512), ("bos_token_id", "512")),
    "template with a syntax error": (_set("tokenizer.chat_template", "{% for %}"), ("chat template", "line 1")),
    "divisors of another scaling": (_tensor("rope_freqs.weight", [1, 2, 3, 4, 5, 6, 7, 8]), ("rope_freqs.weight",)),
    "divisors of a wrong length": (_tensor("rope_freqs.weight", [1, 1]), ("rope_freqs.weight", "(8,)")),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("plain") / "plain.gguf")


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named(name: str, plain: Path, tmp_path: Path) -> None:
    change, words = DEFECTS[name]
    with pytest.raises(LoadError) as caught:
        load_model(rewrite(plain, tmp_path / "broken.gguf", change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(("kind", "dtype"), [("I8", np.int8), ("I32", np.int32), ("F64", np.float64)])
def test_types_that_are_no_weights_are_refused_by_name(kind: str, dtype: Any, plain: Path, tmp_path: Path) -> None:
    packed = {"blk.0.ffn_up.weight": (np.zeros((96, 64), dtype), kind)}
    with pytest.raises(LoadError, match=f"blk.0.ffn_up.weight' is of type {kind}"):
        load_model(rewrite(plain, tmp_path / "broken.gguf", lambda metadata, tensors: None, packed))


def test_an_unchanged_copy_loads(plain: Path, tmp_path: Path) -> None:
    copy: LoadedModel = load_model(rewrite(plain, tmp_path / "copy.gguf", lambda metadata, tensors: None))
    assert copy.config == load_model(plain).config


def test_divisors_that_are_all_one_mean_no_scaling(plain: Path, tmp_path: Path) -> None:
    copy = load_model(rewrite(plain, tmp_path / "copy.gguf", _tensor("rope_freqs.weight", np.ones(8))))
    assert copy.config.rope_scaling is None


def test_the_divisors_of_the_helper_are_transformers(tmp_path: Path) -> None:
    """The helper writes what a converter writes; here its numbers are checked against an independent source."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = synthetic_model("llama", rope_scaling=SCALINGS["llama3"], rope_theta=5e5, head_dim=64).config
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    theirs = LlamaConfig(head_dim=64, rope_parameters={**rope, "original_max_position_embeddings": 256})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 5e5 ** (-torch.arange(0, 64, 2) / 64)
    assert np.allclose(plain / scaled, rope_divisors(config), rtol=1e-5)
