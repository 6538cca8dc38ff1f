"""Thirty-two clients at once are each told what they are told alone, to the byte of the logits (promise P2).

The reference is each request alone on a server with an ample pool and no prefix cache; the crowd meets a server whose
pool forces preemption, one that cuts prompts into chunks of 16 tokens, and servers without graphs, without compaction or
without the prefix cache. That the comparison can fail is shown by engines that break the promise on purpose.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from engine.compute import sampler
from engine.compute.linear import Linear
from engine.compute.sampling_noise import stream_key
from engine.compute.weights import Weights, load_weights
from engine.control import prefix
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from tests.crowd.crowd import Answer, Ask, alone, crowd, differences, first_difference, make_engine, serving, together

AMPLE: dict[str, Any] = {"num_kv_blocks": 1024, "block_size": 4, "max_num_seqs": 8, "max_model_len": 256}
SERVERS: dict[str, dict[str, Any]] = {
    "small pool": AMPLE | {"num_kv_blocks": 32},
    "chunks of 16": AMPLE | {"max_num_batched_tokens": 16},
    "small pool, chunks": AMPLE | {"num_kv_blocks": 32, "max_num_batched_tokens": 16, "watermark": 1},
    "blocks of 16, one wide graph": AMPLE
    | {"num_kv_blocks": 9, "block_size": 16, "max_num_seqs": 6, "capture_rows": (6,), "capture_widths": (8,)},
    "no graphs": AMPLE | {"num_kv_blocks": 40, "enforce_eager": True},
    "no compaction": AMPLE | {"num_kv_blocks": 40, "persistent_batch": False},
    "no prefix cache": AMPLE | {"num_kv_blocks": 32, "enable_prefix_caching": False},
}
ALONE = AMPLE | {"enable_prefix_caching": False}
ASKS = crowd(32, prompts=(2, 90), tokens=(3, 30), ids=(3, 500))
ORDERS = {
    "in order": list(range(32)),
    "reversed": list(range(32))[::-1],
    "shuffled": random.Random(5).sample(range(32), 32),
}
Model = tuple[LoadedModel, Weights]


@pytest.fixture(scope="module")
def model() -> Model:
    loaded = synthetic_model()
    with torch.inference_mode():
        return loaded, load_weights(loaded, torch.device("cpu"), torch.float32)


def each_alone(model: Model, asks: Sequence[Ask]) -> list[Answer]:
    with serving(make_engine(*model, **ALONE)) as served:
        answers = alone(served.url, asks)
        metrics = served.idle_metrics()
        assert metrics["num_preemptions_total"] == metrics["prefix_cache_hits_total"] == 0
    return answers


def all_at_once(
    model: Model, asks: Sequence[Ask], settings: dict[str, Any], order: Sequence[int]
) -> tuple[list[Answer], dict[str, float]]:
    with serving(make_engine(*model, **settings)) as served:
        answers = together(served, asks, order)
        return answers, served.idle_metrics()


@pytest.fixture(scope="module")
def reference(model: Model) -> list[Answer]:
    return each_alone(model, ASKS)


def test_the_crowd_is_mixed(reference: list[Answer]) -> None:
    """Floors: a comparison over requests that all want the same would be worth little."""
    assert sum(ask.greedy for ask in ASKS) == 16
    assert sum(ask.stream for ask in ASKS) == 16
    assert sum(len(answer) == 2 for answer in reference) >= 3
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_new_tokens", "stop", "ignore_eos"):
        assert sum(name in ask.sampling for ask in ASKS) >= 2, name
    ends = [said for answer in reference for said in answer]
    assert sum(said.reason == "length" for said in ends) >= 10
    assert sum(isinstance(said.matched, str) for said in ends) >= 3
    assert sum(isinstance(said.matched, int) for said in ends) >= 3
    assert len({said.tokens for said in ends}) >= 30
    assert len({len(ask.input_ids) for ask in ASKS}) >= 15


@pytest.mark.parametrize(
    ("server", "order"),
    [
        *itertools.product(("small pool", "chunks of 16"), ORDERS),
        ("small pool, chunks", "shuffled"),
        ("blocks of 16, one wide graph", "in order"),
        ("no graphs", "shuffled"),
        ("no compaction", "shuffled"),
        ("no prefix cache", "shuffled"),
    ],
)
def test_together_as_alone(model: Model, reference: list[Answer], server: str, order: str) -> None:
    settings = SERVERS[server]
    answers, metrics = all_at_once(model, ASKS, settings, ORDERS[order])
    assert differences(reference, answers) == []
    ends = [said for answer in answers for said in answer]
    assert metrics["generation_tokens_total"] == sum(len(said.tokens) for said in ends)
    assert metrics["request_success_total"] == len(ends)
    spans = [said.facts["last_iteration"] - said.facts["first_iteration"] + 1 for said in ends]
    assert sum(spans) > 1.25 * metrics["iterations_total"]  # it was a crowd: they ran side by side
    if settings["num_kv_blocks"] < AMPLE["num_kv_blocks"]:
        assert metrics["num_preemptions_total"] > 0
        assert metrics["recomputed_tokens_total"] > 0
        assert metrics["num_preemptions_total"] == sum(said.facts["preemptions"] for said in ends)
    assert (metrics.get("replays_total", 0) > 0) == (server != "no graphs")
    assert (metrics["prefix_cache_hits_total"] > 0) == (server != "no prefix cache")
    assert metrics["prefix_cache_hits_total"] <= metrics["prefix_cache_queries_total"]
    if settings.get("max_num_batched_tokens") == 16:
        for ask, (said, *_) in zip(ASKS, answers, strict=True):
            span = said.facts["last_iteration"] - said.facts["first_iteration"] + 1
            assert span >= len(said.tokens) - 1 + -(-(len(ask.input_ids) - said.facts["cached_tokens"]) // 16)


def test_asked_again_as_the_first_time(model: Model, reference: list[Answer]) -> None:
    """Cold and warm: the second answer computes what no block holds, and says the same. A fresh salt finds nothing."""
    with serving(make_engine(*model, **AMPLE)) as served:
        rounds = [alone(served.url, ASKS, salt) for salt in ("one", "one", "other")]
        metrics = served.idle_metrics()
    for answers in rounds:
        assert differences(reference, answers) == []
    size = AMPLE["block_size"]
    full = [(len(ask.input_ids) - 1) // size * size for ask in ASKS]
    cached = [[answer[0].facts["cached_tokens"] for answer in answers] for answers in rounds]
    assert cached[1] == full  # the pool is ample: nothing was evicted
    assert cached[0] == cached[2]  # what their beginnings share
    assert 0 < sum(cached[0]) < sum(full)
    hits = sum(said.facts["cached_tokens"] for answers in rounds for answer in answers for said in answer)
    assert metrics["prefix_cache_hits_total"] == hits
    asked = sum(len(ask.input_ids) * len(answer) for ask, answer in zip(ASKS, reference, strict=True))
    assert metrics["prefix_cache_queries_total"] == len(rounds) * asked


# The tests of the tester ---------------------------------------------------------------------------------------------


FEW = ASKS[:12]
FEW_ORDER = list(range(12))


def test_another_seed_is_seen(model: Model, reference: list[Answer]) -> None:
    """Every sampled request differs in its tokens, and no greedy one does."""
    reseeded = [
        ask if ask.greedy else attrs.evolve(ask, sampling=ask.sampling | {"seed": ask.sampling["seed"] ^ 1})
        for ask in FEW
    ]
    answers, _ = all_at_once(model, reseeded, AMPLE, FEW_ORDER)
    for ask, want, have in zip(FEW, reference, answers, strict=False):
        assert bool(differences([want], [have])) == (not ask.greedy)
        if not ask.greedy:
            assert want[0].digests[0] == have[0].digests[0]
            assert first_difference(want[0].tokens, have[0].tokens) is not None


def test_a_linear_that_depends_on_its_rows_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def crooked(kernel: Any, x: Tensor, weight: Any, bias: Tensor | None, out: Tensor) -> None:
        kernel(x, weight, bias, out)
        out.mul_(1 + len(x) * 2.0**-23)  # about one unit in the last place for each row

    def apply(self: Linear, do: Any, x: Tensor, rows: int, out: Tensor) -> None:
        do(crooked, self.kernel, x[:rows], self.weight, self.bias, out[:rows])

    monkeypatch.setattr(Linear, "apply", apply)
    expected = each_alone(model, FEW)
    answers, _ = all_at_once(model, FEW, SERVERS["small pool"], FEW_ORDER)
    wrong = differences(expected, answers)
    assert len(wrong) >= 6, wrong
    assert "logits None" not in wrong[0]


def test_a_hit_on_another_content_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that looks at what a block begins with only."""
    real = prefix.block_key
    monkeypatch.setattr(prefix, "block_key", lambda parent, held: real(b"", held[:1]))
    answers, metrics = all_at_once(model, ASKS, AMPLE, ORDERS["in order"])
    assert metrics["prefix_cache_hits_total"] > 0
    assert differences(each_alone(model, ASKS), answers) != []


def test_noise_from_one_generator_for_all_is_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator whose state moves with every token that anybody samples: the logits stand, the tokens do not."""
    real = stream_key
    state = itertools.count()
    monkeypatch.setattr(sampler, "stream_key", lambda seed, position: real(seed, next(state)))
    expected = each_alone(model, FEW)
    state = itertools.count()
    answers, _ = all_at_once(model, FEW, AMPLE, FEW_ORDER)
    wrong = differences(expected, answers)
    assert wrong
    assert all(not FEW[int(line.split()[1].rstrip(","))].greedy for line in wrong)


def test_a_lost_answer_is_seen(reference: list[Answer]) -> None:
    changed = list(reference)
    changed[4] = (attrs.evolve(changed[4][0], text=changed[4][0].text + "x"),)
    assert len(differences(reference, changed)) == 1
    with pytest.raises(AssertionError):
        differences(reference, reference[:-1])
