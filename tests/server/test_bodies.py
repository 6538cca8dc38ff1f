"""Bodies that must be refused: each with 4xx, an error object and the field's name; after each the server lives.

The table holds public bug reports of other servers (see the ids) as small cases. ALIVE is a control request whose text
must not have changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.settings import ServerSettings
from tests.server.stub import stub_engine

TEXT: dict[str, Any] = {"prompt": "the water"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
CONTROL = {"prompt": "hello world", "temperature": 0, "max_tokens": 6}
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def sampling(**values: Any) -> dict[str, Any]:
    return {"text": "hello", "sampling_params": values}


INTEGERS: dict[str, int] = {
    "n": 64,
    "max_tokens": 2**31 - 1,
    "min_tokens": 2**31 - 1,
    "logprobs": 20,
    "top_k": 2**31 - 1,
    "seed": 2**63 - 1,
}
FLOATS = {
    "temperature": (-0.5, 1e308, -1e308),
    "top_p": (0, -1, 1.5, 1e308, -0.0),
    "min_p": (-0.1, 1.1, 1e308),
    "repetition_penalty": (0, -1, 1e308, -0.0),
    "frequency_penalty": (-2.5, 2.5, 1e308),
    "presence_penalty": (-2.5, 2.5, -1e308),
}

BAD: list[tuple[str, str, Any, str | None]] = [
    # (id, path, body, the field to blame)
    ("B100-empty", COMPLETIONS, {"prompt": []}, "prompt"),
    ("B100-empty-ids", COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
    ("B100-no-messages", CHATS, {"messages": []}, "messages"),
    ("B100-empty-text", COMPLETIONS, {"prompt": ""}, "prompt"),
    ("B100-empty-texts", COMPLETIONS, {"prompt": [""]}, "prompt"),
    ("B102-too-long", COMPLETIONS, {"prompt": [5] * 48, "max_tokens": 1}, None),
    ("B102-far-too-long", COMPLETIONS, {"prompt": [5] * 49}, "prompt"),
    ("B102-together-too-long", COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 9}, "max_tokens"),
    ("B103-stream", COMPLETIONS, {"prompt": [5] * 49, "stream": True}, "prompt"),
    ("B103-stream-together", COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 9, "stream": True}, "max_tokens"),
    ("B124-prompt-number", COMPLETIONS, {"prompt": 5}, "prompt"),
    ("B124-prompt-object", COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    ("B124-prompt-missing", COMPLETIONS, {}, "prompt"),
    ("B124-prompt-null", COMPLETIONS, {"prompt": None}, "prompt"),
    ("B124-prompt-mixed", COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]"),
    ("B124-messages-text", CHATS, {"messages": "x"}, "messages"),
    ("B124-message-text", CHATS, {"messages": ["x"]}, "messages[0]"),
    ("B124-stop-number", COMPLETIONS, TEXT | {"stop": 5}, "stop"),
    ("B124-stop-empty", COMPLETIONS, TEXT | {"stop": [""]}, "stop[0]"),
    ("B124-stop-list", COMPLETIONS, TEXT | {"stop": ["a"] * 17}, "stop"),
    ("B124-temperature-text", COMPLETIONS, TEXT | {"temperature": "hot"}, "temperature"),
    ("B124-stream-text", COMPLETIONS, TEXT | {"stream": "yes"}, "stream"),
    ("B123-role", CHATS, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("B123-null-content", CHATS, user(None), "messages[0].content"),
    ("B123-tool-calls", CHATS, user(None, tool_calls=[{"id": "1"}]), "messages[0].tool_calls"),
    ("B133-no-parts", CHATS, user([]), "messages[0].content"),
    ("B133-part-type", CHATS, user([{"type": "poem", "text": "x"}]), "messages[0].content[0].type"),
    ("B133-image", CHATS, user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
    ("B133-part-text", CHATS, user([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
    ("B154-ids", COMPLETIONS, {"prompt": [3, 512]}, "prompt"),
    ("B154-negative-id", COMPLETIONS, {"prompt": [3, -1]}, "prompt[1]"),
    ("B154-id-true", COMPLETIONS, {"prompt": [3, True]}, "prompt[1]"),
    ("B154-prompts", COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
    ("B154-answers", COMPLETIONS, {"prompt": ["a"] * 3, "n": 10}, "n"),
    ("B154-top-logprobs", CHATS, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("B154-stop-ids", COMPLETIONS, TEXT | {"stop_token_ids": [3] * 1025}, "stop_token_ids"),
    ("B154-stop-id", COMPLETIONS, TEXT | {"stop_token_ids": [512]}, "stop_token_ids"),
    ("B154-bias-key", COMPLETIONS, TEXT | {"logit_bias": {"x": 1}}, "logit_bias.x"),
    ("B154-bias-id", COMPLETIONS, TEXT | {"logit_bias": {"512": 1}}, "logit_bias"),
    ("B154-bias-value", COMPLETIONS, TEXT | {"logit_bias": {"5": 101}}, "logit_bias"),
    ("B154-bias-size", COMPLETIONS, TEXT | {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ("B169-id", COMPLETIONS, {"prompt": [3, 2**64]}, "prompt[1]"),
    ("B169-stop-id", COMPLETIONS, TEXT | {"stop_token_ids": [2**63]}, "stop_token_ids[0]"),
    ("B169-priority", COMPLETIONS, TEXT | {"priority": 2**63}, "priority"),
    ("B087-nothing-to-say", COMPLETIONS, TEXT | {"max_tokens": 0}, "max_tokens"),
    ("B087-min-above-max", COMPLETIONS, TEXT | {"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ("surrogate", COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
    ("surrogate-chat", CHATS, user("\ud800"), "messages"),
    ("two-limits", CHATS, CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ("top-logprobs-alone", CHATS, CHAT | {"top_logprobs": 3}, "top_logprobs"),
    ("stream-options", COMPLETIONS, TEXT | {"stream_options": {"include_usage": True}}, "stream_options"),
    ("reserved-kwarg", CHATS, CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("echo-chat", CHATS, CHAT | {"echo": True}, "echo"),
    ("suffix", COMPLETIONS, TEXT | {"suffix": "x"}, "suffix"),
    ("best-of", COMPLETIONS, TEXT | {"best_of": 2}, "best_of"),
    ("tools", CHATS, CHAT | {"tools": [{"type": "function"}]}, "tools"),
    ("tool-choice", CHATS, CHAT | {"tool_choice": "required"}, "tool_choice"),
    ("response-format", CHATS, CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
    ("structured", COMPLETIONS, TEXT | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("prompt-logprobs", COMPLETIONS, TEXT | {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ("prompt-logprobs-21", CHATS, CHAT | {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("generate-nothing", GENERATE, {}, "text"),
    ("generate-both", GENERATE, {"text": "a", "input_ids": [3]}, "text"),
    ("generate-ids-as-text", GENERATE, {"text": [3]}, "text"),
    ("generate-text-as-ids", GENERATE, {"input_ids": "a"}, "input_ids"),
    ("generate-mixed", GENERATE, {"text": ["a", [3]]}, "text[1]"),
    ("generate-ids", GENERATE, {"input_ids": [[3], []]}, "input_ids[1]"),
    ("generate-number", GENERATE, {"text": 5}, "text"),
    ("generate-regex", GENERATE, sampling(regex="("), "sampling_params.regex"),
    ("generate-long", GENERATE, sampling(max_new_tokens=2000), "sampling_params.max_new_tokens"),
    ("generate-zero", GENERATE, sampling(max_new_tokens=0), "sampling_params.max_new_tokens"),
    ("generate-top-p", GENERATE, sampling(top_p=2), "sampling_params.top_p"),
    (
        "generate-prompt-logprobs",
        GENERATE,
        {"text": "a", "logprob_start_len": 0},
        "logprob_start_len",
    ),
    ("generate-top-alone", GENERATE, {"text": "a", "top_logprobs_num": 3}, "top_logprobs_num"),
    ("generate-rid", GENERATE, {"text": "a", "rid": "a\nb"}, "rid"),
    ("tokenize-nothing", "/tokenize", {}, "prompt"),
    ("detokenize-id", "/detokenize", {"tokens": [512]}, "tokens"),
    *(
        (f"B169-{field}-{label}", COMPLETIONS, TEXT | {field: value}, field)
        for field, top in INTEGERS.items()
        for label, value in (
            ("above", top + 1),
            ("64", 2**64),
            ("below", -(2**63) - 1),
            ("huge", 10**400),
            ("true", True),
            ("float", 1.5),
            ("text", "1"),
        )
    ),
    *(
        (f"B168-{field}-{value}", COMPLETIONS, TEXT | {field: value}, field)
        for field, values in FLOATS.items()
        for value in (*values, True, "1", [1])
    ),
]

RAW: list[tuple[str, bytes]] = [
    ("B124-empty", b""),
    ("B124-broken", b"{:"),
    ("B124-list", b"[]"),
    ("B124-null", b"null"),
    ("B124-text", b'"x"'),
    ("B124-deep", b"[" * 1_000_000),
    ("B124-deep-value", b'{"prompt":' + b"[" * 100_000),
    ("B168-nan", b'{"prompt":"x","temperature":NaN}'),
    ("B168-infinity", b'{"prompt":"x","temperature":Infinity}'),
    ("B168-minus-infinity", b'{"prompt":"x","top_p":-Infinity}'),
    ("B168-overflow", b'{"prompt":"x","temperature":1e999}'),
    ("B169-digits", b'{"prompt":"x","seed":' + b"9" * 5000 + b"}"),
    ("not-utf8", b'{"prompt":"\xff\xfe"}'),
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(), ServerSettings(log_level="error"))) as client:
        wait_ready(client)
        yield client


@pytest.fixture(scope="module")
def control(client: TestClient) -> str:
    return str(client.post(COMPLETIONS, json=CONTROL).json()["choices"][0]["text"])


def wait_ready(client: TestClient) -> None:
    deadline = time.monotonic() + 10
    while client.get("/ready").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.005)


def assert_alive(client: TestClient, control: str) -> None:
    assert client.get("/health").status_code == 200
    answer = client.post(COMPLETIONS, json=CONTROL)
    assert answer.json()["choices"][0]["text"] == control
    info = client.get("/server_info").json()["readings"]
    assert (info["running"], info["waiting"]) in ((0, 0), (1, 0))  # the control itself may still have to be reaped


def assert_error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 5000
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"].endswith("_error")
    for word in ("Traceback", "/work/", "site-packages", ".py", "pydantic", "function-"):
        assert word not in response.text
    return dict(error)


@pytest.mark.parametrize(("path", "body", "field"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refused(client: TestClient, control: str, path: str, body: Any, field: str | None) -> None:
    began = time.monotonic()
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert time.monotonic() - began < 30
    error = assert_error(response, 400)
    if field is not None:
        assert error["param"] is not None
        assert error["param"].startswith(field)
    assert_alive(client, control)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, GENERATE])
@pytest.mark.parametrize("body", [row[1] for row in RAW], ids=[row[0] for row in RAW])
def test_refused_raw(client: TestClient, control: str, path: str, body: bytes) -> None:
    assert_error(client.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert_alive(client, control)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx", "json"]
)
def test_wrong_content_type(client: TestClient, control: str, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    assert_error(client.post(COMPLETIONS, content=json.dumps(CONTROL), headers=headers), 415)
    assert_alive(client, control)


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "application/vnd.api+json", "Application/JSON"]
)
def test_right_content_type(client: TestClient, content_type: str) -> None:
    response = client.post(COMPLETIONS, content=json.dumps(CONTROL), headers={"content-type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize("model", ["gpt-4", "", "synthetic-llama ", "../etc/passwd", "a\x00b"])
def test_unknown_model_names_the_served_ones(client: TestClient, control: str, model: str) -> None:
    """B126, B163."""
    for path, body in ((COMPLETIONS, TEXT), (CHATS, CHAT), (GENERATE, {"text": "a"}), ("/tokenize", TEXT)):
        error = assert_error(client.post(path, json=body | {"model": model}), 404)
        assert error["code"] == "model_not_found"
        assert "synthetic-llama" in error["message"]
    assert_alive(client, control)


@pytest.mark.parametrize("model", ["synthetic-llama", None])
def test_known_model(client: TestClient, model: str | None) -> None:
    answer = client.post(COMPLETIONS, json=TEXT | {"model": model}).json()
    assert answer["model"] == "synthetic-llama"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", COMPLETIONS, 405),
        ("PUT", CHATS, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/v1/models/a/b/../../etc", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
    ],
)
def test_no_such_route(client: TestClient, method: str, path: str, status: int) -> None:
    assert_error(client.request(method, path), status)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "generated"),
    [(46, None, 2), (47, None, 1), (47, 1, 1), (46, 2, 2), (44, 4, 4), (32, 16, 16)],
)
def test_lengths_at_the_limit(
    client: TestClient, control: str, prompt: int, max_tokens: int | None, generated: int
) -> None:
    """B102: what just fits is served to the last token."""
    body = {"input_ids": [5] * prompt, "sampling_params": {"max_new_tokens": max_tokens, "ignore_eos": True}}
    answer = client.post(GENERATE, json=body).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == generated
    assert_alive(client, control)


def test_error_is_bounded(client: TestClient) -> None:
    """Twelve thousand wrong values make one small answer."""
    messages = [{"role": "nobody", "content": "x" * 100} for _ in range(4000)]
    error = assert_error(client.post(CHATS, json={"messages": messages, "stop": [5] * 4000}), 400)
    assert "and more" in error["message"]


def test_extremes_that_are_allowed(client: TestClient, control: str) -> None:
    body = {
        **TEXT, "temperature": 100, "top_p": 1e-300, "min_p": 1, "repetition_penalty": 1e-300, "frequency_penalty": -2,
        "presence_penalty": 2, "top_k": -1, "seed": -(2**63), "n": 4, "logprobs": 20, "max_tokens": 2,
    }  # fmt: skip
    assert client.post(COMPLETIONS, json=body).status_code == 200
    assert_alive(client, control)
