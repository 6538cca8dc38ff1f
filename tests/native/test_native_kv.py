"""``kv_dtype``: keys and values in 16 bits take half the pool, are rounded once when they are written, and are said to be."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from engine.build import assemble, resolve_kv_dtype, settle
from engine.compute.rope import rope_tables
from engine.config import ConfigError, EngineConfig
from engine.control.limits import Limits
from engine.llm import LLM
from engine.loading.synthetic import synthetic_config, synthetic_model
from engine.native.build import built
from engine.native.kernels import HeadLayout
from engine.native.library import Library
from engine.native.runner import NativeRunner
from engine.request import SamplingParams
from tests.compute.driver import Driver, shared_weights, text
from tests.native.kit import kernels, kernels_of, parts_of, pool_shape

EDGES = [
    65504.0,
    65519.9,
    65520.0,
    1e9,
    -1e9,
    torch.inf,
    -torch.inf,
    torch.nan,
    2.0**-24,
    2.0**-25,
    -(2.0**-25),
    3e-45,
    -0.0,
]
SMALL = {"num_kv_blocks": 32, "max_num_seqs": 3, "max_num_batched_tokens": 64, "compute": "native"}


def test_half_the_pool() -> None:
    kinds = ("auto", "bfloat16", "float16")
    full, bf16, fp16 = (assemble(EngineConfig(kv_dtype=kind, **SMALL), synthetic_model()) for kind in kinds)
    for engine in (full, bf16, fp16):
        assert isinstance(engine.runner, NativeRunner)
    assert full.runner.kv_bytes == 2 * bf16.runner.kv_bytes == 2 * fp16.runner.kv_bytes  # type: ignore[attr-defined]
    assert "K/V in bf16" in dict(bf16.capacity())["compute"]
    assert "K/V in fp16" in dict(fp16.capacity())["compute"]
    assert "K/V" not in dict(full.capacity())["compute"]


def test_what_auto_is() -> None:
    """fp16 beside weights that are coarser anyway, and only where kernels convert; fp32 beside fp32."""
    assert resolve_kv_dtype("auto", torch.float32, "native") == torch.float32
    assert resolve_kv_dtype("auto", torch.float32, "native", narrow=True) == torch.float16
    assert resolve_kv_dtype("float32", torch.float32, "native", narrow=True) == torch.float32
    assert resolve_kv_dtype("auto", torch.float32, "torch", narrow=True) == torch.float32
    assert resolve_kv_dtype("auto", torch.bfloat16, "triton", narrow=True) == torch.bfloat16
    for types, narrow in (
        ("F32 (61)", False),
        ("Q4_1 (210), F32 (61)", True),
        ("F32 (3), BF16 (1)", True),
        ("F64 (2)", False),
    ):
        assert attrs.evolve(synthetic_model(), weight_types=types).is_narrow == narrow


def test_twice_the_blocks_in_the_same_room() -> None:
    free = EngineConfig(compute="native", max_num_seqs=64)
    model = synthetic_model(max_position_embeddings=8192, num_layers=24)
    found: list[Limits] = [settle(free, model, "cpu", dtype, "native") for dtype in (torch.float32, torch.bfloat16)]
    assert abs(found[1].num_blocks - 2 * found[0].num_blocks) < 0.02 * found[1].num_blocks


def test_only_native_kernels_convert() -> None:
    assert resolve_kv_dtype("bfloat16", torch.float32, "native") == torch.bfloat16
    assert resolve_kv_dtype("bfloat16", torch.bfloat16, "torch") == torch.bfloat16
    for compute in ("torch", "triton"):
        assert resolve_kv_dtype("bfloat16", torch.bfloat16, compute) == torch.bfloat16
        with pytest.raises(ConfigError, match="kv_dtype is bfloat16, but must be float32 or auto"):
            resolve_kv_dtype("bfloat16", torch.float32, compute)
    with pytest.raises(ConfigError, match="kv_dtype is 'int8', but must be one of auto, float32, float16, bfloat16"):
        EngineConfig(kv_dtype="int8")


def test_written_rounded_to_nearest() -> None:
    """The pool holds the fp32 pool's numbers of the first layer, rounded; deeper layers saw rounded ones already."""
    tokens = text(0, 40)
    pools = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        driver = Driver(shared_weights("native llama"), rows=1, kv_dtype=dtype)
        driver.start({0: tokens})
        pools.append(driver.runner.pool.layers[0])
    assert torch.equal(pools[0].to(torch.bfloat16), pools[1])
    assert torch.equal(pools[0].to(torch.float16), pools[2])
    assert pools[1].abs().max() > 1


@pytest.mark.parametrize("target", [None, ()])
def test_fp16_is_rounded_to_nearest_and_bounded(tmp_path: Path, target: tuple[str, ...] | None) -> None:
    """As torch rounds, subnormal numbers and ties included. What is finite and has no room becomes the largest number; what is
    not finite stays so, since a row that cannot be sampled must be seen (rule 13.7)."""
    on = kernels() if target is None else kernels_of(Library(built(target=target, cache=tmp_path)), 1)
    layout = HeadLayout(1, 1, 256, 16, 64)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    halves = halves[halves.isfinite()]
    ties = (halves[:-1] + halves[1:]) / 2
    above, below = (ties.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))
    given = torch.cat([halves, ties, above, below, torch.tensor(EDGES)])
    rows = torch.nn.functional.pad(given, (0, -len(given) % 256)).view(-1, 256)
    qkv = torch.cat([torch.zeros(len(rows), 512), rows], dim=1)
    pool = torch.zeros(pool_shape(layout), dtype=torch.float16)
    tables = rope_tables(synthetic_config(head_dim=256), 1)
    for start in range(0, len(rows), 1024):
        part = qkv[start : start + 1024]
        count = len(part)
        on.rotate(layout, part, (torch.zeros(count, dtype=torch.int64), torch.arange(count)), tables, None, pool)
        found = parts_of(pool, layout)[1].reshape(-1, 256)[:count]
        exact = rows[start : start + 1024]
        wanted = torch.where(exact.isinf(), exact, exact.clamp(-65504, 65504)).half()
        numbers = ~exact.isnan()
        assert torch.equal(found.view(torch.int16)[numbers], wanted.view(torch.int16)[numbers])
        assert torch.equal(found.isnan(), exact.isnan())


def test_answers_stay_close() -> None:
    prompts = [[7, 11, 13, 17] * 9, [5, 6], [300] * 70]
    logprobs = []
    for kind in ("float32", "bfloat16", "float16"):
        llm = LLM(engine=assemble(EngineConfig(kv_dtype=kind, **SMALL), synthetic_model()))
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=1), progress=False)
        logprobs.append([output.choices[0].sampled[0].logprobs.chosen for output in outputs])
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.05)
    assert logprobs[0] == pytest.approx(logprobs[2], abs=0.005)
    assert logprobs[0] != logprobs[1] != logprobs[2] != logprobs[0]
