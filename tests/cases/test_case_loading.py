"""Models that load with success and answer garbage: every family and format against the same weights in memory and a
dense forward in fp64. Cases B135, B138, B141, B142 and B145; refusals of broken files are in ``tests/loading``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from engine.build import assemble
from engine.compute.weights import load_weights
from engine.config import EngineConfig
from engine.loading import load_model
from engine.loading.model import LoadedModel, StoredTensor, TensorSource
from engine.loading.synthetic import FAMILIES, synthetic_model
from tests import models
from tests.cases.oracle import Answer, Ask, dense_logits, greedy, play, text
from tests.models import write_folder, write_gguf

ASKS = [Ask(text(k, n), greedy(6)) for k, n in enumerate((1, 5, 9))]
# No matrix is square: hidden 64, q of 4 x 32, k and v of 1 x 32, feed-forward 96, vocabulary 400.
SHAPE: dict[str, Any] = {"head_dim": 32, "vocab_size": 400, "num_kv_heads": 1}
QUANTISED = {"F16": 0.01, "BF16": 0.1, "Q8_0": 0.2, "Q4_0": 2.0}  # largest error of a log-probability


def answers_of(model: LoadedModel) -> list[Answer]:
    config = EngineConfig(
        device="cpu",
        threads=1,
        kv_dtype="float32",  # as the dense forward has it
        block_size=4,
        num_kv_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    asks = [attrs.evolve(ask, prompt=tuple(token % model.config.vocab_size for token in ask.prompt)) for ask in ASKS]
    return play(assemble(config, model), asks)


def logprobs(answers: list[Answer]) -> list[float]:
    return [one.logprobs.chosen for answer in answers for one in answer.sampled if one.logprobs]


def dense_logprobs(model: LoadedModel, answers: list[Answer]) -> list[float]:
    """The dense forward's log-probability of every token that was sampled."""
    values = []
    for ask, answer in zip(ASKS, answers, strict=True):
        prompt = [token % model.config.vocab_size for token in ask.prompt]
        logits = dense_logits(model, [*prompt, *answer.tokens]).log_softmax(-1)
        values += [float(logits[len(prompt) + at - 1][token]) for at, token in enumerate(answer.tokens)]
    return values


def near(left: list[float], right: list[float], bound: float) -> bool:
    return all(abs(a - b) < bound for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_b141_b142_b145_every_family_says_the_same_from_memory_folder_and_gguf(family: str, tmp_path: Path) -> None:
    """To the byte of the logits, in fp32, with matrices that are not square; and what a dense forward says."""
    made = synthetic_model(family, **SHAPE)
    expected = answers_of(made)
    assert near(logprobs(expected), dense_logprobs(made, expected), 1e-4)
    folder = load_model(write_folder(tmp_path / "folder", family, shards=2, **SHAPE))
    gguf = load_model(write_gguf(tmp_path / "model.gguf", family, **SHAPE))
    for loaded in (folder, gguf):
        assert [answer.sampled for answer in answers_of(loaded)] == [answer.sampled for answer in expected]


@pytest.mark.parametrize("ftype", QUANTISED)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_b141_b145_quantised_files_are_near_and_exact_for_what_they_hold(
    family: str, ftype: str, tmp_path: Path
) -> None:
    """Near the fp32 weights by a bound per type, and equal to a dense forward over the dequantised tensors. Uniform
    logits are far from all of it: every token would have -ln(400), which is -5.99."""
    made = synthetic_model(family, **SHAPE)
    loaded = load_model(write_gguf(tmp_path / "model.gguf", family, ftype, **SHAPE))
    answers = answers_of(loaded)
    assert near(logprobs(answers), dense_logprobs(loaded, answers), 1e-4)
    assert near(logprobs(answers), dense_logprobs(made, answers), QUANTISED[ftype])
    assert sum(logprobs(answers)) / len(logprobs(answers)) > -3


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_size": 60, "num_heads": 8, "num_kv_heads": 8, "head_dim": 16}),
        ("qwen2", {"hidden_size": 60, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8}),
        ("qwen3", {"hidden_size": 72, "num_heads": 5, "num_kv_heads": 1, "head_dim": 24}),
        ("llama", {"tie_word_embeddings": True, "rope_theta": 5e5}),
    ],
)
def test_b135_sizes_that_do_not_divide_compute_what_they_should(family: str, changes: dict[str, Any]) -> None:
    made = synthetic_model(family, **changes)
    answers = answers_of(made)
    assert near(logprobs(answers), dense_logprobs(made, answers), 1e-4)


class Counting:
    """A source that counts how often each tensor is read."""

    def __init__(self, inner: TensorSource) -> None:
        self.inner, self.read = inner, Counter[str]()

    def __iter__(self) -> Any:
        return iter(self.inner)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def load(self, name: str) -> torch.Tensor:
        self.read[name] += 1
        return self.inner.load(name)

    def stored(self, name: str) -> StoredTensor:
        self.read[name] += 1
        return self.inner.stored(name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_b138_every_tensor_is_read_once_and_none_is_left(family: str, tied: bool) -> None:
    made = synthetic_model(family, tie_word_embeddings=tied)
    source = Counting(made.source)
    with torch.inference_mode():
        load_weights(attrs.evolve(made, source=source), torch.device("cpu"), torch.float32)
    assert source.read == Counter(made.config.tensors().keys())


# That these comparisons can fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["not permuted", "kv heads of q"])
def test_a_wrong_permutation_is_seen(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's q and k as llama.cpp would not have stored them load without complaint and answer something else."""
    interleave = models.interleave

    def other(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        return tensor if wrong == "not permuted" else interleave(tensor, 1)

    monkeypatch.setattr(models, "interleave", other)
    made = synthetic_model("llama", **SHAPE)
    loaded = load_model(write_gguf(tmp_path / "model.gguf", "llama", **SHAPE))
    answers = answers_of(loaded)
    assert [answer.sampled for answer in answers] != [answer.sampled for answer in answers_of(made)]
    assert not near(logprobs(answers), dense_logprobs(made, answers), QUANTISED["Q8_0"])


def test_a_tensor_without_its_transform_is_seen() -> None:
    """A norm taken as zero-centred makes an answer that no bound above accepts (B145)."""
    made = synthetic_model("llama", **SHAPE)

    class Shifted(Counting):
        def load(self, name: str) -> torch.Tensor:
            return self.inner.load(name) - float("norm" in name)

    answers = answers_of(attrs.evolve(made, source=Shifted(made.source)))
    assert not near(logprobs(answers), dense_logprobs(made, answers), QUANTISED["Q8_0"])
