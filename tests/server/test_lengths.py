"""How long an answer is when nobody said so, and how long a request may be at all, told and true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.facts import shortfall
from tests.server.stub import stub_engine
from tests.server.test_bodies import assert_error, wait_ready

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
CONTEXT, BLOCKS, SIZE = 160, 24, 4  # the pool holds 96 tokens, so a request at most 97
MOST = BLOCKS * SIZE + 1


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(max_model_len=CONTEXT, num_blocks=BLOCKS, block_size=SIZE))) as client:
        wait_ready(client)
        yield client


def lengths(client: TestClient, path: str, prompt: Any, **more: Any) -> list[int]:
    """Tokens of each answer, none of which ends by itself."""
    if path == GENERATE:
        body = {"input_ids": prompt, "sampling_params": {"ignore_eos": True, **more}}
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        results = answer.json() if isinstance(answer.json(), list) else [answer.json()]
        return [len(result["output_ids"]) for result in results]
    answer = client.post(path, json={"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **more})
    assert answer.status_code == 200, answer.text
    return [len(choice["token_ids"]) for choice in answer.json()["choices"]]


@pytest.mark.parametrize(
    ("path", "prompt", "generated"),
    [
        (COMPLETIONS, 5, 16),
        (COMPLETIONS, MOST - 16, 16),
        (COMPLETIONS, MOST - 15, 15),
        (COMPLETIONS, MOST - 1, 1),
        (GENERATE, 5, MOST - 5),
        (GENERATE, MOST - 1, 1),
    ],
)
def test_a_default_length_is_lowered_to_what_is_left(
    client: TestClient, path: str, prompt: int, generated: int
) -> None:
    """A model with a short context answers a bare request."""
    assert lengths(client, path, [5] * prompt) == [generated]


def test_the_default_of_generate_is_128_where_that_fits() -> None:
    with TestClient(create_app(stub_engine(max_model_len=400, num_blocks=128))) as client:
        wait_ready(client)
        assert lengths(client, GENERATE, [5] * 8) == [128]
        assert lengths(client, GENERATE, [5] * 8, max_new_tokens=None) == [392]
        assert client.post(GENERATE, json={"input_ids": [5] * 8}).status_code == 200  # no sampling_params at all


def test_each_prompt_has_its_own_default_length(client: TestClient) -> None:
    """A long prompt in the same body does not shorten the answers to the others."""
    for path in (COMPLETIONS, GENERATE):
        alone = [lengths(client, path, [[5] * size])[0] for size in (MOST - 3, 4)]
        assert lengths(client, path, [[5] * (MOST - 3), [5] * 4]) == alone
        assert alone[0] == 3 < alone[1]


@pytest.mark.parametrize("prompt", [90, 10])
@pytest.mark.parametrize("stream", [True, False])
def test_a_length_that_was_asked_for_is_refused_where_it_does_not_fit(
    client: TestClient, prompt: int, stream: bool
) -> None:
    """Also when it is the default's own number."""
    for path, name, asked in ((COMPLETIONS, "max_tokens", 100), (GENERATE, "sampling_params.max_new_tokens", 128)):
        body: dict[str, Any] = {"stream": stream}
        if path == GENERATE:
            body |= {"input_ids": [5] * prompt, "sampling_params": {"max_new_tokens": asked}}
        else:
            body |= {"prompt": [5] * prompt, "max_tokens": asked}
        error = assert_error(client.post(path, json=body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
        assert f"has {prompt} tokens" in error["message"]
        assert f"is {asked}" in error["message"]


def test_a_default_length_leaves_no_prompt_that_is_too_long(client: TestClient) -> None:
    for size in (MOST, CONTEXT, CONTEXT + 1):
        for path, field in ((COMPLETIONS, "prompt"), (GENERATE, "input_ids")):
            error = assert_error(client.post(path, json={field: [5] * size}), 400)
            assert error["code"] == "context_length_exceeded"
            assert str(size) in error["message"]


def test_a_least_length_above_the_default_is_told(client: TestClient) -> None:
    error = assert_error(client.post(COMPLETIONS, json={"prompt": [5], "min_tokens": 20}), 400)
    assert error["param"] == "min_tokens"
    error = assert_error(client.post(COMPLETIONS, json={"prompt": [5] * (MOST - 3), "min_tokens": 5}), 400)
    assert error["message"] == "min_tokens is 5, but max_tokens is 3"


def told(client: TestClient) -> set[int]:
    (card,) = client.get("/v1/models").json()["data"]
    answers = [client.get(path).json() for path in (f"/v1/models/{card['id']}", "/server_info", "/model_info")]
    answers += [client.get("/server_info").json()["promises"], client.post("/tokenize", json={"prompt": "a"}).json()]
    return {answer["max_model_len"] for answer in (card, *answers)}


def test_the_length_that_is_told_is_the_most_that_is_served(client: TestClient) -> None:
    """The pool bounds it here, the context in the next test; who wants to know both finds both."""
    assert told(client) == {MOST}
    promises = client.get("/server_info").json()["promises"]
    assert (promises["context_len"], promises["kv_cache_tokens"]) == (CONTEXT, BLOCKS * SIZE)
    assert shortfall(stub_engine(max_model_len=CONTEXT, num_blocks=BLOCKS).limits)[0][1].startswith(f"{MOST} tokens")
    assert lengths(client, COMPLETIONS, [5] * 7, max_tokens=MOST - 7) == [MOST - 7]
    assert_error(client.post(COMPLETIONS, json={"prompt": [5] * 7, "max_tokens": MOST - 6}), 400)
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    bounds = [branch.get("maximum") for branch in schemas["CompletionBody"]["properties"]["max_tokens"]["anyOf"]]
    assert MOST - 1 in bounds
    assert f'"maxItems":{MOST - 1}' in client.get("/openapi.json").text


def test_the_context_is_told_where_the_pool_is_large() -> None:
    with TestClient(create_app(stub_engine(max_model_len=48, num_blocks=16, block_size=4))) as client:
        wait_ready(client)
        assert told(client) == {48}
        assert shortfall(stub_engine(max_model_len=48, num_blocks=16).limits) == []
        assert lengths(client, GENERATE, [5] * 8) == [40]
