"""Which names a server answers to: a web page of somebody else cannot reach one on this machine by a name of its own."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.config import ConfigError
from server.app import create_lazy_app
from server.hosts import Hosts, allowed
from server.options import Options
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_bodies import assert_error, wait_ready

EVIL = "evil.example"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.53", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LocalHost:1", True),
        ("localhost.", True),
        ("127.0.0.1:8000", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        (EVIL, False),
        (f"{EVIL}:8000", False),
        ("localhost.evil.example", False),
        ("evil-localhost", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("[::2]:8000", False),
        ("localhost:8000.evil.example", False),
        ("localhost:x", False),
        ("user@localhost", False),
        ("localhost/evil.example", False),
        ("localhost evil.example", False),
        ("localhost\tevil", False),
        ("[::1", False),
        ("::1", False),
        ("", False),
        ("0.0.0.0", False),
    ],
)
def test_on_a_loopback_address_only_its_names(address: str, host: str, good: bool) -> None:
    why = allowed((), address).refusal([host], address)
    assert (why is None) == good, why


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.7", None])
def test_elsewhere_every_name_unless_some_are_given(address: str | None) -> None:
    assert allowed((), address).refusal([EVIL], address) is None
    some = allowed(("api.example.org", "*.svc.local"), address)
    for host in ("api.example.org", "API.example.org:443", "a.b.svc.local", "localhost:1", "127.0.0.1"):
        assert some.refusal([host], "10.0.0.7") is None, host
    for host in (EVIL, "example.org", "x.api.example.org", "svc.local", "xsvc.local", "10.0.0.8"):
        assert some.refusal([host], "10.0.0.7") is not None, host
    assert allowed(("*",), "127.0.0.1").refusal([EVIL], "127.0.0.1") is None


def test_the_address_that_was_called_is_a_right_name() -> None:
    """What probes of Kubernetes and of load balancers send; no page of a name can."""
    some = allowed(("api.example.org",), "0.0.0.0")
    assert some.refusal(["10.0.0.7:8000"], "10.0.0.7") is None
    assert some.refusal(["[fd00::7]:8000"], "fd00:0:0::7") is None
    assert some.refusal(["10.0.0.7"], "10.0.0.8") is not None
    assert some.refusal(["10.0.0.7"], None) is not None


def test_every_host_header_must_be_right_and_none_is_no_browser() -> None:
    here = allowed((), "127.0.0.1")
    assert here.refusal([], "127.0.0.1") is None
    assert here.refusal(["localhost", EVIL], "127.0.0.1") is not None


@pytest.fixture(scope="module", params=["loopback", "given", "embedded"])
def client(request: pytest.FixtureRequest) -> Any:
    settings = ServerSettings(api_keys=("k",), allowed_hosts=("api.example.org",) if request.param == "given" else ())
    hosts = allowed((), "127.0.0.1") if request.param == "loopback" else None
    with TestClient(create_lazy_app(stub_engine, settings, hosts), base_url="http://localhost") as client:
        wait_ready(client)
        yield client, request.param


PATHS = (
    "/",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/live",
    "/v1/models",
    "/openapi.json",
    "/nope",
    "/v1/completions",
)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
def test_a_wrong_name_reaches_nothing(client: Any, method: str) -> None:
    """Neither what is open without a key nor the key's own refusal. An embedded server that was given no name takes any."""
    here, how = client
    for path in PATHS:
        answer = here.request(method, path, headers={"Host": f"{EVIL}:8000"})
        if how == "embedded":
            assert answer.status_code != 400, path
            continue
        assert answer.status_code == 400, path
        if method != "HEAD":
            error = assert_error(answer, 400)
            assert error["code"] == "host_not_allowed"
            assert f"'{EVIL}:8000'" in error["message"]
            assert f"--allowed-hosts {EVIL} adds it" in error["message"]
    assert here.get("/health").status_code == 200
    assert here.get("/v1/models").status_code == 401


def test_a_wrong_name_is_refused_before_the_body_is_read(client: Any) -> None:
    here, how = client
    read = []

    def body() -> Any:
        read.append(1)
        yield b"{}"

    for host in (EVIL, "localhost"):
        headers = {"Host": host, "Authorization": "Bearer k", "Content-Type": "application/json"}
        assert_error(here.post("/v1/completions", content=body(), headers=headers), 400)
    assert len(read) == (2 if how == "embedded" else 1)


@pytest.mark.parametrize("name", ["http://a.org", "a.org:80", "a b", "", "a.*", "*.*", "[::1]:80", "a/b", "a,b"])
def test_a_name_that_no_request_can_send_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerSettings(allowed_hosts=(name,))


def test_names_are_taken_as_people_write_them() -> None:
    settings = Options(allowed_hosts=("API.Example.org", "fd00::7", "*.Local")).settings()
    assert settings.allowed_hosts == ("api.example.org", "[fd00::7]", "*.local")
    assert allowed(settings.allowed_hosts, "::").refusal(["[FD00::7]:1"], None) is None


def test_a_long_or_odd_name_makes_a_short_message() -> None:
    why = Hosts(("localhost",)).refusal(["x" * 5000 + "\x1b"], "127.0.0.1")
    assert why is not None
    assert len(why) < 600
    assert "\x1b" not in why
