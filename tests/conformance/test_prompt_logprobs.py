"""Logprobs of a prompt against transformers, and that chunks, neighbours, moves and preemption change no bit of them.

The engine collects them over several iterations, from the logits of every prompt position but the last.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.build import assemble
from engine.compute.sampling_row import RowState
from engine.config import EngineConfig
from engine.control.plan import Logprobs
from engine.engine import Engine
from engine.loading import load_model
from engine.loading.model import LoadedModel
from engine.request import SamplingParams
from tests.compute.driver import text
from tests.models import write_folder

PROMPT = tuple(text(7, 61))
ASK = SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=3, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
COMPUTE = ("torch", "native")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@functools.cache
def settings(**changes: Any) -> dict[str, Any]:
    base = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 96}
    return {"device": "cpu", "threads": 1, **base, **changes}


def engine_for(model: LoadedModel, compute: str, **changes: Any) -> Engine:
    return assemble(EngineConfig(compute=compute, **settings(**changes)), model)


def finish(engine: Engine) -> dict[int, tuple[Logprobs, ...]]:
    """Runs to the end; what each request was told about its prompt, which must be once and with its first token."""
    told: dict[int, tuple[Logprobs, ...]] = {}
    seen: set[int] = set()
    while engine.has_work:
        for request, sampled in engine.step().sampled:
            if sampled.prompt is not None:
                assert request not in seen
                told[request] = sampled.prompt
            seen.add(request)
    assert engine.audit() == []
    return told


def alone(model: LoadedModel, compute: str, **changes: Any) -> tuple[Logprobs, ...]:
    engine = engine_for(model, compute, **changes)
    (request,) = engine.submit(PROMPT, ASK).requests
    return finish(engine)[request]


@pytest.mark.parametrize("compute", COMPUTE)
def test_values_are_transformers(folder: Path, model: LoadedModel, compute: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train(False)
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)
    told = alone(model, compute)
    assert len(told) == len(PROMPT) - 1
    for position, (token, report) in enumerate(zip(PROMPT[1:], told, strict=True)):
        row = logprobs[position]
        assert report.chosen == pytest.approx(float(row[token]), abs=2e-4)
        best = row.topk(3)
        assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert abs(report.rank - 1 - int((row > row[token]).sum())) <= 1  # two logits may be nearer than the tolerance


@pytest.mark.parametrize("compute", COMPUTE)
def test_chunks_change_no_bit(model: LoadedModel, compute: str) -> None:
    """Whole in batches of 16, by the iteration's budget in odd pieces, one token at a time."""
    whole = alone(model, compute)
    for budget in (7, 4, 61):
        assert alone(model, compute, max_num_batched_tokens=budget) == whole


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_crowd_a_hit_and_preemption_change_no_bit(model: LoadedModel, compute: str) -> None:
    """In a tight pool, after the whole prompt is cached, beside others of which some ask and some do not, three of one."""
    whole = alone(model, compute)
    engine = engine_for(model, compute, num_kv_blocks=24, max_num_batched_tokens=9)
    engine.submit(PROMPT, PLAIN)
    finish(engine)
    for index in range(3):
        engine.submit(text(20 + index, 20 + index), PLAIN, priority=-index)
        engine.step()
        engine.step()
    submitted = [engine.submit(PROMPT, ASK).requests[0], engine.submit(PROMPT[:40], ASK).requests[0]]
    engine.step()
    engine.submit(text(9, 30), PLAIN, priority=-9)
    told = finish(engine)
    assert told == {submitted[0]: whole, submitted[1]: whole[:39]}
    assert engine.counters.preemptions > 0
    assert engine.counters.prefix_hit_tokens == 0


def test_a_report_of_the_wrong_position_is_seen(
    folder: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RowState.prompt_successor

    def late(self: RowState, position: int) -> int | None:
        return None if real(self, position) is None else PROMPT[position]

    monkeypatch.setattr(RowState, "prompt_successor", late)
    with pytest.raises(AssertionError):
        test_values_are_transformers(folder, model, "torch")


def test_a_prompt_of_one_token_has_nothing_to_tell(model: LoadedModel) -> None:
    engine = engine_for(model, "torch")
    engine.submit(PROMPT[:1], ASK)
    assert finish(engine) == {0: ()}
