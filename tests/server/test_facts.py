"""/health and /server_info: promises and readings, apart, and only for those who may know."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from server.app import create_app
from server.settings import ServerSettings
from tests.server.stub import stub_engine

ASK = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def read(client: TestClient, path: str = "/health", **options: Any) -> dict[str, Any]:
    got: dict[str, Any] = client.get(path, **options).json()
    return got


def test_promises_stay_and_readings_count() -> None:
    with TestClient(create_app(stub_engine())) as client:
        before = read(client)
        for _ in range(3):
            assert client.post("/v1/completions", json=ASK).status_code == 200
        after = read(client)
    assert before["status"] == after["status"] == "ok"
    assert before["promises"] == after["promises"]
    assert before["promises"]["max_num_seqs"] == 4
    assert before["promises"]["captures"] == [[1, 12], [2, 12], [4, 12]]
    assert before["readings"]["sampled_tokens"] == 0
    assert after["readings"]["sampled_tokens"] == 18
    assert after["readings"]["decode_steps"] == 15
    assert after["readings"]["decode_rows"] == {"1": 15}
    assert after["readings"]["replays"] == {"1x12": 15}
    assert after["readings"]["finished"] == {"length": 3}
    assert not {*before["promises"]} & {*before["readings"]}


def test_server_info_holds_the_same_sections() -> None:
    with TestClient(create_app(stub_engine())) as client:
        health, info = read(client), read(client, "/server_info")
    assert info["promises"] == health["promises"]
    assert info["readings"].keys() == health["readings"].keys()


def test_a_stranger_learns_that_the_server_lives_and_nothing_else() -> None:
    with TestClient(create_app(stub_engine(), ServerSettings(api_keys=("secret",)))) as client:
        assert read(client) == {"status": "ok"}
        assert read(client, headers={"authorization": "Bearer wrong"}) == {"status": "ok"}
        assert "readings" in read(client, headers={"authorization": "Bearer secret"})


def test_the_fingerprint_is_that_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the packed weights lie, which differs between a first start and a second, changes no answer; kernels do."""
    engine = stub_engine()

    def fingerprint(client: TestClient, **changes: str) -> str:
        rows = {"weights": "92 MiB, in memory", "compute": "native kernels, 512-bit vectors", **changes}
        monkeypatch.setattr(engine, "capacity", lambda: list(rows.items()))
        told: str = read(client, "/server_info")["system_fingerprint"]
        return told

    with TestClient(create_app(engine)) as client:
        first = fingerprint(client)
        assert first == fingerprint(client, weights="92 MiB, mapped from a file")
        assert first != fingerprint(client, compute="native kernels, 512-bit vectors, K/V in fp16")
