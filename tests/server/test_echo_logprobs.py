"""Logprobs of a prompt over HTTP: OpenAI's ``echo``, vLLM's ``prompt_logprobs``, SGLang's ``logprob_start_len``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from tests.server.stub import stub_engine
from tests.server.test_bodies import wait_ready
from tests.server.world import parse_events

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]
CHOSEN = [None, *(-0.125 * token for token in IDS[1:])]  # as the stub has them


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(num_blocks=64, max_model_len=160))) as client:
        wait_ready(client)
        yield client


def post(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def table_of(client: TestClient, body: dict[str, Any], streamed: bool) -> tuple[str, dict[str, list[Any]], Any]:
    """Text, logprobs and usage of the only choice, the pieces of a stream put together."""
    if not streamed:
        answer = post(client, COMPLETIONS, body)
        return answer["choices"][0]["text"], answer["choices"][0]["logprobs"], answer["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage, done = parse_events(client.post(COMPLETIONS, json=body | options).content)
    assert done == "[DONE]"
    choices = [event["choices"][0] for event in events]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    table = {name: [one for choice in choices for one in choice["logprobs"][name]] for name in names}
    return "".join(choice["text"] for choice in choices), table, usage["usage"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_with_logprobs(client: TestClient, streamed: bool, max_tokens: int) -> None:
    """What lm-eval sends; the second time the prompt is in the prefix cache, and is not taken from there."""
    body = {"prompt": [IDS], "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
    answered = post(client, COMPLETIONS, body | {"max_tokens": 4})["choices"][0]["logprobs"]
    text, table, usage = table_of(client, body | {"echo": True}, streamed)
    assert table["token_logprobs"] == CHOSEN + answered["token_logprobs"][:max_tokens]
    assert [len(entry) for entry in table.values()] == [len(IDS) + max_tokens] * 4
    assert table["top_logprobs"][0] is None
    assert all(name in top for name, top in zip(table["tokens"][1:], table["top_logprobs"][1:], strict=True))
    assert text == "".join(table["tokens"])
    assert table["text_offset"] == [len("".join(table["tokens"][:at])) for at in range(len(table["tokens"]))]
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (max_tokens, 0)


def test_every_choice_of_every_prompt_has_its_own(client: TestClient) -> None:
    body = {"prompt": [IDS, IDS[:3]], "n": 2, "max_tokens": 1, "seed": 3, "logprobs": 0, "echo": True}
    tables = [choice["logprobs"]["token_logprobs"][:-1] for choice in post(client, COMPLETIONS, body)["choices"]]
    assert tables == [CHOSEN, CHOSEN, CHOSEN[:3], CHOSEN[:3]]


def test_vllms_field(client: TestClient) -> None:
    body = {"prompt": IDS, "max_tokens": 2, "prompt_logprobs": 1, "logprobs": 2, "echo": True}
    choice = post(client, COMPLETIONS, body)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        "6": {"logprob": -0.75, "rank": 2, "decoded_token": choice["logprobs"]["tokens"][1]},
        "20": {"logprob": -0.25, "rank": 1, "decoded_token": choice["prompt_logprobs"][1]["20"]["decoded_token"]},
    }
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [3, 3]  # two, and the chosen one
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = post(client, CHATS, chat)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in post(client, CHATS, chat | {"prompt_logprobs": None})


def test_sglangs_fields(client: TestClient) -> None:
    body = {"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 2}}
    for start in (0, 4):
        meta = post(client, GENERATE, body | {"logprob_start_len": start})["meta_info"]
        assert [entry[:2] for entry in meta["input_token_logprobs"]] == [
            list(pair) for pair in zip(CHOSEN, IDS, strict=True)
        ][start:]
        assert len(meta["input_top_logprobs"]) == len(IDS) - start
    meta = post(client, GENERATE, body | {"logprob_start_len": -1})["meta_info"]
    assert meta["input_token_logprobs"] == []
