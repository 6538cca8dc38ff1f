"""The prefix cache over HTTP: salts keep requests apart, answers say what was found, metrics add up, a flag switches it off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.request import MAX_SALT_CHARS
from server import cli
from server.app import create_app
from tests.server.stub import stub_engine
from tests.server.test_bodies import wait_ready
from tests.server.test_metrics import samples
from tests.server.world import parse_events

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # two full blocks of four, and one token


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(num_blocks=64, max_model_len=160))) as client:
        wait_ready(client)
        yield client


def post(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cached(client: TestClient, path: str, salt: str | None = None, **more: Any) -> int:
    """Tokens that one request found in the cache, as its answer tells it."""
    if path == GENERATE:
        body: dict[str, Any] = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}}
        return int(post(client, path, body | {"cache_salt": salt} | more)["meta_info"]["cached_tokens"])
    ask = {"prompt": IDS} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    usage = post(client, path, ask | {"max_tokens": 2, "cache_salt": salt} | more)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, GENERATE])
def test_b058_only_equal_salts_share(client: TestClient, path: str) -> None:
    """Each endpoint passes its salt on: a neighbour cannot find out by timing what others asked."""
    assert cached(client, path) == 0
    warm = cached(client, path)
    assert warm >= 8
    assert cached(client, path, "one") == 0
    assert cached(client, path, "other") == 0
    assert [cached(client, path, salt) for salt in ("one", "other", None)] == [warm] * 3
    assert cached(client, path, "x" * MAX_SALT_CHARS) == 0


def test_a_salt_that_is_not_passed_on_is_seen(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = client.app.state.context.bridge.engine  # type: ignore[attr-defined]
    real = engine.submit

    def submit(*arguments: Any, salt: str | None, **more: Any) -> Any:
        return real(*arguments, **more)

    monkeypatch.setattr(engine, "submit", submit)
    with pytest.raises(AssertionError):
        test_b058_only_equal_salts_share(client, GENERATE)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, GENERATE])
@pytest.mark.parametrize("salt", ["", "x" * (MAX_SALT_CHARS + 1), 5, ["a"]])
def test_salts_are_short_texts(client: TestClient, path: str, salt: Any) -> None:
    body: dict[str, Any] = {"prompt": IDS, "messages": [{"role": "user", "content": "hello"}], "cache_salt": salt}
    response = client.post(path, json={"input_ids": IDS, "cache_salt": salt} if path == GENERATE else body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_usage_counts_each_prompt_once(client: TestClient) -> None:
    """As ``prompt_tokens`` does: n answers to one cold prompt share blocks among themselves, which saves no prompt."""
    body: dict[str, Any] = {"max_tokens": 3, "seed": 1, "n": 3}
    first = post(client, COMPLETIONS, body | {"prompt": [IDS, [20] * 5]})["usage"]
    assert first["prompt_tokens"] == 14
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    again = post(client, COMPLETIONS, body | {"prompt": [IDS, [20] * 5, [30] * 4]})["usage"]
    assert again["prompt_tokens_details"] == {"cached_tokens": 8 + 4 + 0}


def test_streamed_usage_says_it_when_it_is_known(client: TestClient) -> None:
    cached(client, COMPLETIONS)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": IDS, "max_tokens": 3, "stream": True, "stream_options": options, "ignore_eos": True}
    usages = [event["usage"] for event in parse_events(client.post(COMPLETIONS, json=body).content)[:-1]]
    assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert all(usage.get("prompt_tokens_details") in (None, {"cached_tokens": 8}) for usage in usages)


def test_metrics_and_server_info(client: TestClient) -> None:
    for _ in range(3):
        cached(client, GENERATE, sampling_params={"max_new_tokens": 1})
    get = {name: values[()] for name, values in samples(client.get("/metrics").text).items() if () in values}
    assert get["lockstep:prefix_cache_queries_total"] == 3 * len(IDS)
    assert get["lockstep:prefix_cache_hits_total"] == 2 * 8
    info = client.get("/server_info").json()
    assert info["enable_prefix_caching"] is True
    assert get["lockstep:cached_blocks"] == info["readings"]["cached_kv_blocks"]


def test_switched_off() -> None:
    with TestClient(create_app(stub_engine(num_blocks=64, max_model_len=160, prefix_cache=False))) as client:
        wait_ready(client)
        assert [cached(client, path) for path in (COMPLETIONS, CHATS, GENERATE) * 2] == [0] * 6
        get = samples(client.get("/metrics").text)
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "cached_blocks"):
            assert get[f"lockstep:{name}"] == {(): 0}
        assert client.get("/server_info").json()["enable_prefix_caching"] is False


@pytest.mark.parametrize(
    ("flags", "variable", "shown"),
    [
        ([], None, "on"),
        (["--no-enable-prefix-caching"], None, "off"),
        ([], "false", "off"),
        (["--enable-prefix-caching"], "false", "on"),
    ],
)
def test_the_flag(
    flags: list[str],
    variable: str | None,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("LOCKSTEP_ENABLE_PREFIX_CACHING", variable)
    assert cli.main([*flags, "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--enable-prefix-caching")]
    assert line.split()[1] == shown
