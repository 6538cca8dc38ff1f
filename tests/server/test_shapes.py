"""Answers as clients expect them: streamed and plain say the same, and streams keep the laws of their protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.loading.synthetic import synthetic_model
from server.app import create_app
from server.settings import ServerSettings
from tests.server.stub import StubRunner, stub_engine
from tests.server.test_bodies import wait_ready
from tests.server.world import parse_events

COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TOKENIZER = synthetic_model().tokenizer
assert TOKENIZER is not None
EOS = 2
SAYS = {"eos": "plea", "stop": "one two END three", "tail": "some E", "unicode": "é😀漢字"}


def script(prompt: tuple[int, ...]) -> Sequence[int]:
    """After "say <key>", the text of SAYS and end-of-sequence."""
    assert TOKENIZER is not None
    text = TOKENIZER.decode(list(prompt)).rpartition("say ")[2].split("\n")[0].strip()
    return [*TOKENIZER.encode(SAYS[text], add_special_tokens=False), EOS] if text in SAYS else ()


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    engine = stub_engine(StubRunner(script), num_blocks=64, max_model_len=160, captures=((4, 40),))
    with TestClient(create_app(engine, ServerSettings(served_model_name=("tiny", "alias")))) as client:
        wait_ready(client)
        yield client


def stream(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    return parse_events(response.content)


def whole(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


BODIES: dict[str, dict[str, Any]] = {
    "sampled": {"max_tokens": 12, "seed": 4},
    "greedy": {"max_tokens": 12, "temperature": 0},
    "three": {"max_tokens": 9, "seed": 4, "n": 3},
    "eos": {"say": "eos", "max_tokens": 40},
    "eos-at-limit": {"say": "eos", "max_tokens": 5},
    "stop": {"say": "stop", "max_tokens": 40, "stop": "END"},
    "stop-included": {"say": "stop", "max_tokens": 40, "stop": ["END"], "include_stop_str_in_output": True},
    "stop-kept-back": {"say": "tail", "max_tokens": 40, "stop": ["END"]},
    "stop-id": {"say": "stop", "max_tokens": 40, "stop_token_ids": TOKENIZER.encode("N", add_special_tokens=False)},
    "unicode": {"say": "unicode", "max_tokens": 40},
    "cut-in-a-character": {"say": "unicode", "max_tokens": 4},
    "ignore-eos": {"say": "eos", "max_tokens": 9, "ignore_eos": True, "temperature": 0},
    "min-tokens": {"say": "eos", "max_tokens": 12, "min_tokens": 8, "temperature": 0},
    "logprobs": {"max_tokens": 6, "seed": 4, "logprobs": 2},
    "ids": {"say": "unicode", "max_tokens": 20, "return_token_ids": True},
}


def completion(body: dict[str, Any]) -> dict[str, Any]:
    say = body.get("say")
    rest = {key: value for key, value in body.items() if key != "say"}
    return {"prompt": f"say {say}" if say else "hello world", **rest}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    rest = completion(body)
    prompt = rest.pop("prompt")
    if "logprobs" in rest:
        rest |= {"logprobs": True, "top_logprobs": rest["logprobs"]}
    return {"messages": [{"role": "user", "content": prompt}], **rest}


def without(choice: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if key not in names}


def joined_logprobs(chunks: list[dict[str, Any]]) -> dict[str, Any] | None:
    tables = [chunk["logprobs"] for chunk in chunks if chunk.get("logprobs")]
    if not tables:
        return None
    return {key: [one for table in tables for one in table[key] or []] or None for key in tables[0]}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_stream_says_what_the_plain_answer_says(client: TestClient, path: str, name: str) -> None:
    """B117, B118, B120, B121, B132: one id, one [DONE], one finish per choice, role once, right usage."""
    body = (completion if path == COMPLETIONS else chat)(BODIES[name])
    plain = whole(client, path, body)
    events = stream(
        client, path, body | {"stream_options": {"include_usage": True}, "seed": plain["choices"][0]["seed"]}
    )
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks}) == 1
    assert chunks[0]["system_fingerprint"] == plain["system_fingerprint"]
    assert chunks[-1]["choices"] == []
    usage = [dict(answer["usage"]) for answer in (plain, chunks[-1])]
    cold, warm = (one.pop("prompt_tokens_details")["cached_tokens"] for one in usage)
    assert usage[0] == usage[1]
    assert 0 <= cold <= warm < usage[0]["prompt_tokens"]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert len(plain["choices"]) == body.get("n", 1)
    for index, choice in enumerate(plain["choices"]):
        assert choice["index"] == index
        mine = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["seed"] == choice["seed"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if path == COMPLETIONS:
            assert "".join(c["text"] for c in mine) == choice["text"]
        else:
            assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
            assert [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        table = choice["logprobs"] and {key: value or None for key, value in choice["logprobs"].items()}
        assert joined_logprobs(mine) == table
        if "return_token_ids" in body:
            assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]


@pytest.mark.parametrize(
    ("name", "text", "finish", "reason", "tokens"),
    [
        ("eos", "plea", "stop", None, 5),
        ("eos-at-limit", "plea", "stop", None, 5),
        ("stop", "one two ", "stop", "END", 11),
        ("stop-included", "one two END", "stop", "END", 11),
        ("stop-kept-back", "some E", "stop", None, 7),
        ("unicode", "é😀漢字", "stop", None, 13),
    ],
)
def test_ends(client: TestClient, name: str, text: str, finish: str, reason: str | None, tokens: int) -> None:
    """B093, B094, B099, B105: the table of ends. The stop token counts as generated and is not text."""
    answer = whole(client, COMPLETIONS, completion(BODIES[name]))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, finish, reason)
    assert TOKENIZER is not None
    ids = [*TOKENIZER.encode(SAYS[BODIES[name]["say"]], add_special_tokens=False), EOS]
    assert answer["usage"]["completion_tokens"] <= len(ids)
    if reason is None:
        assert answer["usage"]["completion_tokens"] == len(ids)


def test_stop_id_is_told(client: TestClient) -> None:
    (choice,) = whole(client, COMPLETIONS, completion(BODIES["stop-id"]))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == BODIES["stop-id"]["stop_token_ids"][0]
    assert choice["text"] == "one two E"


def test_min_tokens_and_ignore_eos(client: TestClient) -> None:
    """B096, B105."""
    for name, least in (("min-tokens", 8), ("ignore-eos", 9)):
        assert whole(client, COMPLETIONS, completion(BODIES[name]))["usage"]["completion_tokens"] >= least


@pytest.mark.parametrize("streamed", [False, True])
def test_seed_repeats_the_answer(client: TestClient, streamed: bool) -> None:
    first = whole(client, COMPLETIONS, {"prompt": "hello", "max_tokens": 10, "n": 3})
    assert len({choice["text"] for choice in first["choices"]}) == 3
    for choice in first["choices"]:
        body = {"prompt": "hello", "max_tokens": 10, "seed": choice["seed"]}
        if streamed:
            events = stream(client, COMPLETIONS, body)[:-1]
            text = "".join(event["choices"][0]["text"] for event in events)
        else:
            text = whole(client, COMPLETIONS, body)["choices"][0]["text"]
        assert text == choice["text"]


def test_lists_of_prompts_are_numbered_by_prompt_then_choice(client: TestClient) -> None:
    texts = ["hello", "the water", "a question"]
    body = {"max_tokens": 5, "seed": 3, "n": 2}
    single = [whole(client, COMPLETIONS, body | {"prompt": text}) for text in texts]
    together = whole(client, COMPLETIONS, body | {"prompt": texts})
    assert [c["index"] for c in together["choices"]] == list(range(6))
    assert [c["text"] for c in together["choices"]] == [c["text"] for one in single for c in one["choices"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(one["usage"][name] for one in single)
    ids = [whole(client, "/tokenize", {"prompt": text})["tokens"] for text in texts]
    assert whole(client, COMPLETIONS, body | {"prompt": ids})["choices"] == together["choices"]
    assert whole(client, COMPLETIONS, body | {"prompt": ids[0]})["choices"] == single[0]["choices"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo(client: TestClient, streamed: bool, max_tokens: int, as_ids: bool) -> None:
    ids = whole(client, "/tokenize", {"prompt": "the water"})["tokens"]
    body = {"prompt": ids if as_ids else "the water", "max_tokens": max_tokens, "temperature": 0}
    text = "" if max_tokens == 0 else whole(client, COMPLETIONS, body)["choices"][0]["text"]
    if streamed:
        events = stream(client, COMPLETIONS, body | {"echo": True, "stream_options": {"include_usage": True}})
        usage, got = events[-2]["usage"], "".join(e["choices"][0]["text"] for e in events[:-2])
    else:
        answer = whole(client, COMPLETIONS, body | {"echo": True})
        usage, got = answer["usage"], answer["choices"][0]["text"]
        assert answer["choices"][0]["finish_reason"] == "length"
    assert got == "the water" + text
    assert usage["completion_tokens"] == max_tokens


def test_no_usage_unless_asked(client: TestClient) -> None:
    """B120."""
    choices: list[dict[str, Any]] = [
        {},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {}},
        {"stream_options": None},
    ]
    for options in choices:
        events = stream(client, COMPLETIONS, {"prompt": "hello", "max_tokens": 3, **options})
        assert all("usage" not in event and event["choices"] for event in events[:-1])


def test_continuous_usage(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    events = stream(client, CHATS, chat({"max_tokens": 6, "seed": 1}) | {"stream_options": options})[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_logprobs_shapes(client: TestClient) -> None:
    table = whole(client, COMPLETIONS, {"prompt": "hello", "max_tokens": 40, "seed": 8, "logprobs": 2})["choices"][0][
        "logprobs"
    ]
    sizes = {len(table[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert sizes == {40}
    assert -9999.0 in table["token_logprobs"]  # the stub says minus infinity for some tokens
    assert all(name in top for name, top in zip(table["tokens"], table["top_logprobs"], strict=True))
    named = {"prompt": "hello", "max_tokens": 3, "seed": 8, "logprobs": 0, "return_tokens_as_token_ids": True}
    table = whole(client, COMPLETIONS, named)["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in table["tokens"])
    content = whole(client, CHATS, chat({"max_tokens": 3, "logprobs": 2}))["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert bytes(content[0]["bytes"]).decode("utf-8", "replace") == content[0]["token"]
    assert whole(client, CHATS, chat({"max_tokens": 3}))["choices"][0]["logprobs"] is None


def test_chat_content_as_parts_is_joined_by_a_newline(client: TestClient) -> None:
    """B133."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"max_tokens": 5, "temperature": 0}
    joined = whole(client, CHATS, body | {"messages": [{"role": "user", "content": "a\nb"}]})
    answer = whole(client, CHATS, body | {"messages": [{"role": "user", "content": parts}]})
    assert answer["choices"] == [without(joined["choices"][0], "seed") | {"seed": answer["choices"][0]["seed"]}]
    assert answer["choices"][0]["message"]["refusal"] is None


def test_developer_is_system_and_replies_can_be_sent_back(client: TestClient) -> None:
    body = {"max_tokens": 5, "temperature": 0}
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    developer = [{"role": "developer", "content": "s"}, {"role": "user", "content": "u", "name": "ann"}]
    texts = [whole(client, CHATS, body | {"messages": m})["choices"][0]["message"] for m in (system, developer)]
    assert texts[0] == texts[1]
    again = [*system, texts[0] | {"tool_calls": [], "annotations": None}, {"role": "user", "content": "more"}]
    assert whole(client, CHATS, body | {"messages": again})["usage"]["prompt_tokens"] > 10


def test_generate(client: TestClient) -> None:
    body = {
        "text": "hello", "sampling_params": {"max_new_tokens": 7, "sampling_seed": 3}, "return_logits_digest": True,
        "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1, "rid": "my-id",
    }  # fmt: skip
    plain = whole(client, GENERATE, body)
    meta = plain["meta_info"]
    assert len(plain["output_ids"]) == meta["completion_tokens"] == 7
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["id"], meta["seed"], meta["preemptions"], meta["recomputed_tokens"]) == ("my-id", 3, 0, 0)
    assert meta["last_iteration"] - meta["first_iteration"] == 6
    assert meta["replayed_steps"] == 6
    assert len(set(meta["logits_digests"])) == 7
    assert [entry[1] for entry in meta["output_token_logprobs"]] == plain["output_ids"]
    assert meta["input_token_logprobs"] == []
    events = stream(client, GENERATE, body)
    assert events[-1] == "[DONE]"
    last = events[-2]
    assert last["text"] == plain["text"]
    assert last["output_ids"] == plain["output_ids"]
    assert last["meta_info"]["logits_digests"] == meta["logits_digests"]
    assert last["meta_info"]["finish_reason"] == meta["finish_reason"]
    for before, after in pairwise(events[:-1]):  # cumulative, as in SGLang
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None


def test_generate_ends_and_lists(client: TestClient) -> None:
    stop = whole(client, GENERATE, {"text": "say stop", "sampling_params": {"stop": ["END"], "no_stop_trim": True}})
    assert (stop["text"], stop["meta_info"]["finish_reason"]) == ("one two END", {"type": "stop", "matched": "END"})
    eos = whole(client, GENERATE, {"text": "say eos"})
    assert eos["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    params = {"max_new_tokens": 3, "temperature": 0}
    many = whole(client, GENERATE, {"text": ["hello", "water"], "sampling_params": params})
    each = [whole(client, GENERATE, {"text": text, "sampling_params": params}) for text in ("hello", "water")]
    assert [one["output_ids"] for one in many] == [one["output_ids"] for one in each]
    ids = [whole(client, "/tokenize", {"prompt": text})["tokens"] for text in ("hello", "water")]
    assert [one["output_ids"] for one in whole(client, GENERATE, {"input_ids": ids, "sampling_params": params})] == [
        one["output_ids"] for one in each
    ]
    events = stream(client, GENERATE, {"text": "hello", "sampling_params": params | {"n": 2}})[:-1]
    assert {event["index"] for event in events} == {0, 1}


def test_models_and_names(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    card = client.get("/v1/models/alias").json()
    assert card["root"] == "synthetic-llama"
    assert card["max_model_len"] == 160
    assert whole(client, COMPLETIONS, {"prompt": "hello", "model": "alias"})["model"] == "alias"
    assert whole(client, COMPLETIONS, {"prompt": "hello"})["model"] == "tiny"


def test_tokenize_and_back(client: TestClient) -> None:
    text = "hello é😀 world"
    answer = whole(client, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = whole(client, "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": text, "text": text}
    rendered = whole(client, "/tokenize", {"messages": [{"role": "user", "content": "hello"}]})["tokens"]
    usage = whole(client, CHATS, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})["usage"]
    assert usage["prompt_tokens"] == len(rendered)
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["chat_template"]


def test_small_gets(client: TestClient) -> None:
    assert client.get("/version").json()["version"]
    assert client.get("/server_info").json()["capacity"] == {"device": "stub"}
    assert client.get("/model_info").json()["is_generation"] is True
    for path in ("/health", "/ready", "/metrics"):
        assert client.get(path).status_code == 200
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")


def test_document_describes_every_route(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert {COMPLETIONS, CHATS, GENERATE, "/v1/models", "/health", "/metrics", "/tokenize"} <= set(document["paths"])
    body = document["components"]["schemas"]["CompletionBody"]
    assert body["required"] == ["prompt"]
    good = document["paths"][CHATS]["post"]["responses"]["200"]
    assert "text/event-stream" in good["content"]
    assert list(good["headers"]) == ["X-Lockstep-Ignored-Fields"]
    assert "headers" not in document["paths"]["/v1/models"]["get"]["responses"]["200"]
