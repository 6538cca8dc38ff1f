"""The synthetic model: the same on every machine, rich enough that a mistake shows, and what ``transformers`` loads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading import LoadError, load_model, synthetic_model
from engine.loading.synthetic import FAMILIES
from tests.models import write_folder


def digest(**options: Any) -> str:
    model = synthetic_model(**options)
    whole = hashlib.sha256()
    for name in model.source:
        whole.update(model.source.load(name).numpy().tobytes())
    return whole.hexdigest()[:16]


def test_the_weights_are_these_bytes() -> None:
    """Anything that other tests recorded about the synthetic model hangs on these bytes."""
    assert digest(family="llama", seed=0) == "de0da00b4c8ba8bf"
    assert digest(family="qwen3", seed=7) == "90bf9d78646ee3df"
    assert digest(family="llama", seed=1) != digest(family="llama", seed=0)


def test_a_tensor_depends_on_its_own_name_and_not_on_what_was_loaded_before() -> None:
    one, two = synthetic_model(), synthetic_model()
    names = list(one.source)
    first = {name: one.source.load(name) for name in names}
    second = {name: two.source.load(name) for name in reversed(names)}
    assert all(torch.equal(first[name], second[name]) for name in names)
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_not_ones_and_biases_not_zeros(family: str) -> None:
    source = synthetic_model(family).source
    norms = [name for name in source if name.endswith("norm.weight")]
    biases = [name for name in source if name.endswith(".bias")]
    assert bool(biases) == (family == "qwen2")
    assert any("q_norm" in name for name in norms) == (family == "qwen3")
    for name in norms:
        assert 0.05 < source.load(name).std() < 0.3
        assert source.load(name).min() > 0.5
    for name in biases:
        assert source.load(name).std() > 0.2
    for name in source:
        stored = source.stored(name)
        assert torch.equal(stored.data.view(torch.float32).reshape(source.shape(name)), source.load(name))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_folder_and_its_logits_spread(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_folder(tmp_path / "model", family, tie_word_embeddings=tied, shards=2)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (1, 64), generator=generator)
    with torch.no_grad():
        logits = model(ids).logits[0]
        moved = model(torch.cat([ids[:, :1] + 1, ids[:, 1:]], 1) % 512).logits[0]
    assert 1.5 < logits.std() < 2.5
    assert logits.argmax(-1).unique().numel() > 20
    assert (logits[-1] - moved[-1]).abs().max() > 0.001  # the last position sees the first
    assert load_model(folder).config == synthetic_model(family, tie_word_embeddings=tied).config


def test_overrides_reach_the_configuration_and_unknown_ones_are_refused() -> None:
    model = synthetic_model("qwen2", num_layers=3, sliding_windows=(None, 8, 8), vocab_size=300)
    assert model.config.sliding_windows == (None, 8, 8)
    assert "model.layers.2.self_attn.q_proj.bias" in set(model.source)
    assert synthetic_model(logit_std=4.0).source.load("lm_head.weight").std() > 0.4
    with pytest.raises(LoadError, match="family is 'gpt'"):
        synthetic_model("gpt")
    with pytest.raises(TypeError):
        synthetic_model(nonsense=1)


def test_a_vocabulary_below_the_bytes_has_no_tokenizer() -> None:
    small = synthetic_model(vocab_size=100)
    assert (small.tokenizer, small.template, small.eos_token_ids) == (None, None, frozenset())
    least = synthetic_model(vocab_size=259)
    assert least.tokenizer is not None
    assert least.tokenizer.decode(least.tokenizer.encode("héllo")) == "héllo"
