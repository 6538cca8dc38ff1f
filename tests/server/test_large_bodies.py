"""B147: a large body is parsed and judged beside everything else, and cannot hold more than can be judged in a moment."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from server import strict_json
from server.app import create_app
from server.errors import ApiError
from server.schemas import MAX_MESSAGES, Body, ChatBody, CompletionBody
from server.settings import ServerSettings
from server.strict_json import LARGE, MAX_VALUES, loads
from tests.server.stub import stub_engine
from tests.server.test_bodies import assert_error, wait_ready
from tests.server.world import World

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def test_the_event_loop_turns_while_a_large_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser waits for the loop: were it on the loop's own thread, neither would ever go on."""
    parsing, release = threading.Event(), threading.Event()
    real = strict_json._count_values
    threads: list[str] = []

    def slow(text: str) -> None:
        if len(text) > LARGE:
            threads.append(threading.current_thread().name)
            parsing.set()
            assert release.wait(60), "the event loop stood still"
        real(text)

    monkeypatch.setattr(strict_json, "_count_values", slow)

    async def main() -> tuple[Any, Any, Any]:
        world = World()
        large = [
            world.post(COMPLETIONS, {"prompt": "x" * LARGE, "temperature": "hot"}),
            world.post(CHATS, {"messages": [{"role": "user", "content": "x" * LARGE}], "n": 0}),
        ]
        await world.until(parsing.is_set)
        small = world.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 3})
        await world.run(small)  # served from the first byte to the last
        release.set()
        await world.run(*large)
        return *large, small

    first, second, small = asyncio.run(main())
    assert small.status == 200
    assert (first.status, first.json()["error"]["param"]) == (400, "temperature")
    assert (second.status, second.json()["error"]["param"]) == (400, "n")
    assert len(threads) == 2
    assert all(name.startswith("long-prompt") for name in threads)


def test_numbers_give_up_the_interpreter_lock() -> None:
    """A thread that parses a million of them lets others run; the library's own way of reading them does not."""
    body = b"[" + b"12345," * 999_999 + b"1]"
    done, turns = threading.Event(), 0

    def parse() -> None:
        loads(body, yielding=True)
        done.set()

    thread = threading.Thread(target=parse)
    thread.start()
    while not done.is_set():
        turns += 1
        done.wait(0.001)
    thread.join()
    assert turns > 3


@pytest.mark.parametrize(
    "text", ['[1, -2, 3.5, 1e3, 1E-3, 12345678901234567890, true, null, "\\ud83d\\ude00"]', "-0", "1e999"]
)
def test_both_ways_of_reading_give_the_same_values(text: str) -> None:
    assert repr(loads(text.encode(), yielding=True)) == repr(loads(text.encode()))


@pytest.mark.parametrize("body", [b"{", b"[NaN]", b"[" + b"9" * 5000 + b"]", b"[-Infinity]", b'"\xff"', b"[" * 100_000])
def test_both_ways_of_reading_refuse_with_the_same_words(body: bytes) -> None:
    words = []
    for yielding in (False, True):
        with pytest.raises(json.JSONDecodeError) as refused:
            loads(body, yielding=yielding)
        words.append((refused.value.msg, refused.value.pos))
    assert words[0] == words[1]


def test_a_body_has_the_same_errors_however_large_it_is() -> None:
    padding = {"metadata": "x" * LARGE}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": "a", "n": 0, "stop": [""], "logit_bias": {"x": 1}}),
        (COMPLETIONS, {"prompt": [5, True]}),
        (COMPLETIONS, {"prompt": "a", "seed": 2**64, "top_p": "1"}),
        (CHATS, {"messages": [{"role": "wizard", "content": 5}]}),
        (CHATS, {"messages": [{"role": "user", "content": [5, 5]}]}),
    ]
    with TestClient(create_app(stub_engine(), ServerSettings(log_level="error"))) as client:
        wait_ready(client)
        for path, body in bodies:
            small, large = (assert_error(client.post(path, json=one), 400) for one in (body, body | padding))
            assert small == large
        for text in (b'{"prompt": NaN, "x": "%s"}', b'{"prompt": "%s"', b'{"prompt": "\xff%s"}'):
            small, large = (
                assert_error(
                    client.post(COMPLETIONS, content=text % fill, headers={"content-type": "application/json"}), 400
                )
                for fill in (b"x", b"x" * LARGE)
            )
            assert small["message"].split(":")[0] == large["message"].split(":")[0] == "the body is not valid JSON"


def test_what_a_body_may_hold_is_bounded_and_text_is_not_counted() -> None:
    loads(b"[" + b"[]," * (MAX_VALUES - 2) + b"[]]")
    loads(json.dumps(["[" * MAX_VALUES, '{"a": "\\"[' * MAX_VALUES, "\\", '"']).encode())
    loads(json.dumps('\\["' * MAX_VALUES).encode("utf-16"))
    for body in (
        b"[" + b"[]," * (MAX_VALUES - 1) + b"[]]",
        b"[" + b"{}," * MAX_VALUES + b"1]",
        b"[" + b'"",' * MAX_VALUES + b"1]",
        b'["\\\\",' + b"[]," * MAX_VALUES + b"1]",
        b"[" * MAX_VALUES * 2,
    ):
        with pytest.raises(ApiError) as refused:
            loads(body)
        assert (refused.value.status_code, refused.value.code) == (400, "body_too_complex")
        assert str(MAX_VALUES) in refused.value.message


def test_the_largest_conversation_that_is_allowed_is_not_too_complex() -> None:
    part = {"type": "text", "text": "x"}
    messages = [{"role": "user", "name": "n", "content": [part, part]}] * MAX_MESSAGES
    ChatBody.model_validate(loads(json.dumps({"messages": messages, "model": "m"}).encode()))


@pytest.mark.parametrize(
    ("kind", "body", "most"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 300}] * 4000}, 2 * MAX_MESSAGES),
        (ChatBody, {"messages": [{}] * 60_000}, 2),
        (ChatBody, {"messages": [{"role": "nobody"}] * MAX_MESSAGES}, 2 * MAX_MESSAGES),
        (CompletionBody, {"prompt": "x", "logit_bias": {f"x{i}": 1 for i in range(100_000)}}, 1),
        (CompletionBody, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(100_000)}}, 1),
        (CompletionBody, {"prompt": "x", "stop": [5] * 1_000_000}, 17),
        (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * 1_000_000}, 2),
    ],
    ids=["parts", "messages", "roles", "bias-keys", "bias-values", "stop", "stop-ids"],
)
def test_errors_are_not_collected_without_end(kind: type[Body], body: dict[str, Any], most: int) -> None:
    """Two million of them, for the parts of one conversation, took ten seconds of everybody's time."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= most


def test_a_bias_that_is_too_large_is_refused_in_the_usual_words() -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionBody.model_validate({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}})
    (error,) = refused.value.errors()
    assert error["type"] == "too_long"
    assert error["msg"] == "Dictionary should have at most 1024 items after validation, not 1025"
