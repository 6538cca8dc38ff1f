"""Every 400 reads like the others: the field, what stood there, what is allowed. No library's own sentence gets through."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.findings import told
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
from server.strict_json import loads
from tests.server.stub import stub_engine
from tests.server.test_bodies import CHAT, CHATS, COMPLETIONS, GENERATE, TEXT, assert_error, sampling, user, wait_ready

JSON = {"content-type": "application/json"}
RAW = ("Input should", "should have", "should match", "valid string", "after validation", "InputSequence", ", got ")

# One of every kind, and what unions, bounds, patterns and sizes are made of.
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, -1.5, 1e300, 2**64, 10**40, "", "x", "1", "x" * 3000, "\ud800",
    [], [None], ["x", 5], [[]], [[-1]], [True], [5] * 5000, ["x"] * 5000,
    {}, {"a": 1}, {"5": "x"}, {"5": 1e9}, {str(i): 1 for i in range(2000)}, [{}], {"type": "text", "text": 5},
)  # fmt: skip

PLACES: tuple[tuple[str, dict[str, Any], type[Body], tuple[str | int, ...]], ...] = (
    (COMPLETIONS, TEXT | {"max_tokens": 1}, CompletionBody, ()),
    (CHATS, CHAT | {"max_tokens": 1}, ChatBody, ()),
    (GENERATE, sampling(max_new_tokens=1), GenerateBody, ()),
    ("/tokenize", TEXT, TokenizeBody, ()),
    ("/detokenize", {"tokens": [5]}, DetokenizeBody, ()),
    (GENERATE, sampling(max_new_tokens=1), GenerateSampling, ("sampling_params",)),
    (COMPLETIONS, TEXT | {"max_tokens": 1, "stream": True, "stream_options": {}}, StreamOptions, ("stream_options",)),
    (CHATS, CHAT | {"max_tokens": 1}, Message, ("messages", 0)),
    ("/tokenize", CHAT, Message, ("messages", 0)),
)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(), ServerSettings(log_level="error"))) as client:
        wait_ready(client)
        yield client


def put(body: dict[str, Any], path: tuple[str | int, ...], name: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(body))
    inner: Any = copy
    for part in path:
        inner = inner[part]
    inner[name] = value
    return copy


@pytest.mark.parametrize(
    ("path", "body", "kind", "at"), PLACES, ids=[f"{place[0]}-{place[2].__name__}" for place in PLACES]
)
def test_no_library_speaks(
    client: TestClient, path: str, body: dict[str, Any], kind: type[Body], at: tuple[str | int, ...]
) -> None:
    refused = 0
    for name in (*kind.model_fields, "tools", "best_of"):
        for value in VALUES:
            sent = put(body, at, name, value)
            answer = client.post(path, content=json.dumps(sent), headers=JSON)
            if answer.status_code == 200:
                continue
            refused += 1
            assert answer.status_code in (400, 404), (name, answer.text)
            message = answer.json()["error"]["message"]
            assert not [raw for raw in RAW if raw in message], (name, value, message)
            assert " is " in message or " has " in message or " must " in message or " needs " in message, message
            assert name in message or answer.json()["error"]["code"] != "invalid_value", message
    assert refused > 10 * len(kind.model_fields)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, TEXT | {"max_tokens": "1"}, "max_tokens is '1', but must be an integer"),
        (COMPLETIONS, TEXT | {"max_tokens": -1}, "max_tokens is -1, but must be at least 0"),
        (COMPLETIONS, TEXT | {"temperature": 101}, "temperature is 101, but must be at most 100"),
        (COMPLETIONS, TEXT | {"top_p": 0}, "top_p is 0, but must be above 0"),
        (COMPLETIONS, TEXT | {"echo": "yes"}, "echo is 'yes', but must be true or false"),
        (COMPLETIONS, TEXT | {"n": True}, "n is true, but must be an integer"),
        (COMPLETIONS, TEXT | {"stop": 5}, "stop is 5, but must be text or a list"),
        (COMPLETIONS, TEXT | {"stop": [5]}, "stop[0] is 5, but must be text"),
        (COMPLETIONS, TEXT | {"stop": ["a"] * 17}, "stop has 17 entries, but at most 16 are allowed"),
        (COMPLETIONS, TEXT | {"stop": [""]}, "stop[0] has 0 characters, but at least 1 is needed"),
        (COMPLETIONS, TEXT | {"logit_bias": {"5": None}}, "logit_bias.5 is null, but must be a number"),
        (
            COMPLETIONS,
            TEXT | {"logit_bias": {"a b": 1}},
            "logit_bias has the key 'a b', but each key must be a token id in decimal digits",
        ),
        (COMPLETIONS, TEXT | {"stream_options": [1]}, "stream_options is a list of 1 entry, but must be an object"),
        (CHATS, {"messages": []}, "messages has 0 entries, but at least 1 is needed"),
        (CHATS, {"messages": [5]}, "messages[0] is 5, but must be an object"),
        (CHATS, user({"a": 1}), "messages[0].content is an object of 1 entry, but must be text or a list"),
        (
            CHATS,
            {"messages": [{"role": "wizard", "content": "a"}]},
            "messages[0].role is 'wizard', but must be system, developer, user or assistant",
        ),
        (CHATS, {}, "messages is required"),
        (GENERATE, {"text": 5}, "text is 5, but must be text or a non-empty list of texts"),
        (GENERATE, {"input_ids": 5}, "input_ids is 5, but must be token ids or a non-empty list of lists of them"),
        (GENERATE, {"text": "a", "rid": "a b"}, "rid is 'a b', but must be letters, digits and any of . _ : -"),
        (COMPLETIONS, [], "the body must be a JSON object"),
    ],
)
def test_the_words(client: TestClient, path: str, body: Any, message: str) -> None:
    assert assert_error(client.post(path, content=json.dumps(body), headers=JSON), 400)["message"] == message


def test_a_finding_without_words_of_its_own_still_names_field_and_value() -> None:
    message, param = told([{"type": "novel", "loc": ("body", "n"), "msg": "Strange", "input": [1, 2]}])
    assert (message, param) == ("n is a list of 2 entries: Strange", "n")


HALF = "but must be Unicode text: '\\ud800' at character 1 is half of a surrogate pair"


@pytest.mark.parametrize(
    ("path", "body", "what", "param"),
    [
        (COMPLETIONS, {"prompt": "a\ud800"}, "prompt is", "prompt"),
        (COMPLETIONS, {"prompt": ["a", "a\ud800"]}, "prompt[1] is", "prompt[1]"),
        *(
            (COMPLETIONS, TEXT | {name: "a\ud800"}, f"{name} is", name)
            for name in ("stop", "cache_salt", "user", "model", "novel")
        ),
        (COMPLETIONS, TEXT | {"stop": ["b", "a\ud800"]}, "stop[1] is", "stop[1]"),
        (COMPLETIONS, TEXT | {"logit_bias": {"a\ud800": 1}}, "a name in logit_bias is", "logit_bias"),
        (COMPLETIONS, TEXT | {"a\ud800": 1}, "a name in the body is", None),
        (CHATS, user("a\ud800"), "messages[0].content is", "messages[0].content"),
        (CHATS, user([{"type": "text", "text": "a\ud800"}]), "messages[0].content[0].text is", "messages"),
        (CHATS, user("a", name="a\ud800"), "messages[0].name is", "messages[0].name"),
        (CHATS, CHAT | {"chat_template_kwargs": {"a": ["a\ud800"]}}, "chat_template_kwargs.a[0] is", "chat_template"),
        (GENERATE, {"text": "a\ud800"}, "text is", "text"),
        (GENERATE, {"text": "a", "rid": "a\ud800"}, "rid is", "rid"),
        (GENERATE, sampling(stop="a\ud800"), "sampling_params.stop is", "sampling_params.stop"),
        ("/tokenize", {"prompt": "a\ud800"}, "prompt is", "prompt"),
        ("/tokenize", user("a\ud800"), "messages[0].content is", "messages[0].content"),
        ("/detokenize", {"tokens": [5], "model": "a\ud800"}, "model is", "model"),
        (COMPLETIONS, "a\ud800", "the body is", None),
    ],
)
@pytest.mark.parametrize("spelled", [True, False], ids=["escaped", "as-bytes"])
def test_half_of_a_surrogate_pair_is_no_text(
    client: TestClient, path: str, body: Any, what: str, param: str | None, spelled: bool
) -> None:
    data = json.dumps(body, ensure_ascii=spelled).encode("utf-8", "surrogatepass")
    error = assert_error(client.post(path, content=data, headers=JSON), 400)
    assert error["message"].startswith(what)
    assert error["message"].endswith(HALF)
    assert (error["param"] or "").startswith(param or "")


def test_a_whole_pair_is_one_character(client: TestClient) -> None:
    assert client.post("/tokenize", content=b'{"prompt": "\\ud83d\\ude00"}', headers=JSON).status_code == 200


def test_a_long_name_is_not_repeated_for_every_entry_behind_it() -> None:
    """A gigabyte of paths would be made of this small body."""
    body = json.dumps({"x" * 50_000: [1] * 20_000, "pair": "\U0001f600"}).encode()
    tracemalloc.start()
    try:
        loads(body)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_a_key_with_a_dot_does_not_cut_the_name_of_its_field() -> None:
    with TestClient(create_app(stub_engine())) as client:
        body = {"prompt": [5], "max_tokens": 1, "logit_bias": {"x.y": 1}}
        message = client.post("/v1/completions", json=body).json()["error"]["message"]
    assert message.startswith("logit_bias has the key 'x.y', but each key must be ")
