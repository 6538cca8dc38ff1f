"""The decoder on Triton kernels: torch's numbers, and equal bytes whatever the batch, the chunks and the graphs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ci.triton_errors import device
from engine.control.limits import Limits
from engine.control.plan import Replay
from engine.cuda.runner import TritonRunner
from engine.cuda.weights import TritonWeights, load_triton
from engine.loading import load_model
from engine.loading.synthetic import synthetic_model
from tests.compute import driver as driving
from tests.compute.driver import Driver, text
from tests.models import write_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning"),
    pytest.mark.timeout(1800),  # the interpreter takes seconds where a GPU takes microseconds
]
PROMPT, LENGTH = 9, 12


@functools.cache
def weights(name: str, dtype: torch.dtype = torch.float32) -> TritonWeights:
    family, overrides = driving.MODELS[name]
    return load_triton(synthetic_model(family, num_layers=2, **overrides), device(), dtype)


@pytest.fixture(autouse=True)
def _runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of the torch path, over Triton's weights."""
    usual = driving.runner_for

    def runner_for(given: Any, limits: Limits, *rest: Any) -> Any:
        if isinstance(given, TritonWeights):
            return TritonRunner(synthetic_model(), limits, weights=given)
        return usual(given, limits, *rest)

    monkeypatch.setattr(driving, "runner_for", runner_for)


def logits(given: Any, tokens: tuple[int, ...], chunk: int = 100, **options: Any) -> dict[tuple[int, int], bytes]:
    """The prompt in chunks, then the rest one by one: by row and position of the new token."""
    driver = Driver(given, rows=1, max_model_len=32, num_blocks=16, **options)
    driver.start({0: tokens[:PROMPT]}, chunk=chunk)
    for position in range(PROMPT, len(tokens)):
        driver.decode({0: (position, tokens[position])})
    return driver.spy.logits


def numbers(found: dict[tuple[int, int], bytes]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(value), dtype=torch.float32) for value in found.values()])


@pytest.mark.parametrize(
    "name",
    [name if name in ("qwen3", "odd") else pytest.param(name, marks=pytest.mark.slow) for name in driving.MODELS],
)
def test_the_numbers_of_the_torch_path(name: str) -> None:
    """Every family, in poisoned memory. The two paths add in another order, so bits may differ."""
    tokens = text(1, LENGTH - 2)
    ours = numbers(logits(weights(name), tokens, poison=float("nan")))
    theirs = numbers(logits(driving.shared_weights(name), tokens))
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=0), (ours - theirs).abs().max()
    assert theirs.std() > 1


OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_windows": (9, 9)}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize(
    "name", [name if name == "mistral" else pytest.param(name, marks=pytest.mark.slow) for name in OF_TRANSFORMERS]
)
def test_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    """One folder, read by both; what each token of the prompt and each decoded one makes likely."""
    family, overrides = OF_TRANSFORMERS[name]
    folder, tokens = write_folder(tmp_path, family, **overrides), text(1, LENGTH)
    ids = torch.tensor([tokens])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        theirs = reference.train(False)(ids, attention_mask=torch.ones_like(ids)).logits[0, PROMPT - 1 :]
    ours = numbers(logits(load_triton(load_model(str(folder)), device(), torch.float32), tokens, chunk=4))
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.std() > 1
    other = numbers(logits(load_triton(synthetic_model(family, seed=1, **overrides), device(), torch.float32), tokens))
    assert (other - theirs).abs().max() > 1


@pytest.mark.slow
def test_bf16_is_near() -> None:
    tokens = text(1, PROMPT + 1)
    narrow = numbers(logits(weights("llama", torch.bfloat16), tokens))
    wide = numbers(logits(weights("llama"), tokens))
    assert 1e-4 < (narrow - wide).abs().mean() < 0.05


def test_a_crowd_gives_the_bytes_of_each_request_alone() -> None:
    """Chunked differently, beside others, in another row and block order, replayed with padded rows and a wide table."""
    tokens, other = text(1, LENGTH), text(2, 20)
    alone = {position: value for (_, position), value in logits(weights("window"), tokens).items()}
    driver = Driver(
        weights("window"),
        rows=4,
        max_model_len=64,
        num_blocks=40,
        captures=((4, 16),),
        order=list(range(39, -1, -1)),
        poison=float("nan"),
    )
    driver.start({0: other[:5], 1: tokens[:PROMPT]}, chunk=4)
    for step, position in enumerate(range(PROMPT, LENGTH)):
        work = {0: (5 + step, other[5 + step]), 1: (position, tokens[position])}
        driver.decode(work, Replay(4, 16, 2) if step % 2 == 0 else None)
    crowd = {position: value for (row, position), value in driver.spy.logits.items() if row == 1}
    assert crowd == alone


@pytest.mark.slow
def test_the_library_product_is_the_other_mode() -> None:
    """Without the batch-invariant mode the products are the library's: near, and on a GPU promised no more than that."""
    tokens = text(1, PROMPT + 1)
    ours = numbers(logits(weights("llama"), tokens))
    given = weights("llama")

    def library(given: Any, limits: Limits, *rest: Any) -> Any:
        return TritonRunner(synthetic_model(), limits, weights=given, batch_invariant=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driving, "runner_for", library)
        theirs = numbers(logits(given, tokens))
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=0)


def test_what_the_runner_says_of_itself() -> None:
    limits = Limits(
        num_blocks=2, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, vocab_size=512
    )
    for invariant, compute, promise in ((True, "fixed-tile", "by construction"), (False, "library", "not promised")):
        runner = TritonRunner(synthetic_model(), limits, weights=weights("llama"), batch_invariant=invariant)
        assert compute in runner.compute
        assert promise in runner.probe_summary
        assert runner.weight_bytes == weights("llama").nbytes > 0
