"""One defect in a good model folder each: the error names the file and the tensor, at once, and nothing is loaded."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loading import LoadError, load_model
from tests.models import write_folder, write_json

SECONDS = 1.0
ONE, TWO, THREE = (f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in values.items() if value is not ...})


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def move_in_index(folder: Path, name: str, shard: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = shard
    write_json(folder / INDEX, index)


def only_pickles(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def shard_of(folder: Path, name: str) -> Path:
    shard: str = json.loads((folder / INDEX).read_text())["weight_map"][name]
    return folder / shard


def replace(folder: Path, name: str, tensor: torch.Tensor) -> None:
    edit_tensors(shard_of(folder, name), lambda tensors: tensors.update({name: tensor}))


SHARDED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "shard deleted": (lambda f: (f / TWO).unlink(), (TWO, "missing")),
    "shard renamed": (lambda f: (f / TWO).rename(f / "model-2.safetensors"), (TWO, "missing")),
    "index names a tensor the shard lacks": (lambda f: move_in_index(f, "model.ghost", THREE), (THREE, "model.ghost")),
    "index puts a tensor in another shard": (lambda f: move_in_index(f, NORM, THREE), (ONE, NORM)),
    "tensor dropped from its shard": (
        lambda f: edit_tensors(shard_of(f, DOWN), lambda t: t.pop(DOWN)),
        (DOWN, "not there"),
    ),
    "file that the index does not know": (
        lambda f: shutil.copy(f / ONE, f / "model-x.safetensors"),
        ("model-x", INDEX),
    ),
    "wrong shape": (lambda f: replace(f, DOWN, torch.ones(64, 97)), (DOWN, "(64, 97)", "(64, 96)")),
    "transposed": (lambda f: replace(f, DOWN, torch.ones(96, 64)), (DOWN, "(96, 64)")),
    "integers": (lambda f: replace(f, DOWN, torch.ones(64, 96, dtype=torch.int32)), (DOWN, "I32")),
    "float8": (
        lambda f: replace(f, DOWN, torch.ones(64, 96).to(torch.float8_e4m3fn)),
        (DOWN, "F8_E4M3"),
    ),
    "truncated in the data": (lambda f: cut(f / TWO, 0.7), (TWO, "tensor 'model.layers", "truncated")),
    "truncated in the header": (lambda f: (f / TWO).write_bytes((f / TWO).read_bytes()[:40]), (TWO, "truncated")),
    "empty shard": (lambda f: (f / TWO).write_bytes(b""), (TWO,)),
    "header of 2^60 bytes": (lambda f: (f / TWO).write_bytes(b"\0" * 7 + b"\x10" + bytes(64)), (TWO,)),
    "garbage": (lambda f: (f / TWO).write_bytes(bytes(range(256)) * 9), (TWO,)),
    "index is not JSON": (lambda f: (f / INDEX).write_text("{"), (INDEX, "not valid JSON")),
    "index is a list": (lambda f: (f / INDEX).write_text("[]"), (INDEX, "must hold an object")),
    "index without a map": (lambda f: edit_json(f / INDEX, weight_map=...), (INDEX, "weight_map")),
    "index points outside": (lambda f: move_in_index(f, NORM, "../x.safetensors"), (INDEX, "../x.safetensors")),
    "index points to a pickle": (lambda f: move_in_index(f, NORM, "x.bin"), (INDEX, "x.bin")),
    "no index": (lambda f: (f / INDEX).unlink(), (INDEX, ONE)),
    "only pickles": (only_pickles, ("pytorch_model.bin", "run code")),
    "no config": (lambda f: (f / "config.json").unlink(), ("no config.json",)),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{]"), ("config.json", "not valid JSON")),
    "config nests deeply": (lambda f: (f / "config.json").write_text("[" * 100_000), ("config.json", "not valid JSON")),
    "tokenizer is not a tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), ("tokenizer.json",)),
    "template with a syntax error": (
        lambda f: edit_json(f / "tokenizer_config.json", chat_template="{% if %}"),
        ("tokenizer_config.json", "line 1"),
    ),
    "template of a strange type": (
        lambda f: edit_json(f / "tokenizer_config.json", chat_template=7),
        ("tokenizer_config.json", "chat_template"),
    ),
    "generation config with a strange EOS": (
        lambda f: write_json(f / "generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", "eos_token_id"),
    ),
}
SINGLE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "missing": (lambda t: t.pop(DOWN), (DOWN,)),
    "extra": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}),
        ("model.layers.2", "extra"),
    ),
    "extra bias": (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}), ("up_proj.bias",)),
    "untied without a head": (lambda t: t.pop("lm_head.weight"), ("lm_head.weight", "tie_word_embeddings is false")),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("good") / "good", shards=3)


def refused(folder: Path) -> str:
    started = time.perf_counter()
    with pytest.raises(LoadError) as caught:
        load_model(folder)
    assert time.perf_counter() - started < SECONDS
    return str(caught.value)


def test_the_folder_that_the_defects_start_from_is_good(good: Path) -> None:
    model = load_model(good)
    assert set(model.source) == set(model.config.tensors())


@pytest.mark.parametrize("name", SHARDED)
def test_a_defect_in_a_sharded_folder_is_named(name: str, good: Path, tmp_path: Path) -> None:
    break_it, words = SHARDED[name]
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    break_it(folder)
    message = refused(folder)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", SINGLE)
def test_a_defect_in_the_only_file_is_named(name: str, tmp_path: Path) -> None:
    break_it, words = SINGLE[name]
    folder = write_folder(tmp_path / "model")
    edit_tensors(folder / "model.safetensors", break_it)
    message = refused(folder)
    words = tuple(word for word in words if word != "extra")
    assert all(word in message for word in words), message


def test_a_file_that_changes_after_the_check_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    model = load_model(folder)
    cut(folder / "model.safetensors", 0.5)
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        model.source.load(DOWN)


def test_a_tied_head_that_is_a_copy_is_accepted_and_another_matrix_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", tie_word_embeddings=True)
    weights = folder / "model.safetensors"
    edit_tensors(weights, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in set(load_model(folder).source)
    edit_tensors(weights, lambda t: t.update({"lm_head.weight": torch.randn_like(t["model.embed_tokens.weight"])}))
    assert "differs" in refused(folder)


def test_frequencies_that_old_checkpoints_stored_are_ignored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder / "model.safetensors", lambda t: t.update({name: torch.ones(8)}))
    assert name not in set(load_model(folder).source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_float_type_loads_as_fp32_and_its_stored_bytes_are_the_files(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype=dtype)
    source, raw = load_model(folder).source, load_file(folder / "model.safetensors")
    for name in source:
        tensor = source.load(name)
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        assert torch.equal(tensor, raw[name].float())
        stored = source.stored(name)
        kind = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[stored.type]
        assert torch.equal(stored.data.view(kind).reshape(tensor.shape).float(), tensor)


def test_a_folder_without_a_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    model = load_model(folder)
    assert model.tokenizer is None
    assert model.eos_token_ids == {2}
