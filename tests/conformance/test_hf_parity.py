"""The decoder against transformers: every family, logits within 1e-4 in fp32 and 64 greedy tokens equal.

The same folder is read by both sides. Then one field of our configuration at a time is changed, on our side alone, and the
comparison must fail: a field that changes nothing is a field that nobody checks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.compute.runner import ModelRunner
from engine.compute.weights import Weights, load_weights
from engine.control.plan import Eager
from engine.loading import load_model
from engine.loading.model import LoadedModel, RopeScaling
from engine.native.runner import library
from engine.native.weights import NativeWeights, load_native
from tests.compute.driver import Driver, text
from tests.models import write_folder

TOLERANCE = 1e-4
LENGTH, PROMPT = 150, 90

LLAMA3 = RopeScaling(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=256, beta_fast=16.0, beta_slow=2.0)
BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", BIASED),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_scaling": RopeScaling("linear", factor=3.0)}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-factor": ("llama", {"rope_scaling": attrs.evolve(YARN, attention_factor=0.8, truncate=False)}),
    "llama-yarn-mscale": ("llama", {"rope_scaling": attrs.evolve(YARN, mscale=0.7, mscale_all_dim=1.0)}),
    "llama-head-dim": ("llama", {"hidden_size": 96, "head_dim": 32, "num_heads": 6, "num_kv_heads": 3}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_windows": (33, 33)}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"sliding_windows": (None, 40), "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biased": ("qwen3", {"qkv_bias": True, "output_bias": True, "rope_theta": 1e6}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def folder(case: str) -> Path:
        family, overrides = CASES[case]
        return write_folder(tmp_path_factory.mktemp(case), family, **overrides)

    return folder


@pytest.fixture(scope="module")
def reference(folders: Any) -> Any:
    """transformers' model and its logits [LENGTH, vocab] for the test's tokens."""

    @functools.cache
    def load(case: str) -> tuple[Any, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(
            folders(case), dtype=torch.float32, attn_implementation="eager"
        ).train(False)
        ids = torch.tensor([text(7, LENGTH)])
        with torch.inference_mode():
            return model, model(ids, attention_mask=torch.ones_like(ids)).logits[0]

    return load


def weights_for(model: LoadedModel, compute: str) -> Weights | NativeWeights:
    if compute == "native":
        return load_native(model, library())
    with torch.inference_mode():
        return load_weights(model, torch.device("cpu"), torch.float32)


def driver_for(model: LoadedModel, compute: str = "torch") -> Driver:
    return Driver(weights_for(model, compute), rows=1, block_size=16, max_model_len=256, num_blocks=16)


def our_logits(model: LoadedModel, compute: str) -> torch.Tensor:
    """Logits after positions PROMPT - 1 .. LENGTH - 1, the prompt in chunks, the rest decoded."""
    driver, tokens = driver_for(model, compute), text(7, LENGTH)
    driver.start({0: tokens[:PROMPT]}, chunk=37)
    for position in range(PROMPT, LENGTH):
        driver.decode({0: (position, tokens[position])})
    rows = [np.frombuffer(driver.spy.logits[0, position], np.float32) for position in range(PROMPT, LENGTH + 1)]
    return torch.from_numpy(np.stack(rows).copy())


def error(model: LoadedModel, reference: torch.Tensor, compute: str = "torch") -> float:
    return (our_logits(model, compute) - reference[PROMPT - 1 :]).abs().max().item()


@pytest.mark.parametrize("compute", ["torch", "native"])
@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, compute: str, folders: Any, reference: Any) -> None:
    _, logits = reference(case)
    assert logits.std() > 1.0  # a flat distribution would agree with anything
    assert error(load_model(folders(case)), logits, compute) < TOLERANCE


@pytest.mark.parametrize("compute", ["torch", "native"])
@pytest.mark.parametrize("case", ["llama", "llama-yarn", "mistral-window", "qwen2", "qwen3"])
def test_greedy_tokens(case: str, compute: str, folders: Any, reference: Any) -> None:
    prompt = text(3, 60)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        model, _ = reference(case)
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            eos_token_id=-1,
        )[0, 60:].tolist()
    assert greedy(driver_for(load_model(folders(case)), compute), prompt, 64) == answer


def greedy(driver: Driver, prompt: tuple[int, ...], count: int) -> list[int]:
    driver.start({0: prompt})
    first = np.frombuffer(driver.spy.logits[0, len(prompt)], np.float32)
    tokens = [int(first.argmax())]
    while len(tokens) < count:
        position = len(prompt) + len(tokens) - 1
        tokens.append(driver.decode({0: (position, tokens[-1])}, Eager("test"))[0].token)
    return tokens


def scaling(**changes: Any) -> Any:
    return lambda config: attrs.evolve(config, rope_scaling=attrs.evolve(config.rope_scaling, **changes))


def fields(**changes: Any) -> Any:
    return lambda config: attrs.evolve(config, **changes)


CHANGES: list[tuple[str, str, Any]] = [
    ("llama", "rope_theta", fields(rope_theta=20000.0)),
    ("llama", "rms_norm_eps", fields(rms_norm_eps=1e-3)),
    ("llama", "rope_scaling added", fields(rope_scaling=RopeScaling("linear", factor=1.1))),
    ("llama", "sliding_windows added", fields(sliding_windows=(None, 50))),
    ("llama", "num_layers", fields(num_layers=1)),
    ("llama", "head_dim", fields(head_dim=8, num_heads=8, num_kv_heads=4)),
    ("llama", "tie_word_embeddings", fields(tie_word_embeddings=True)),
    ("llama-biased", "qkv_bias", fields(qkv_bias=False)),
    ("llama-biased", "output_bias", fields(output_bias=False)),
    ("llama-biased", "mlp_bias", fields(mlp_bias=False)),
    ("llama-linear", "factor", scaling(factor=3.2)),
    ("llama-linear", "none", fields(rope_scaling=None)),
    ("llama-llama3", "factor", scaling(factor=4.0)),
    ("llama-llama3", "low_freq_factor", scaling(low_freq_factor=2.0)),
    ("llama-llama3", "high_freq_factor", scaling(high_freq_factor=6.0)),
    ("llama-llama3", "original length", scaling(original_max_position_embeddings=128)),
    ("llama-llama3", "kind", scaling(kind="linear")),
    ("llama-yarn", "factor", scaling(factor=3.0)),
    ("llama-yarn", "beta_fast", scaling(beta_fast=4.0)),
    ("llama-yarn", "beta_slow", scaling(beta_slow=0.2)),
    ("llama-yarn", "original length", scaling(original_max_position_embeddings=64)),
    ("llama-yarn-factor", "attention_factor", scaling(attention_factor=0.82)),
    ("llama-yarn-factor", "truncate", scaling(truncate=True)),
    ("llama-yarn-mscale", "mscale", scaling(mscale=0.9)),
    ("llama-yarn-mscale", "mscale_all_dim", scaling(mscale_all_dim=0.8)),
    ("mistral-window", "window", fields(sliding_windows=(32, 33))),
    ("mistral-window", "no window", fields(sliding_windows=())),
    ("qwen2", "qkv_bias", fields(qkv_bias=False)),
    ("qwen2-window", "which layer", fields(sliding_windows=(40, None))),
    ("qwen3", "qk_norm", fields(qk_norm=False)),
    ("qwen3", "head_dim", fields(head_dim=64, num_heads=2, num_kv_heads=1, qk_norm=False)),
]


@pytest.mark.parametrize("compute", ["torch", "native"])
@pytest.mark.parametrize(("case", "name", "change"), CHANGES, ids=[f"{case}:{name}" for case, name, _ in CHANGES])
def test_one_changed_field_is_noticed(
    case: str, name: str, change: Any, compute: str, folders: Any, reference: Any
) -> None:
    model = load_model(folders(case))
    changed = attrs.evolve(model, config=change(model.config))
    assert changed.config != model.config
    assert error(changed, reference(case)[1], compute) > 10 * TOLERANCE


def test_rope_scaling_kind_that_is_unknown(folders: Any) -> None:
    model = load_model(folders("llama-linear"))
    changed = attrs.evolve(model, config=scaling(kind="dynamic")(model.config))
    with pytest.raises(ValueError, match="dynamic"):
        driver_for(changed)


def test_runner_loads_by_itself(folders: Any) -> None:
    """Without shared weights: the same path as the server's start."""
    driver = driver_for(load_model(folders("llama")))
    runner = ModelRunner(load_model(folders("llama")), driver.runner.limits)
    assert runner.weight_bytes == driver.runner.weight_bytes > 0
