"""What a client may send by mistake: a name of another endpoint, two names of one thing, an odd spelling, an encoding. Each is a
400 (or 415) that says which, and no answer to another question than the one that was asked."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    GenerateSampling,
    Message,
    StreamOptions,
    TokenizeBody,
)
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_bodies import CHAT, CHATS, COMPLETIONS, GENERATE, TEXT, assert_error, sampling, wait_ready

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(), ServerSettings(log_level="error"))) as client:
        wait_ready(client)
        yield client


@pytest.mark.parametrize(
    ("path", "body", "field", "home"),
    [
        (COMPLETIONS, TEXT | {"max_completion_tokens": 1}, "max_completion_tokens", CHATS),
        (COMPLETIONS, TEXT | {"max_new_tokens": 1}, "max_new_tokens", "sampling_params"),
        (COMPLETIONS, TEXT | {"top_logprobs": 0}, "top_logprobs", CHATS),
        (COMPLETIONS, TEXT | CHAT, "messages", CHATS),
        (COMPLETIONS, TEXT | {"sampling_params": {}}, "sampling_params", GENERATE),
        (CHATS, CHAT | TEXT, "prompt", COMPLETIONS),
        (CHATS, CHAT | {"return_logprob": True}, "return_logprob", GENERATE),
        (GENERATE, {"text": "a", "temperature": 0}, "temperature", "sampling_params"),
        (GENERATE, {"text": "a", "max_tokens": 1}, "max_tokens", COMPLETIONS),
        (GENERATE, sampling(max_tokens=1), "sampling_params.max_tokens", COMPLETIONS),
        (GENERATE, sampling(stream=True), "sampling_params.stream", GENERATE),
        (GENERATE, sampling(seed=1, sampling_seed=2), "sampling_params.sampling_seed", "sampling_params.seed"),
    ],
)
def test_a_name_that_belongs_elsewhere_is_refused(
    client: TestClient, path: str, body: dict[str, Any], field: str, home: str
) -> None:
    error = assert_error(client.post(path, json=body), 400)
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is ") or home == "sampling_params.seed"
    assert home in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, TEXT | {"max_tokens": 1, "max_completion_tokens": None, "messages": None, "novel": 5}),
        (CHATS, CHAT | {"max_tokens": 1, "echo": False, "rid": "x", "reasoning_effort": "low", "novel": {"prompt": 1}}),
        (GENERATE, sampling(max_new_tokens=1, seed=3, sampling_seed=3, novel=1) | {"echo": False}),
        ("/tokenize", TEXT | {"max_tokens": 5}),  # the body of the request that is to follow
        (COMPLETIONS, TEXT | {"max_tokens": 1, "stream": True, "stream_options": {"include_usage": True, "novel": 1}}),
    ],
)
def test_what_asks_for_nothing_or_is_new_is_no_mistake(client: TestClient, path: str, body: dict[str, Any]) -> None:
    assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize("name", ["05", "00", "+5", "-5", " 5", "5.0", "\u0665", "1_0", "99999999999"])
def test_a_token_has_one_spelling_in_a_bias(client: TestClient, name: str) -> None:
    """Two names of one token would be two wishes, and one of them lost."""
    error = assert_error(client.post(COMPLETIONS, json=TEXT | {"logit_bias": {"5": -100, name: 100}}), 400)
    assert error["param"].startswith("logit_bias")


def test_a_limit_is_named_as_it_was_sent(client: TestClient) -> None:
    error = assert_error(client.post(CHATS, json=CHAT | {"max_completion_tokens": 0}), 400)
    assert error["message"].startswith("max_completion_tokens is 0, but must be ")
    error = assert_error(client.post(GENERATE, json=sampling(max_new_tokens=0)), 400)
    assert error["message"].startswith("sampling_params.max_new_tokens is 0, but must be ")


def test_a_name_that_is_no_text_is_told_as_such(client: TestClient) -> None:
    error = assert_error(client.post(COMPLETIONS, content=b'{"prompt": "a", "\\ud83d": 1}', headers=JSON), 400)
    assert "must be Unicode text" in error["message"]
    assert "JSON object" not in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_an_encoded_body_is_refused_for_its_encoding(client: TestClient, encoding: str) -> None:
    data = gzip.compress(json.dumps(TEXT).encode())
    error = assert_error(client.post(COMPLETIONS, content=data, headers=JSON | {"content-encoding": encoding}), 415)
    assert encoding.split(",")[0] in error["message"]
    headers = JSON | {"content-encoding": "identity"}
    assert client.post(COMPLETIONS, content=json.dumps(TEXT), headers=headers).status_code == 200


def test_keywords_of_the_template_count_when_tokens_are_counted(client: TestClient) -> None:
    counted = [
        client.post("/tokenize", json=CHAT | {"chat_template_kwargs": kwargs}).json()["count"]
        for kwargs in ({}, {"a": 1})
    ]
    assert counted[0] == counted[1] > 0
    assert_error(client.post("/tokenize", json=CHAT | {"chat_template_kwargs": {"messages": []}}), 400)


READ_BY_NOBODY = {"include_obfuscation"}  # a promise to pad events that may be kept by padding nothing


def test_every_field_of_every_body_is_read(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is accepted and that no code looks at would be a wish that silently fails."""
    read: dict[type[Body], set[str]] = defaultdict(set)
    plain = Body.__getattribute__

    def recording(self: Body, name: str) -> Any:
        read[type(self)].add(name)
        return plain(self, name)

    monkeypatch.setattr(Body, "__getattribute__", recording)
    whole: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, TEXT | {"max_tokens": 1, "echo": True, "logprobs": 1}),
        (COMPLETIONS, TEXT | {"max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}),
        (CHATS, CHAT | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1}),
        (GENERATE, sampling(max_new_tokens=1) | {"return_logprob": True, "logprob_start_len": 0}),
        ("/tokenize", TEXT),
        ("/tokenize", CHAT),
        ("/detokenize", {"tokens": [5, 6]}),
    ]
    for path, body in whole:
        assert client.post(path, json=body).status_code == 200, body
    bodies = (
        CompletionBody,
        ChatBody,
        GenerateBody,
        GenerateSampling,
        StreamOptions,
        Message,
        TokenizeBody,
        DetokenizeBody,
    )
    assert set(read) == set(bodies)
    unread = {kind.__name__: sorted(set(kind.model_fields) - read[kind] - READ_BY_NOBODY) for kind in bodies}
    assert {name: fields for name, fields in unread.items() if fields} == {}


def test_a_field_that_nobody_reads_would_be_seen() -> None:
    """What the test above counts as read is read by the endpoints, not by the library that makes the body."""
    read: set[str] = set()

    class Counted(Body):
        used: int | None = None
        dead: int | None = None

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    assert Counted.model_validate({"used": 1, "dead": 2}).used == 1
    assert "used" in read
    assert "dead" not in read
