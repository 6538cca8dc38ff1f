"""Settings: every value that cannot work is refused before anything is loaded, by name, with what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from engine import build
from engine.build import assemble, resolve_device, resolve_dtype, settle
from engine.compute.kv import kv_bytes_per_block
from engine.config import ConfigError, EngineConfig
from engine.control.door import most_tokens
from engine.control.limits import Limits
from engine.engine import Engine
from engine.loading.model import LoadError
from engine.loading.synthetic import synthetic_model
from engine.request import InvalidRequest, SamplingParams

BOUNDS = {
    "block_size": (1, 256),
    "num_kv_blocks": (1, 2**24),
    "max_num_seqs": (1, 1024),
    "max_num_batched_tokens": (1, 2**20),
    "max_model_len": (1, 2**24),
    "watermark": (0, 2**24),
    "max_waiting": (1, 2**20),
    "threads": (1, 1024),
}
ROOM: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 2**20,
}  # so that only the field under test is wrong


@pytest.mark.parametrize(("field", "low", "high"), [(field, *bounds) for field, bounds in BOUNDS.items()])
def test_bounds(field: str, low: int, high: int) -> None:
    for value in (low, high):
        settings: dict[str, Any] = ROOM | {field: value}
        assert getattr(EngineConfig(**settings), field) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError) as refused:
            EngineConfig(**(ROOM | {field: value}))
        assert refused.value.field == field
        assert str(refused.value) == f"{field} is {value}, but must be in {low}..{high}"


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"device": "tpu"}, "device", ("'tpu'", "auto, cpu, cuda")),
        ({"dtype": "int8"}, "dtype", ("'int8'", "auto, float32, bfloat16, float16")),
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens", ("15", "max_num_seqs = 16")),
        ({"num_kv_blocks": 8, "watermark": 8}, "watermark", ("8", "below num_kv_blocks = 8")),
        ({"capture_rows": (1, 0)}, "capture_rows", ("0", "at least 1")),
        ({"capture_widths": (-4,)}, "capture_widths", ("-4", "at least 1")),
    ],
)
def test_other_refusals(settings: dict[str, Any], field: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**settings)
    assert refused.value.field == field
    for word in (field, *words):
        assert word in str(refused.value)


def test_a_config_is_frozen_and_every_field_has_a_default() -> None:
    config = EngineConfig()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.block_size = 4  # type: ignore[misc]
    assert EngineConfig(num_kv_blocks=8, watermark=7).watermark == 7


# What suits model and machine ------------------------------------------------------------------------------------------


def settled(**settings: Any) -> Limits:
    return settle(EngineConfig(**settings), synthetic_model(), "cpu", torch.float32)


def test_settle_fills_in_what_is_open() -> None:
    limits = settled(max_num_seqs=4)
    assert limits.max_model_len == 512
    assert limits.num_blocks == 4 * 512 // 16  # room for every row at full length
    assert limits.watermark == 1
    assert limits.vocab_size == 512
    assert max(limits.captures) >= (4, 32)
    assert settled(enforce_eager=True, capture_rows=(2,)).captures == ()
    assert settled(num_kv_blocks=99).watermark == 0
    assert settled(num_kv_blocks=99, watermark=5).watermark == 5
    assert settled(capture_rows=(4, 2), capture_widths=(8,)).captures == ((2, 8), (4, 8))


def test_the_context_is_the_models() -> None:
    assert settled(max_model_len=512).max_model_len == 512
    with pytest.raises(ConfigError, match=r"max_model_len is 513, but synthetic-llama knows 512 positions") as refused:
        settled(max_model_len=513)
    assert refused.value.field == "max_model_len"


def test_a_watermark_as_large_as_the_settled_pool() -> None:
    with pytest.raises(ConfigError, match=r"watermark is 512 blocks, but must be below num_kv_blocks = 512") as refused:
        settled(watermark=512)
    assert refused.value.field == "watermark"
    assert settled(watermark=511).watermark == 511


def test_the_pool_fits_the_memory_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = kv_bytes_per_block(synthetic_model().config, 16, torch.float32)
    monkeypatch.setattr(build, "_free_bytes", lambda device: round(per_block * 40 / build.FREE_SHARE) + 1)
    assert settled().num_blocks == 40
    monkeypatch.setattr(build, "_free_bytes", lambda device: round(per_block * 31 / build.FREE_SHARE) + 1)
    with pytest.raises(ConfigError, match=r"one sequence of 512 tokens needs .* MiB .*lower max_model_len") as refused:
        settled()
    assert refused.value.field == "max_model_len"
    assert settled(max_model_len=100).num_blocks == 31
    assert settled(num_kv_blocks=500).num_blocks == 500  # asked for, so not second-guessed


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=rf"device is cuda, .*{re.escape(torch.__version__)}.*CPU build") as refused:
        resolve_device("cuda")
    assert refused.value.field == "device"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="no usable GPU"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"


def test_dtypes() -> None:
    assert resolve_dtype("auto", "cpu") == resolve_dtype("float32", "cpu") == torch.float32
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    assert resolve_dtype("float16", "cuda") == torch.float16
    for name in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match=rf"dtype is {name}, .*float32 only") as refused:
            resolve_dtype(name, "cpu")
        assert refused.value.field == "dtype"


def test_from_config_judges_the_device_before_it_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda"):
        Engine.from_config(EngineConfig(model=str(tmp_path), device="cuda"))
    with pytest.raises(LoadError, match=re.escape(str(tmp_path))):
        Engine.from_config(EngineConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("blocks", "rows", "told"),
    [
        (3, 2, "512 tokens, but a request has at most 49: the KV cache holds no more"),
        (31, 2, "512 tokens, but a request has at most 497: the KV cache holds no more"),
        (32, 2, "512 tokens; room for 1 request of that length at once"),
        (95, 4, "512 tokens; room for 2 requests of that length at once"),
        (400, 4, "512 tokens; room for 4 requests of that length at once"),
    ],
)
def test_capacity_says_how_many_of_the_longest_fit(blocks: int, rows: int, told: str) -> None:
    """And it is true: so many of that length run together without a preemption, and one token more is refused."""
    config = EngineConfig(device="cpu", num_kv_blocks=blocks, max_num_seqs=rows, compute="torch", enforce_eager=True)
    engine = assemble(config, synthetic_model())
    shown = dict(engine.capacity())
    assert shown["context"] == told
    assert not re.search(r"\b(0(\.0)? (MiB|KiB|requests)|1 [a-z]+s)\b", " ".join([*shown.values()][:-1]))
    assert shown["recorded graphs"] == "none (enforce_eager): every decode step runs eagerly"
    length = most_tokens(engine.limits, 0)
    with pytest.raises(InvalidRequest):
        engine.check((5,) * (length - 1), SamplingParams(max_tokens=2))
    count = int(found[1]) if (found := re.search(r"room for (\d+)", told)) else 1
    for first in range(count):
        prompt = (first, *[5] * (length - 9))
        engine.submit(prompt, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    ended = together = 0
    while engine.has_work:
        ended += sum(end.reason == "length" for end in engine.step().finished)
        together = max(together, len(engine.scheduler.running))
    assert (ended, together, engine.counters.preemptions) == (count, count, 0)


def test_capacity_says_what_was_settled() -> None:
    stages: list[tuple[str, int, int]] = []
    config = EngineConfig(device="cpu", num_kv_blocks=10, max_num_seqs=2)
    engine = assemble(config, synthetic_model(), progress=lambda *stage: stages.append(stage))
    shown = dict(engine.capacity())
    assert shown["KV cache"].startswith("10 blocks x 16 = 160 tokens")
    assert shown["batch"] == "2 rows, 512 tokens an iteration"
    assert "every decode step replays" in shown["recorded graphs"]
    assert stages[-1][1] == stages[-1][2] == len(engine.limits.captures)
    gap = assemble(EngineConfig(device="cpu", num_kv_blocks=10, capture_rows=(1,)), synthetic_model()).capacity()
    assert "every decode step replays" not in dict(gap)["recorded graphs"]
