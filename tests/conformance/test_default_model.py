"""The default model against transformers, built in memory from the same dequantised weights: equal greedy tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.compute.captures import default_captures
from engine.compute.weights import Weights, load_weights
from engine.control.plan import Replay
from engine.loading import load_model
from engine.loading.model import LoadedModel
from engine.native.runner import library
from engine.native.weights import NativeWeights, load_native
from tests.compute.driver import Driver

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about a lighthouse.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers larger than 100.",
    "Translate 'good morning, my friend' into Spanish.",
)


@functools.cache
def model() -> LoadedModel:
    return load_model()


@functools.cache
def weights(compute: str) -> Weights | NativeWeights:
    if compute == "native":
        return load_native(model(), library())
    with torch.inference_mode():
        return load_weights(model(), torch.device("cpu"), torch.float32)


@functools.cache
def reference() -> Any:
    config = model().config
    assert config.rope_scaling is None
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        dtype="float32",
    )
    with torch.device("meta"):
        llama = LlamaForCausalLM(settings)
    llama.to_empty(device="cpu")
    llama.model.rotary_emb.__init__(settings)  # its frequencies are a buffer that no file holds
    tensors = {name: model().source.load(name) for name in model().source}
    missing, unexpected = llama.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    llama.tie_weights()
    return llama.train(False)


def prompt_of(question: str) -> tuple[int, ...]:
    loaded = model()
    assert loaded.template is not None
    assert loaded.tokenizer is not None
    rendered = loaded.template.render([{"role": "user", "content": question}], add_generation_prompt=True)
    return tuple(loaded.tokenizer.encode(rendered))


def reference_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference().generate(
            ids,
            attention_mask=torch.ones_like(ids),  # pad and end-of-sequence are one id here: never let it guess the mask
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=2,
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def our_tokens(prompts: list[tuple[int, ...]], count: int, compute: str) -> list[list[int]]:
    """All prompts at once, replayed."""
    rows = len(prompts)
    captures = default_captures(rows, 256, 16)
    driver = Driver(
        weights(compute), rows=rows, block_size=16, max_model_len=256, num_blocks=16 * rows, captures=captures
    )
    driver.start(dict(enumerate(prompts)))
    first = {
        row: torch.frombuffer(bytearray(driver.spy.logits[row, len(p)]), dtype=torch.float32)
        for row, p in enumerate(prompts)
    }
    tokens = [[int(first[row].argmax())] for row in range(rows)]
    for step in range(count - 1):
        positions = [len(prompt) + step for prompt in prompts]
        longest = driver.runner.limits.blocks_for(max(positions) + 1)
        shape = next(shape for shape in captures if shape[0] >= rows and shape[1] >= longest)
        work = {row: (positions[row], tokens[row][-1]) for row in range(rows)}
        for row, result in enumerate(driver.decode(work, Replay(*shape, shape[0] - rows))):
            tokens[row].append(result.token)
    return tokens


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_one_prompt(compute: str) -> None:
    prompt = prompt_of(QUESTIONS[0])
    assert our_tokens([prompt], 16, compute) == [reference_tokens(prompt, 16)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compute", ["torch", "native"])
def test_five_prompts_together(compute: str) -> None:
    prompts = [prompt_of(question) for question in QUESTIONS]
    assert our_tokens(prompts, 64, compute) == [reference_tokens(prompt, 64) for prompt in prompts]
