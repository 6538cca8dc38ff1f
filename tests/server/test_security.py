"""Keys from flags, variables and files; /debug/* behind the admin key; CORS off by default; limits that are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.config import ConfigError
from server import cli
from server.app import create_app
from server.options import Options
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_bodies import assert_error, wait_ready

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def statuses(settings: ServerSettings, path: str, *keys: str) -> list[int]:
    with TestClient(create_app(stub_engine(), settings)) as client:
        wait_ready(client)
        return [client.get(path, headers=bearer(key) if key else {}).status_code for key in keys]


def test_keys_come_from_flags_variables_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfrom-file\n\n  second  \n")
    settings = Options(api_key=("flag",), api_key_file=file).settings()
    assert (
        statuses(settings, "/v1/models", "flag", "from-file", "second", "# of the team", "", "other")
        == [200] * 3 + [401] * 3
    )
    monkeypatch.setenv("LOCKSTEP_API_KEY", "one two")
    monkeypatch.setenv("LOCKSTEP_API_KEY_FILE", str(file))
    options = cli._parse([])
    assert options is not None
    assert statuses(options.settings(), "/v1/models", "one", "two", "second", "flag") == [200] * 3 + [401]


@pytest.mark.parametrize("content", [None, "", "# nothing\n\n", b"\xff\xfe"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    """A server that was meant to be locked must not start open."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="api_key_file"):
        Options(api_key_file=file).settings()


def test_no_key_is_kept_or_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(api_keys=("SENTINEL-a",), admin_keys=("SENTINEL-b",))
    assert all(len(digest) == 32 and b"SENTINEL" not in digest for digest in (*settings.api_keys, *settings.admin_keys))
    assert "SENTINEL" not in repr(settings)
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", "SENTINEL-b")
    assert cli.main(["--dry-run", "--api-key", "SENTINEL-a"]) == 0
    printed = capsys.readouterr()
    assert "SENTINEL" not in printed.out + printed.err
    assert "--admin-key                  1 given" in printed.out


def test_debug_exists_for_the_admin_only() -> None:
    path = "/debug/ledger"
    assert statuses(ServerSettings(), path, "", "x") == [404, 404]
    assert statuses(ServerSettings(api_keys=("user",)), path, "", "user") == [404, 404]
    both = ServerSettings(api_keys=("user",), admin_keys=("admin",))
    assert statuses(both, path, "", "user", "admin") == [401, 401, 200]
    assert statuses(both, "/debug/nothing", "user", "admin") == [401, 404]
    assert statuses(both, "/v1/models", "", "user", "admin") == [401, 200, 200]
    assert statuses(ServerSettings(admin_keys=("admin",)), "/v1/models", "") == [200]


def test_the_ledger_tells_who_holds_what_and_no_token() -> None:
    """Also when something is wrong: the audit's sentence comes without the tokens that it names."""
    engine = stub_engine()
    with TestClient(create_app(engine, ServerSettings(admin_keys=("admin",)))) as client:
        wait_ready(client)
        prompt = [401, 402, 403, 404, 405]
        client.post(COMPLETIONS, json=BODY | {"prompt": prompt})
        whole = client.get("/debug/ledger", headers=bearer("admin")).json()
        assert whole["audit"] == whole["waiting"] == []
        assert whole["published"] == whole["cached"]
        assert len(whole["references"]) == 16
        assert not {str(token) for token in prompt} & set(json.dumps(whole).replace(",", " ").replace("]", " ").split())
        engine.scheduler.pool.references[3] += 1
        broken = client.get("/debug/ledger", headers=bearer("admin")).json()
        assert any("block 3" in sentence for sentence in broken["audit"])
        engine.scheduler.pool.references[3] -= 1


ORIGIN = "https://app.example.org"
ASK = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_cors_is_off_unless_an_origin_is_named() -> None:
    with TestClient(create_app(stub_engine())) as client:
        wait_ready(client)
        answer = client.post(COMPLETIONS, json=BODY, headers={"Origin": ORIGIN})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-origin" not in client.options(COMPLETIONS, headers=ASK).headers


def test_a_named_origin_may_call_and_no_other() -> None:
    """The browser's question beforehand brings no key; the call itself must."""
    with TestClient(create_app(stub_engine(), ServerSettings(cors_origins=(ORIGIN,), api_keys=("k",)))) as client:
        wait_ready(client)
        question = client.options(COMPLETIONS, headers=ASK)
        assert (question.status_code, question.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "access-control-allow-credentials" not in question.headers
        assert client.options(COMPLETIONS, headers=ASK | {"Origin": "https://evil.example"}).status_code == 400
        call = client.post(COMPLETIONS, json=BODY, headers={"Origin": ORIGIN, **bearer("k")})
        assert (call.status_code, call.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert client.post(COMPLETIONS, json=BODY, headers={"Origin": ORIGIN}).status_code == 401


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "", "https://"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        ServerSettings(cors_origins=(origin,))


def test_the_limits_that_are_told_are_those_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ServerSettings(max_body_bytes=20_000, max_prompt_bytes=100)
    with TestClient(create_app(stub_engine(max_waiting=128), settings)) as client:
        wait_ready(client)
        limits = client.get("/server_info").json()["promises"]["request_limits"]
        for good, bad in (
            ({"n": limits["n"]}, {"n": limits["n"] + 1}),
            ({"logprobs": limits["logprobs"]}, {"logprobs": limits["logprobs"] + 1}),
            ({"stop": ["~"] * limits["stop_strings"]}, {"stop": ["~"] * (limits["stop_strings"] + 1)}),
            ({"stop": "~" * limits["stop_string_chars"]}, {"stop": "~" * (limits["stop_string_chars"] + 1)}),
            ({"cache_salt": "s" * limits["cache_salt_chars"]}, {"cache_salt": "s" * (limits["cache_salt_chars"] + 1)}),
            (
                {"logit_bias": {str(i % 512): 0.0 for i in range(512)}},
                {"logit_bias": {str(i): 0.0 for i in range(limits["logit_bias_entries"] + 1)}},
            ),
            ({}, {"prompt": "x" * (limits["prompt_bytes"] + 1)}),
        ):
            assert client.post(COMPLETIONS, json=BODY | good).status_code == 200, good
            assert_error(client.post(COMPLETIONS, json=BODY | bad), 400)
        assert_error(client.post(COMPLETIONS, json=BODY | {"x": "x" * limits["body_bytes"]}), 413)
    assert cli.main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{limits['n']} answers, {limits['logprobs']} logprobs and {limits['stop_strings']} stop strings" in shown
