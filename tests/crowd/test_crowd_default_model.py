"""The crowd against the default model: answers of a real vocabulary, with the pool and the chunks that hurt.

Eight clients on native kernels, which are what a CPU gets, by default; thirty-two, on both servers and in three orders, and
torch's kernels in the slow tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from engine.compute.weights import load_weights
from engine.engine import Engine
from engine.loading import load_model
from engine.native.runner import library
from engine.native.weights import load_native
from tests.crowd.crowd import Answer, Ask, alone, crowd, differences, make_engine, serving, together
from tests.crowd.test_crowd_native import native_engine

AMPLE: dict[str, Any] = {"num_kv_blocks": 256, "block_size": 16, "max_num_seqs": 8, "max_model_len": 256}
ALONE = AMPLE | {"enable_prefix_caching": False}
SMALL_POOL = AMPLE | {"num_kv_blocks": 22, "block_size": 4}
CHUNKS = AMPLE | {"max_num_batched_tokens": 16}
MANY = crowd(32, prompts=(3, 56), tokens=(4, 20), ids=(100, 40000))
FEW = crowd(8, prompts=(3, 20), tokens=(8, 12), ids=(100, 40000), n=1)
FEW_IN_LITTLE = AMPLE | {"num_kv_blocks": 23, "block_size": 2}  # preempts in every order of arrival
MakeEngine = Callable[..., Engine]
COMPUTE = ["native", pytest.param("torch", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> MakeEngine:
    """Engines over one copy of the weights, for kernels of the kind that the test names; the crowd's native ones on two
    threads."""
    loaded = load_model()
    if request.param == "native":
        return partial(native_engine, (loaded, load_native(loaded, library())), 2)
    with torch.inference_mode():
        return partial(make_engine, loaded, load_weights(loaded, torch.device("cpu"), torch.float32))


def each_alone(model: MakeEngine, asks: Sequence[Ask]) -> list[Answer]:
    with serving(model(**ALONE)) as served:
        answers = alone(served.url, asks)
        assert served.idle_metrics()["num_preemptions_total"] == 0
    return answers


def all_at_once(
    model: MakeEngine, asks: Sequence[Ask], settings: dict[str, Any], order: Sequence[int]
) -> tuple[list[Answer], dict[str, float]]:
    with serving(model(**settings)) as served:
        answers = together(served, asks, order)
        metrics = served.idle_metrics()
    assert metrics["replays_total"] > 0
    assert (metrics["prefix_cache_hits_total"] > 0) == settings.get("enable_prefix_caching", True)
    return answers, metrics


def must_preempt(metrics: dict[str, float]) -> None:
    assert metrics["num_preemptions_total"] > 0
    assert metrics["recomputed_tokens_total"] > 0


@pytest.mark.parametrize("model", COMPUTE, indirect=True)
def test_eight_clients(model: MakeEngine) -> None:
    answers, metrics = all_at_once(model, FEW, FEW_IN_LITTLE | {"max_num_batched_tokens": 16}, range(8))
    must_preempt(metrics)
    assert differences(each_alone(model, FEW), answers) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["native", "torch"], indirect=True)
def test_thirty_two_clients(model: MakeEngine) -> None:
    reference = each_alone(model, MANY)
    ends = [said for answer in reference for said in answer]
    assert len(ends) > 32
    assert {said.reason for said in ends} >= {"length"}
    orders = [list(range(32)), list(range(32))[::-1], random.Random(5).sample(range(32), 32)]
    for order in orders:
        answers, metrics = all_at_once(model, MANY, SMALL_POOL, order)
        must_preempt(metrics)
        assert differences(reference, answers) == []
    for order, cached in zip(orders, (True, False, True), strict=True):
        answers, _ = all_at_once(model, MANY, CHUNKS | {"enable_prefix_caching": cached}, order)
        assert differences(reference, answers) == []
