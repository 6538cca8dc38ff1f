"""What bodies wish for, tried on the real engine over HTTP: seeds, order, biases, filters, ids, numbers beyond every limit.

Cases B067, B073, B079, B087, B091, B130, B168 and B169. Whatever is refused is a 400 that names its field, and a control
request says after it what it said before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.build import assemble
from engine.config import EngineConfig
from engine.loading.synthetic import synthetic_model
from server.app import create_app
from tests.server.stub import NO_TEXT
from tests.server.test_bodies import assert_error, wait_ready
from tests.server.world import SPECS, World, parse_events

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
WARM = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
SIZES: dict[str, Any] = {
    "device": "cpu", "threads": 1, "num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "max_model_len": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(assemble(EngineConfig(**SIZES), synthetic_model()))) as client:
        wait_ready(client)
        yield client


@pytest.fixture
def alive(client: TestClient) -> Iterator[None]:
    """The control request, before and after."""

    def control() -> Any:
        return client.post(COMPLETIONS, json={"prompt": "hello world", "temperature": 0, "max_tokens": 6}).json()[
            "choices"
        ]

    before = control()[0]["text"]
    yield
    assert control()[0]["text"] == before
    assert client.get("/health").status_code == 200


def asked(client: TestClient, path: str, wish: dict[str, Any], prompt: Any = "hello") -> Any:
    """The response to a body for ``path``, whatever its names for the fields are."""
    if path == GENERATE:
        names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
        return client.post(
            path, json={"text": prompt, "sampling_params": {names.get(k, k): v for k, v in wish.items()}}
        )
    if path == CHATS:
        return client.post(path, json={"messages": [{"role": "user", "content": prompt}], **wish})
    return client.post(path, json={"prompt": prompt, **wish})


def text(response: Any) -> str:
    assert response.status_code == 200, response.text
    answer = response.json()
    if "text" in answer:
        return str(answer["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, GENERATE])
def test_b067_the_seed_of_the_body_is_the_seed(client: TestClient, path: str) -> None:
    """Equal seeds, equal answers; other seeds, others, over the whole range of 64 bits; beyond it a refusal."""
    seeds = (1, 2, 0, -1, 2**31, 2**63 - 1, -(2**63))
    told = [text(asked(client, path, WARM | {"seed": seed})) for seed in (*seeds, *seeds)]
    assert told[: len(seeds)] == told[len(seeds) :]
    assert len(set(told)) == len(seeds)
    for seed in (2**63, -(2**63) - 1, 2**64, 1.0, "1", True):
        assert_error(asked(client, path, WARM | {"seed": seed}), 400)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_b073_the_order_of_a_list_changes_no_answer(client: TestClient, temperature: float) -> None:
    prompts = [[5 + 7 * which + at for at in range(3 + 2 * which)] for which in range(6)]
    wish = WARM | {"temperature": temperature, "seed": 11, "return_token_ids": True}

    def answers(order: tuple[int, ...]) -> dict[int, Any]:
        choices = asked(client, COMPLETIONS, wish, [prompts[which] for which in order]).json()["choices"]
        return {which: choice["token_ids"] for which, choice in zip(order, choices, strict=True)}

    first = answers((0, 1, 2, 3, 4, 5))
    assert len({tuple(ids) for ids in first.values()}) > 1
    for order in itertools.islice(itertools.permutations(range(6)), 100, 720, 150):
        assert answers(order) == first
    assert {which: answers((which,))[which] for which in range(6)} == first


@pytest.mark.usefixtures("alive")
def test_b079_a_bias_beyond_the_vocabulary_is_refused(client: TestClient) -> None:
    bad: list[dict[str, Any]] = [{key: 1} for key in ("512", "-1", "99999999999", "abc", "1.5", "", " 5", "05", "٥")]
    bad += [{"5": value} for value in (101, -101, None, "x", True, [1])]
    for path in (COMPLETIONS, CHATS, GENERATE):
        for bias in bad:
            error = assert_error(asked(client, path, WARM | {"logit_bias": bias}), 400)
            assert "logit_bias" in (error["param"] or ""), bias
        for value in (100, -100):
            asked_for = asked(client, path, WARM | {"logit_bias": {"511": value, "0": value}})
            assert asked_for.status_code == 200


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, GENERATE])
def test_b087_the_rule_of_top_p_and_min_p(client: TestClient, path: str) -> None:
    """0 < top_p <= 1 and 0 <= min_p <= 1; null is the default; the smallest top_p keeps the best token."""
    wish = WARM | {"seed": 3}
    plain = text(asked(client, path, wish))
    greedy = text(asked(client, path, WARM | {"temperature": 0}))
    assert plain != greedy
    for name, values in (("top_p", (0, 0.0, -0.1, 1.0000001, 2)), ("min_p", (-0.1, 1.1))):
        for value in values:
            error = assert_error(asked(client, path, wish | {name: value}), 400)
            assert (error["param"] or "").endswith(name)
    for same in ({"top_p": None}, {"top_p": 1.0}, {"min_p": None}, {"min_p": 0}):
        assert text(asked(client, path, wish | same)) == plain, same
    for best in ({"top_p": 1e-9}, {"min_p": 1}):
        assert text(asked(client, path, wish | best)) == greedy, best


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("stream", [False, True])
def test_b091_an_id_without_a_text_is_no_error(client: TestClient, stream: bool) -> None:
    """The model's vocabulary is larger than its tokenizer's: such tokens are empty texts, and have names in logprobs."""
    bias = {str(token): 100 for token in NO_TEXT}
    wish = WARM | {"temperature": 2.0, "logit_bias": bias, "logprobs": 3, "stream": stream, "return_token_ids": True}
    answer = asked(client, COMPLETIONS, wish)
    assert answer.status_code == 200
    choices = [answer.json()["choices"][0]] if not stream else []
    for event in parse_events(answer.content)[:-1] if stream else ():
        choices += event["choices"]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert len(ids) == 8
    assert set(ids) <= set(NO_TEXT)
    assert "".join(choice["text"] for choice in choices) == ""
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 8
    assert choices[-1]["finish_reason"] == "length"
    assert client.post("/detokenize", json={"tokens": list(NO_TEXT)}).json()["text"] == ""


@pytest.mark.parametrize("spec", SPECS)
def test_b130_one_id_twice_at_once_and_again_after_an_abort(spec: str) -> None:
    """What a client calls its request is its own affair: two of one name run side by side, and neither ends the other."""

    async def main() -> None:
        world = World()
        name = {"x-request-id": "same"}
        bodies = [
            {"prompt": [20 + k] * 5, "max_tokens": 8, "ignore_eos": True, "seed": k, "return_token_ids": True}
            for k in range(3)
        ]
        alone = [world.post(COMPLETIONS, body, spec) for body in bodies]
        await world.submitted(3)
        await world.run(*alone)
        both = [world.post(COMPLETIONS, body, spec, headers=name) for body in bodies[:2]]
        await world.submitted(2)
        await world.step(2)
        both[0].leave()
        await world.until(lambda: world.bridge.num_open == 1)
        again = world.post(COMPLETIONS, bodies[2], spec, headers=name)
        await world.submitted(2)
        await world.run(both[1], again)
        for mine, theirs in ((alone[1], both[1]), (alone[2], again)):
            assert theirs.headers["x-request-id"] == "same"
            assert theirs.json()["choices"][0]["token_ids"] == mine.json()["choices"][0]["token_ids"]
        assert both[1].json()["id"] != again.json()["id"]
        assert world.engine.counters.finished == {"length": 5, "abort": 1}
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTEGERS = {
    COMPLETIONS: ("max_tokens", "min_tokens", "n", "logprobs", "top_k", "seed", "priority", "prompt_logprobs"),
    CHATS: ("max_tokens", "max_completion_tokens", "min_tokens", "n", "top_logprobs", "top_k", "seed", "priority"),
    GENERATE: ("max_new_tokens", "min_new_tokens", "n", "top_k", "seed", "sampling_seed"),
}
REQUIRED = {
    COMPLETIONS: {"prompt": "x"},
    CHATS: {"messages": [{"role": "user", "content": "x"}]},
    GENERATE: {"text": "x"},
}
MARK = "VALUE"


def raw(path: str, field: str, value: str) -> bytes:
    """A body in which ``field`` is the JSON text ``value``, which need not be JSON."""
    wish: dict[str, Any] = {field: MARK}
    body = {**REQUIRED[path], **({"sampling_params": wish} if path == GENERATE else wish)}
    return json.dumps(body).replace(f'"{MARK}"', value).encode()


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, GENERATE])
def test_b168_no_float_is_infinite_or_no_number(client: TestClient, path: str) -> None:
    for field, value in itertools.product(FLOATS, ("NaN", "Infinity", "-Infinity", "1e999", "-1e308", "1e308")):
        response = client.post(path, content=raw(path, field, value), headers={"content-type": "application/json"})
        assert_error(response, 400)
    for zero in ("0", "-0.0"):
        for field, status in (
            ("temperature", 200),
            ("frequency_penalty", 200),
            ("repetition_penalty", 400),
            ("top_p", 400),
        ):
            response = client.post(path, content=raw(path, field, zero), headers={"content-type": "application/json"})
            assert response.status_code == status, (field, zero)


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, GENERATE])
def test_b169_no_integer_is_beyond_its_range(client: TestClient, path: str) -> None:
    for field, value in itertools.product(INTEGERS[path], (2**63, 2**64, -(2**63) - 1, 10**400)):
        response = client.post(path, content=raw(path, field, str(value)), headers={"content-type": "application/json"})
        assert_error(response, 400)
    for value in (2**63, 2**64, -(2**63) - 1, 10**400):
        for field, nested in (
            ("stop_token_ids", f"[5, {value}]"),
            ("logit_bias", f'{{"5": {value}}}'),
            ("logit_bias", f'{{"{value}": 1}}'),
        ):
            response = client.post(path, content=raw(path, field, nested), headers={"content-type": "application/json"})
            assert_error(response, 400)
    for body in ({"prompt": [[5, 2**64]]}, {"prompt": [5, -(2**63) - 1]}):
        assert_error(client.post(COMPLETIONS, json=body), 400)
    assert_error(client.post(GENERATE, json={"input_ids": [[5, 10**300]]}), 400)
    assert_error(client.post("/detokenize", json={"tokens": [2**64]}), 400)
