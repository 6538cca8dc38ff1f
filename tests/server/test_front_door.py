"""Before FastAPI: ids, keys, sizes. And the fields that nobody named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
import structlog
from starlette.testclient import TestClient

from server.app import create_app
from server.asgi import OPEN_PATHS, clean_id
from server.fields import IGNORED_HEADER, MAX_NAMES, MAX_TOLD, UNSUPPORTED, FieldJudge, Ignored, in_header
from server.schemas import CompletionBody, GenerateSampling
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_bodies import assert_error, wait_ready

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}
KEY = "SENTINEL-key"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(), ServerSettings(max_body_bytes=5000))) as client:
        wait_ready(client)
        yield client


@pytest.fixture(scope="module")
def guarded() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(), ServerSettings(api_keys=("other", KEY)))) as client:
        wait_ready(client)
        yield client


def test_request_id_is_echoed_and_never_the_engines(client: TestClient) -> None:
    """B130: the same id twice at once is two requests."""
    answers = [client.post(COMPLETIONS, json=BODY, headers={"X-Request-Id": "same.id-1"}) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same.id-1"] * 2
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert "same.id-1" not in answers[0].text
    made = client.get("/nope").headers["x-request-id"]
    assert len(made) == 32


@pytest.mark.parametrize("given", ["", "a b", "a\nb", "x" * 129, "<script>", "é"])
def test_a_harmful_id_is_replaced(given: str) -> None:
    assert clean_id(given) != given


@pytest.mark.parametrize("size", [4999, 5000])
def test_body_that_fits(client: TestClient, size: int) -> None:
    body = json.dumps(BODY).encode()
    assert (
        client.post(COMPLETIONS, content=body.ljust(size), headers={"content-type": "application/json"}).status_code
        == 200
    )


def test_body_that_does_not_fit(client: TestClient) -> None:
    """By its announced length, and by the bytes that come without one."""
    big = b" " * 5001
    headers = {"content-type": "application/json"}
    assert_error(client.post(COMPLETIONS, content=big, headers=headers), 413)
    for count in (3, 100):  # read to its end, and not
        chunks = iter([b" " * 2000] * count)
        assert_error(client.post(COMPLETIONS, content=chunks, headers=headers), 413)
    assert client.post(COMPLETIONS, json=BODY).status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer ", f"Bearer {KEY}x"])
def test_every_route_but_the_listed_ones_asks_for_a_key(guarded: TestClient, header: str | None) -> None:
    """B157: all routes are enumerated, and odd spellings of paths are tried."""
    headers = {"Authorization": header} if header else {}
    paths = set(guarded.app.openapi()["paths"])  # type: ignore[attr-defined]
    assert {"/generate", "/tokenize", "/server_info"} <= paths
    paths |= {"/openapi.json", "//v1/models", "/V1/models", "/v1/models/", "/nope", "/health/", "//health", "/metrics/"}
    paths |= {"/", "/static/page.css", "/live", "/static/", "/static/page", "/static/../server_info", "//"}
    for path in paths:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            response = guarded.request(method, f"http://testserver{path}", headers=headers)
            if path in OPEN_PATHS:
                assert response.status_code in (200, 405)
            else:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["other", KEY])
def test_each_key_opens(guarded: TestClient, key: str) -> None:
    assert guarded.post(COMPLETIONS, json=BODY, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert guarded.get("/metrics", headers={"Authorization": f"bearer {key}"}).status_code == 200


ODD_KEY = "cl\u00e9-\u00e0"  # its last byte in UTF-8 is a space in Latin-1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (ODD_KEY.encode(), 200),
        (ODD_KEY.encode("latin-1"), 200),
        (ODD_KEY.encode() + b" ", 200),
        (ODD_KEY.encode("utf-16-le"), 401),
        (ODD_KEY.encode()[:-1], 401),
        (b"cle-a", 401),
        (b"\xff\xfe", 401),
    ],
)
def test_a_key_beyond_ascii_opens_by_its_bytes(sent: bytes, status: int) -> None:
    with TestClient(create_app(stub_engine(), ServerSettings(api_keys=(ODD_KEY,)))) as client:
        wait_ready(client)
        headers = {b"authorization": b"Bearer " + sent}
        assert client.get("/v1/models", headers=headers).status_code == status


def test_neither_key_nor_prompt_is_told_to_anybody(capsys: pytest.CaptureFixture[str]) -> None:
    """B159."""
    settings = ServerSettings(api_keys=(KEY,))
    assert KEY not in repr(settings)
    with TestClient(create_app(stub_engine(), settings)) as client:
        wait_ready(client)
        headers = {"Authorization": f"Bearer {KEY}"}
        bodies = [
            client.post(COMPLETIONS, json={"prompt": "SENTINEL-prompt", "SENTINEL": 1}, headers=headers).text,
            client.post(COMPLETIONS, json={"prompt": "SENTINEL-prompt" * 50}, headers=headers).text,
            *(
                client.get(path, headers=headers).text
                for path in ("/metrics", "/server_info", "/model_info", "/openapi.json")
            ),
        ]
    assert not [body for body in bodies if KEY in body or "SENTINEL-prompt" in body]
    printed = capsys.readouterr()
    assert KEY not in printed.out + printed.err
    assert "SENTINEL-prompt" not in printed.out + printed.err
    assert "field=SENTINEL" in printed.out + printed.err  # the capture sees the log at all


def test_a_stranger_cannot_write_into_the_log(client: TestClient) -> None:
    with structlog.testing.capture_logs() as logs:
        client.get("/a%0Ab%1B[31mc")
        client.post(COMPLETIONS, json=BODY | {"x\ny\x1b[31m": 1})
    texts = [str(value) for entry in logs for value in entry.values()]
    assert "x\\ny\\x1b[31m" in texts
    assert "/a\\nb\\x1b[31mc" in texts
    assert all(text.isprintable() for text in texts)


def test_what_nobody_foresaw_is_an_error_object_too(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FieldJudge, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(FieldJudge, "judge", broken)
    response = client.post(COMPLETIONS, json=BODY)
    assert assert_error(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]


def completion(**extra: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x", **extra})


def test_unknown_fields_are_named_once() -> None:
    judge, ignored = FieldJudge(), Ignored()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            judge.judge(completion(new_thing=1, user="me", rid="x"), ignored)
        judge.judge(completion(**{f"f{i}": 1 for i in range(2 * MAX_NAMES)}), ignored)
    assert [entry["field"] for entry in logs[:1]] == ["new_thing"]
    assert len(logs) == MAX_NAMES
    assert len(ignored) == MAX_TOLD + 1
    assert in_header(ignored) == "new_thing, f0, f1, f2, f3, f4, f5, f6, ..."


def test_no_name_is_taken_for_the_mark_that_there_were_more() -> None:
    ignored = Ignored()
    FieldJudge().judge(completion(**{"a": 1, "": 1, "...": 1, "b.c": 1}), ignored)
    assert in_header(ignored) == "a, %2E%2E%2E, b.c"


def told(response: Any) -> str | None:
    assert response.status_code == 200, response.text
    return cast("str | None", response.headers.get(IGNORED_HEADER))


def test_the_client_is_told_every_time_what_was_ignored(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "a", "refusal": "no", "mood": 1, "maybe": None}], "max_tokens": 2}
    generate = {"text": "a", "sampling_params": {"max_new_tokens": 2, "max_new_token": 3}, "steam": True}
    for _ in range(2):
        assert told(client.post(COMPLETIONS, json=BODY | {"max_token": 3})) == "max_token"
        stream = client.post(COMPLETIONS, json=BODY | {"max_token": 3, "stream": True})
        assert (told(stream), stream.text.endswith("[DONE]\n\n")) == ("max_token", True)
        options = {"stream": True, "stream_options": {"include_usages": True}}
        assert told(client.post(COMPLETIONS, json=BODY | options)) == "stream_options.include_usages"
        assert told(client.post("/v1/chat/completions", json=chat)) == "messages[].mood"
        assert told(client.post("/generate", json=generate)) == "sampling_params.max_new_token, steam"
        assert told(client.post("/tokenize", json={"prompt": "a", "max_tokens": 3})) == "max_tokens"
    known = {"user": "me", "store": True, "echo": False, "top_k": -1, "suffix": None, "sampling_seed": None}
    assert told(client.post(COMPLETIONS, json=BODY | known)) is None
    refused = client.post(COMPLETIONS, json=BODY | {"max_token": 3, "max_tokens": -1})
    assert_error(refused, 400)


def test_what_a_stranger_names_a_field_cannot_break_the_header(client: TestClient) -> None:
    odd = {"a, b": 1, "x\r\nSet-Cookie: a=b": 1, "\u00e9\x01": 1, "n" * 500: 1, "": 1}
    content = json.dumps(BODY | odd)
    answer = client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    names = (told(answer) or "").split(", ")
    assert names == ["a%2C%20b", "x%0D%0ASet-Cookie%3A%20a%3Db", "%C3%A9%01", "n" * 61 + "..."]
    many = client.post(COMPLETIONS, json=BODY | {"\u00e9" * 60 + str(i): 1 for i in range(12)})
    assert len(told(many) or "") < 700


def test_the_name_that_was_meant_is_in_the_log() -> None:
    judge, ignored = FieldJudge(), Ignored()
    with structlog.testing.capture_logs() as logs:
        judge.judge(completion(max_token=1, Temperature=0, tmperature=0, zzz=1), ignored)
        judge.judge(GenerateSampling.model_validate({"max_tokns": 1}), ignored, prefix="sampling_params.")
    assert [(entry["field"], entry.get("did_you_mean")) for entry in logs] == [
        ("max_token", "max_tokens"),
        ("Temperature", "temperature"),
        ("tmperature", "temperature"),
        ("zzz", None),
        ("sampling_params.max_tokns", "sampling_params.max_new_tokens"),
    ]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_refused_unless_they_ask_for_nothing(client: TestClient, name: str) -> None:
    for calm in UNSUPPORTED[name]:
        assert client.post(COMPLETIONS, json=BODY | {name: calm}).status_code == 200
    error = assert_error(client.post(COMPLETIONS, json=BODY | {name: {"x": "y" * 500}}), 400)
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"


def test_best_of_equal_to_n_asks_for_nothing(client: TestClient) -> None:
    assert client.post(COMPLETIONS, json=BODY | {"n": 3, "best_of": 3}).status_code == 200
    assert client.post(COMPLETIONS, json=BODY | {"n": 3, "best_of": 4}).status_code == 400
    assert client.post(COMPLETIONS, json=BODY | {"best_of": True}).status_code == 400
