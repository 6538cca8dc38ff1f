"""The crowd of test_crowd.py on native kernels, which are what a CPU gets by default; one thread alone, two in the crowd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build import settle
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from engine.native import kernels
from engine.native.runner import NativeRunner, library
from engine.native.weights import NativeWeights, load_native
from tests.crowd.crowd import Answer, alone, differences, serving, together
from tests.crowd.test_crowd import ALONE, AMPLE, ASKS, FEW, FEW_ORDER, ORDERS, SERVERS

Model = tuple[LoadedModel, NativeWeights]


@pytest.fixture(scope="module")
def model() -> Model:
    loaded = synthetic_model()
    return loaded, load_native(loaded, library())


def native_engine(model: Model, threads: int, **settings: Any) -> Engine:
    config = EngineConfig(device="cpu", compute="native", **settings)
    dtype = torch.bfloat16 if config.kv_dtype == "bfloat16" else torch.float32
    limits = settle(config, model[0], "cpu", dtype, "native")
    runner = NativeRunner(model[0], limits, weights=model[1], threads=threads, kv_dtype=dtype)
    runner.warm()
    return Engine(limits, runner, eos_token_ids=model[0].eos_token_ids, model=model[0])


def each_alone(model: Model, asks: Any = ASKS, **settings: Any) -> list[Answer]:
    with serving(native_engine(model, 1, **ALONE, **settings)) as served:
        return alone(served.url, asks)


@pytest.fixture(scope="module")
def reference(model: Model) -> list[Answer]:
    return each_alone(model)


@pytest.mark.parametrize("server", ["small pool", "small pool, chunks", "no graphs", "no compaction"])
def test_together_as_alone(model: Model, reference: list[Answer], server: str) -> None:
    with serving(native_engine(model, 2, **SERVERS[server])) as served:
        answers = together(served, ASKS, ORDERS["shuffled"])
        metrics = served.idle_metrics()
    assert differences(reference, answers) == []
    assert metrics["num_preemptions_total"] > 0
    assert (metrics.get("replays_total", 0) > 0) == (server != "no graphs")
    assert metrics["prefix_cache_hits_total"] > 0


def test_keys_in_bf16(model: Model, reference: list[Answer]) -> None:
    """Other bytes than with fp32 keys, and the same ones alone and together."""
    expected = each_alone(model, FEW, kv_dtype="bfloat16")
    assert len(differences(reference[: len(FEW)], expected)) == sum(map(len, expected))
    with serving(native_engine(model, 2, **SERVERS["small pool"], kv_dtype="bfloat16")) as served:
        assert differences(expected, together(served, FEW, FEW_ORDER)) == []


def test_asked_again_as_the_first_time(model: Model, reference: list[Answer]) -> None:
    with serving(native_engine(model, 2, **AMPLE)) as served:
        rounds = [alone(served.url, FEW, salt) for salt in ("one", "one")]
    for answers in rounds:
        assert differences(reference[: len(FEW)], answers) == []
    cached = [sum(answer[0].facts["cached_tokens"] for answer in answers) for answers in rounds]
    assert cached[1] > cached[0]


def test_a_norm_that_depends_on_its_rows_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels._norm

    def crooked(weight: Tensor, eps: float, x: Tensor, *rest: Any) -> bytes:
        return real(weight, eps * (1 + 0.01 * len(x)), x, *rest)

    monkeypatch.setattr(kernels, "_norm", crooked)
    expected = each_alone(model, FEW)
    with serving(native_engine(model, 2, **SERVERS["small pool"])) as served:
        assert len(differences(expected, together(served, FEW, FEW_ORDER))) >= 6
