"""``kv_dtype``: keys and values in bf16 take half the pool, are rounded once when they are written, and are said to be."""

from __future__ import annotations

import pytest
import torch

from engine.build import assemble, resolve_kv_dtype, settle
from engine.config import ConfigError, EngineConfig
from engine.control.limits import Limits
from engine.llm import LLM
from engine.loading.synthetic import synthetic_model
from engine.native.runner import NativeRunner
from engine.request import SamplingParams
from tests.compute.driver import Driver, shared_weights, text

SMALL = {"num_kv_blocks": 32, "max_num_seqs": 3, "max_num_batched_tokens": 64, "compute": "native"}


def test_half_the_pool() -> None:
    full, half = (assemble(EngineConfig(kv_dtype=kind, **SMALL), synthetic_model()) for kind in ("auto", "bfloat16"))
    for engine in (full, half):
        assert isinstance(engine.runner, NativeRunner)
    assert full.runner.kv_bytes == 2 * half.runner.kv_bytes  # type: ignore[attr-defined]
    assert "K/V in bf16" in dict(half.capacity())["compute"]
    assert "bf16" not in dict(full.capacity())["compute"]


def test_twice_the_blocks_in_the_same_room() -> None:
    free = EngineConfig(compute="native", max_num_seqs=64)
    model = synthetic_model(max_position_embeddings=8192, num_layers=24)
    found: list[Limits] = [settle(free, model, "cpu", dtype, "native") for dtype in (torch.float32, torch.bfloat16)]
    assert abs(found[1].num_blocks - 2 * found[0].num_blocks) < 0.02 * found[1].num_blocks


def test_only_native_kernels_convert() -> None:
    assert resolve_kv_dtype("auto", torch.float32, "native") == torch.float32
    assert resolve_kv_dtype("bfloat16", torch.float32, "native") == torch.bfloat16
    assert resolve_kv_dtype("bfloat16", torch.bfloat16, "torch") == torch.bfloat16
    with pytest.raises(ConfigError, match="kv_dtype is bfloat16, but must be float32 or auto"):
        resolve_kv_dtype("bfloat16", torch.float32, "torch")
    with pytest.raises(ConfigError, match="kv_dtype is 'int8', but must be one of auto, float32, bfloat16"):
        EngineConfig(kv_dtype="int8")


def test_written_rounded_to_nearest() -> None:
    """The pool holds the fp32 pool's numbers of the first layer, rounded; deeper layers saw rounded ones already."""
    tokens = text(0, 40)
    pools = []
    for dtype in (torch.float32, torch.bfloat16):
        driver = Driver(shared_weights("native llama"), rows=1, kv_dtype=dtype)
        driver.start({0: tokens})
        pools.append(driver.runner.pool.layers[0])
    assert torch.equal(pools[0].to(torch.bfloat16), pools[1])
    assert pools[1].abs().max() > 1


def test_answers_stay_close() -> None:
    prompts = [[7, 11, 13, 17] * 9, [5, 6], [300] * 70]
    logprobs = []
    for kind in ("float32", "bfloat16"):
        llm = LLM(engine=assemble(EngineConfig(kv_dtype=kind, **SMALL), synthetic_model()))
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=1), progress=False)
        logprobs.append([output.choices[0].sampled[0].logprobs.chosen for output in outputs])
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.05)
    assert logprobs[0] != logprobs[1]
