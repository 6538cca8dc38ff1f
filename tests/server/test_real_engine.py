"""The server around the real engine: answers over HTTP depend neither on neighbours nor on preemption."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.build import assemble
from engine.config import EngineConfig
from engine.loading.synthetic import synthetic_model
from server.app import create_app
from tests.server.test_bodies import wait_ready
from tests.server.world import parse_events

BODIES: list[dict[str, Any]] = [
    {
        "input_ids": [3 + (7 * index + at) % 400 for at in range(9 + index)],
        "sampling_params": {
            "max_new_tokens": 24 + index, "ignore_eos": True, "sampling_seed": index, "temperature": 0.9 * (index % 2)
        },
        "return_logits_digest": True,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    for index in range(6)
]  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    config = EngineConfig(
        device="cpu",
        threads=1,
        num_kv_blocks=20,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=64,
    )
    with TestClient(create_app(assemble(config, synthetic_model()))) as client:
        wait_ready(client)
        yield client


def ask(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_together_as_alone(client: TestClient) -> None:
    alone = [ask(client, body) for body in BODIES]
    with ThreadPoolExecutor(len(BODIES)) as pool:
        together = list(pool.map(lambda body: ask(client, body), BODIES))
    assert sum(one["meta_info"]["preemptions"] for one in together) > 0
    assert sum(one["meta_info"]["preemptions"] for one in alone) == 0
    for mine, theirs in zip(alone, together, strict=True):
        assert theirs["output_ids"] == mine["output_ids"]
        assert theirs["text"] == mine["text"]
        for name in ("logits_digests", "output_token_logprobs", "output_top_logprobs"):
            assert theirs["meta_info"][name] == mine["meta_info"][name]


def test_chat_streams_what_it_says(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 3}
    plain = client.post("/v1/chat/completions", json=body).json()
    events = parse_events(client.post("/v1/chat/completions", json=body | {"stream": True}).content)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == plain["choices"][0]["message"]["content"]
    assert client.get("/server_info").json()["capacity"]
