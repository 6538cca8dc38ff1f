"""Which kernels an engine gets: by setting, by machine, and what is said when it is not the wished ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams, build
from engine.build import assemble, resolve_compute
from engine.config import ConfigError, EngineConfig
from engine.loading.synthetic import synthetic_model
from engine.native.build import BuildError
from engine.native.runner import cores, native_rows

SMALL: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 5}


def no_compiler() -> Any:
    raise BuildError("no C++ compiler is on PATH")


def test_native_is_the_default_on_a_cpu() -> None:
    engine = assemble(EngineConfig(**SMALL), synthetic_model())
    shown = dict(engine.capacity())
    assert re.match(
        r"native kernels, (vectors by the compiler|256-bit vectors|512-bit vectors( and matrix tiles)?)$",
        shown["compute"],
    )
    assert "by construction" in shown["byte identity"]
    assert f"{cores()} threads" in shown["device"]
    assert engine.limits.captures == tuple((rows, 32) for rows in range(1, 6))  # every row count, one width


def test_torch_when_asked_for() -> None:
    engine = assemble(EngineConfig(compute="torch", **SMALL), synthetic_model())
    assert dict(engine.capacity())["compute"] == "torch kernels"
    assert {rows for rows, _ in engine.limits.captures} == {1, 2, 4, 5}


def test_both_give_the_same_greedy_answers() -> None:
    """A deterministic tie aside, fp32 differs in the last bits only."""
    prompts = [[7, 11, 13, 17] * 9, [5, 6], [300] * 70]
    answers = []
    for compute in ("native", "torch"):
        llm = LLM(engine=assemble(EngineConfig(compute=compute, **SMALL), synthetic_model()))
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        answers.append([output.token_ids for output in llm.generate(prompts, params, progress=False)])
    assert answers[0] == answers[1]


def test_without_a_compiler_torch_serves_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", no_compiler)
    with pytest.warns(
        UserWarning, match=r"native kernels cannot be had, torch computes instead.*no C\+\+ compiler"
    ) as said:
        engine = assemble(EngineConfig(**SMALL), synthetic_model())
    assert len(said) == 1
    assert dict(engine.capacity())["compute"] == "torch kernels"
    with pytest.raises(ConfigError, match=r"compute is native, but no C\+\+ compiler") as refused:
        assemble(EngineConfig(compute="native", **SMALL), synthetic_model())
    assert refused.value.field == "compute"


def test_unknown_and_impossible_settings() -> None:
    with pytest.raises(ConfigError, match="compute is 'fast', but must be one of auto, native, int8, torch"):
        EngineConfig(compute="fast")
    with pytest.raises(ConfigError, match="not on cuda"):
        resolve_compute("native", "cuda", torch.float32)


def test_more_threads_than_cores_is_said() -> None:
    with pytest.warns(UserWarning, match=f"may use {cores()} cores"):
        assemble(EngineConfig(threads=cores() + 1, **SMALL), synthetic_model())


@pytest.mark.parametrize(("most", "count"), [(1, 1), (16, 16), (64, 64), (65, 65), (256, 76), (1024, 124)])
def test_rows_worth_a_tape(most: int, count: int) -> None:
    rows = native_rows(most)
    assert rows[0] == 1
    assert rows[-1] == most
    assert len(rows) == count
    assert max(b - a for a, b in zip([0, *rows], rows, strict=False)) <= 16
