"""Metrics: vLLM's names under any prefix, right counts, valid text whatever the model is called."""

from __future__ import annotations

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from engine.loading.synthetic import synthetic_model
from server.app import create_app
from server.metrics import Metrics
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_bodies import wait_ready

VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_success_total",
)


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


@pytest.mark.parametrize("prefix", ["lockstep", "vllm"])
def test_names_and_counts(prefix: str) -> None:
    settings = ServerSettings(metrics_prefix=prefix)
    with TestClient(create_app(stub_engine(num_blocks=8, max_num_seqs=3), settings)) as client:
        wait_ready(client)
        body = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
        client.post("/v1/completions", json=body | {"prompt": [[5] * 9, [6] * 9, [7] * 9]})  # 3 x 5 blocks: preempts
        client.post("/v1/completions", json=body | {"prompt": [5, 6], "max_tokens": 1})
        client.post("/v1/completions", json=body | {"prompt": "hello", "max_tokens": 5000})
        metrics = samples(client.get("/metrics").text)
    for name in VLLM_NAMES:
        assert f"{prefix}:{name}" in metrics
    get = {name.removeprefix(f"{prefix}:"): values for name, values in metrics.items()}
    assert get["prompt_tokens_total"] == {(): 29}
    assert get["generation_tokens_total"] == {(): 37}
    assert get["request_success_total"] == {(("finished_reason", "length"),): 4}
    assert get["num_preemptions_total"][()] > 0
    assert get["recomputed_tokens_total"][()] > 0
    assert get["time_to_first_token_seconds_count"] == {(): 4}
    assert get["inter_token_latency_seconds_count"] == {(): 33}
    assert get["e2e_request_latency_seconds_count"] == {(): 4}
    assert sum(get["replays_total"].values()) == get["decode_steps_total"][()] > 0
    assert all({key for key, _ in labels} == {"rows", "width"} for labels in get["replays_total"])
    assert get["blocks"] in (
        {(("state", "used"),): 0, (("state", "free"),): 8},
        {(("state", "used"),): 1, (("state", "free"),): 7},
    )
    assert set(get["rows"]) == {(("state", "used"),), (("state", "free"),)}
    assert get["requests_aborted_total"] == {(): 0}


def test_refusals_and_eager_steps_are_counted() -> None:
    with TestClient(create_app(stub_engine(captures=()))) as client:
        wait_ready(client)
        client.post("/v1/completions", json={"prompt": [5], "max_tokens": 3, "ignore_eos": True})
        get = samples(client.get("/metrics").text)
    assert get["lockstep:eager_steps_total"] == {(("reason", "uncaptured"),): 2}


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a\\b", "汉字", "a{b}"])
def test_any_model_name_makes_valid_text(name: str) -> None:
    """B129."""
    model = attrs.evolve(synthetic_model(), name=name)
    metrics = Metrics("lockstep", model.name)
    metrics.start(stub_engine(model=model))
    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    labels = {sample.labels["model_name"] for family in families for sample in family.samples}
    assert labels == {name}


def test_applications_do_not_share_metrics() -> None:
    one, other = Metrics(), Metrics()
    assert one.registry is not other.registry


def test_no_series_is_told_before_the_name_is_known() -> None:
    """Else a scrape while the model loads would begin a second set of series."""
    app = create_app(stub_engine())
    client = TestClient(app)  # no start-up: the engine is never made
    answer = client.get("/metrics")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable_error")
    with client:
        wait_ready(client)
        assert 'model_name=""' not in client.get("/metrics").text
