"""GET / and its files: named one by one, nothing from outside, revalidated by digest; and the stream it reads needs a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import server.page
from server.app import create_app
from server.page import FILES
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_bodies import assert_error, wait_ready

STATIC = Path(server.page.__file__).parent / "static"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(), ServerSettings(api_keys=("a key",)))) as client:
        wait_ready(client)
        yield client


def test_every_file_of_the_folder_is_served_and_no_other() -> None:
    assert {path.name for path in STATIC.iterdir()} == {path.rpartition("/")[2] or "index.html" for path in FILES}


@pytest.mark.parametrize("path", FILES)
def test_a_file_is_served_without_a_key_and_once(client: TestClient, path: str) -> None:
    first = client.get(path)
    assert first.status_code == 200
    assert first.content == (STATIC / (path.rpartition("/")[2] or "index.html")).read_bytes()
    assert first.headers["content-type"].startswith(("text/html", "text/css", "text/javascript"))
    assert first.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in first.headers["content-security-policy"]
    again = client.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    head = client.head(path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", first.headers["etag"])


@pytest.mark.parametrize("path", FILES)
def test_nothing_is_asked_of_anybody_else(path: str) -> None:
    text = FILES[path].data.decode()
    assert "//" not in re.sub(r"(?m)(^|\s)//\s.*$", "", text)  # no address; comments are no address
    for named in re.findall(r'(?:src|href)="([^"]+)"', text):
        assert named == "data:," or f"/{named}" in FILES
    for named in re.findall(r'from "\./([^"]+)"', text):
        assert f"/static/{named}" in FILES


@pytest.mark.parametrize(
    "path", ["/static/", "/static/../page.py", "/static/%2e%2e/page.py", "/static/page.py", "/index.html"]
)
def test_no_other_file_is_reached(client: TestClient, path: str) -> None:
    headers = {"Authorization": "Bearer a key"}
    assert client.get(f"http://testserver{path}", headers=headers).status_code == 404


def test_the_stream_needs_a_key_and_an_engine(client: TestClient) -> None:
    assert_error(client.get("/live"), 401)
    with TestClient(create_app(stub_engine())) as other:
        wait_ready(other)
        other.app.state.context.bridge.phase = "loading"  # type: ignore[attr-defined]
        assert_error(other.get("/live"), 503)
        other.app.state.context.bridge.phase = "ready"  # type: ignore[attr-defined]
