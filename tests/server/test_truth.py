"""What the server says about itself: the time split of steps, the line of an answer in the log, the Grafana dashboard."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from server.app import create_app
from server.settings import ServerSettings
from tests.server.stub import StubRunner, stub_engine
from tests.server.test_bodies import wait_ready
from tests.server.test_metrics import samples

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 10, "ignore_eos": True, "temperature": 0}
DASHBOARD = Path(__file__).parents[2] / "server" / "grafana.json"


class Slow(StubRunner):
    """Takes 4 ms a step, of which it calls 3 the sampler's."""

    sample_seconds = 0.0

    def execute(self, plan: Any) -> Any:
        time.sleep(0.004)
        self.sample_seconds += 0.003
        return super().execute(plan)


def test_the_time_of_steps_is_split() -> None:
    with TestClient(create_app(stub_engine(Slow()))) as client:
        wait_ready(client)

        def split() -> dict[str, float]:
            found = samples(client.get("/metrics").text)["lockstep:step_seconds_total"]
            return {dict(labels)["stage"]: seconds for labels, seconds in found.items()}

        assert set(split().values()) == {0.0}
        began = time.perf_counter()
        client.post(COMPLETIONS, json=BODY)
        took = time.perf_counter() - began
        plain = split()
        assert plain["sample"] == pytest.approx(0.03, abs=0.004)  # ten steps
        assert plain["execute"] >= 0.009
        assert plain["schedule"] > 0
        assert plain["text"] == 0.0  # nobody asked for stop strings
        assert sum(plain.values()) < took
        client.post(COMPLETIONS, json=BODY | {"stop": "\u1234"})
        assert 0 < split()["text"] < split()["schedule"]


def test_an_answer_is_one_line_of_numbers() -> None:
    with TestClient(create_app(stub_engine())) as client:
        wait_ready(client)
        with structlog.testing.capture_logs() as lines:
            client.post(COMPLETIONS, json=BODY | {"prompt": "SENTINEL", "n": 2}, headers={"X-Request-Id": "one"})
            client.post(COMPLETIONS, json=BODY | {"stream": True})
    (first, second) = [line for line in lines if line["event"] == "answer"]
    assert (first["choices"], first["completion_tokens"], first["ended"]) == (2, 20, "length")
    assert 0 < first["ttft"] <= first["seconds"]
    assert second["prompt_tokens"] > 0
    assert "SENTINEL" not in str(lines)


def names(dashboard: Any) -> set[str]:
    """Metrics that the dashboard asks for, without the prefix."""
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert all("${prefix}:" in query for query in queries)
    return {name for query in queries for name in re.findall(r"\$\{prefix\}:(\w+)", query)}


def exposed(prefix: str) -> set[str]:
    """Metrics that a server with some traffic exposes, without the prefix."""
    with TestClient(create_app(stub_engine(captures=((1, 12),)), ServerSettings(metrics_prefix=prefix))) as client:
        wait_ready(client)
        client.post(COMPLETIONS, json=BODY | {"n": 2})
        client.post(COMPLETIONS, json=BODY)
        text = client.get("/metrics").text
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    return {name.removeprefix(f"{prefix}:") for name in {*samples(text), *declared}}


@pytest.mark.parametrize("prefix", ["lockstep", "vllm"])
def test_every_metric_of_the_dashboard_exists(prefix: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = names(dashboard)
    assert len(asked) > 25
    assert sorted(asked - exposed(prefix)) == []
    offered = next(v for v in dashboard["templating"]["list"] if v["name"] == "prefix")
    assert prefix in offered["query"].split(",")


def test_a_metric_that_does_not_exist_is_seen() -> None:
    dashboard = {"panels": [{"targets": [{"expr": "rate(${prefix}:tokens_total[1m])"}]}], "templating": {"list": []}}
    assert names(dashboard) - exposed("lockstep") == {"tokens_total"}


def test_panels_do_not_overlap_and_have_units() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
