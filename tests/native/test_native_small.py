"""Whole engines at the edges of what kernels are made for: vocabularies that fill no panel, row counts from 64 down to 1,
contexts to the last position, greedy rows beside sampled ones. Together they say what each says alone. Sanitizers run it, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.build import assemble
from engine.config import EngineConfig
from engine.loading import load_model
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from tests.models import write_gguf

ROWS, LONGEST = 64, 19
ODD: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 36, "num_heads": 5, "num_kv_heads": 1, "head_dim": 8}
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5},
)


def answers(model: LoadedModel, rows: int, threads: int, **settings: Any) -> list[tuple[int, ...]]:
    """Requests that end one after the other, each in the last position that there is."""
    shape = {"max_num_seqs": rows, "max_model_len": LONGEST, "block_size": 3, "num_kv_blocks": ROWS * 7}
    config = EngineConfig(device="cpu", threads=threads, max_num_batched_tokens=100, **shape, **settings)
    vocab = model.config.vocab_size
    prompts = [[(7 * i + k * k) % vocab for k in range(1 + i % (LONGEST - 1))] for i in range(ROWS)]
    params = [
        SamplingParams(max_tokens=LONGEST - len(prompt), seed=i, ignore_eos=True, **ASKED[i % len(ASKED)])
        for i, prompt in enumerate(prompts)
    ]
    said = LLM(engine=assemble(config, model)).generate(prompts, params, progress=False)
    assert all(len(prompt) + len(one.token_ids) == LONGEST for prompt, one in zip(prompts, said, strict=True))
    return [tuple(one.token_ids) for one in said]


@pytest.mark.parametrize(("vocab", "kv_dtype"), [(2, "float32"), (15, "bfloat16"), (17, "float32"), (283, "bfloat16")])
@pytest.mark.filterwarnings("ignore:.*threads were asked for")
def test_small_vocabularies(vocab: int, kv_dtype: str) -> None:
    model = synthetic_model("llama", vocab_size=vocab, **ODD)
    settings = {"compute": "native", "kv_dtype": kv_dtype}
    assert answers(model, ROWS, 3, **settings) == answers(model, 1, 1, **settings)


@pytest.mark.filterwarnings("ignore:.*threads were asked for")
def test_small_vocabulary_in_8_bits(tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "model.gguf", "llama", "Q4_1", vocab_size=281))
    settings = {"compute": "int8", "weights_cache": "off"}
    assert answers(model, ROWS, 3, **settings) == answers(model, 1, 1, **settings)
