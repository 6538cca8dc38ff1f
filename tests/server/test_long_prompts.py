"""B147: a long prompt is read beside everything else, and one that is too long is refused before it is read."""

from __future__ import annotations

import threading
import time
from typing import Any

import attrs
import pytest
from starlette.testclient import TestClient

from engine.loading.synthetic import synthetic_model
from engine.loading.tokenizer import LONG_TEXT, WINDOW, Tokenizer
from server.app import create_app
from server.prompts import Reading, read_messages, read_prompts
from server.schemas import Message
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_bodies import assert_error, wait_ready

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def test_a_long_prompt_does_not_freeze_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """B147: tokenising happens beside the event loop; the gaps between health probes stay short."""
    started, release = threading.Event(), threading.Event()

    def slow(reading: Reading, text: str, field: str) -> list[int]:
        if len(text) > 1000:
            started.set()
            release.wait(5)
        return real(reading, text, field)

    real = Reading.tokens
    monkeypatch.setattr(Reading, "tokens", slow)
    with TestClient(create_app(stub_engine())) as client:
        wait_ready(client)
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(client.post(COMPLETIONS, json={"prompt": "x" * 100_000}))
        )
        thread.start()
        assert started.wait(5)
        began = time.monotonic()
        assert client.get("/health").status_code == 200
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        assert time.monotonic() - began < 1
        release.set()
        thread.join(5)
        assert_error(answers[0], 400)


@pytest.mark.parametrize("spelled", ["", "<|im_end|>"])
def test_long_texts_are_tokenised_without_the_interpreter_lock(spelled: str) -> None:
    """B147: the same ids as for short ones, and other threads run meanwhile; the library's plain call stops them."""
    model = synthetic_model()
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text = f"hello \u00e9\U0001f600 {spelled} water " * 20_000
    assert len(text) > 4 * max(LONG_TEXT, WINDOW)
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.002)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    reading = Reading(model, 512, 2**22)
    (long,) = read_prompts(text, "prompt", reading)
    chat = read_messages([Message(role="user", content=text)], attrs.evolve(reading, parse_special=False))
    gap = max(gaps)
    began = time.monotonic()
    ids = tokenizer.backend.encode(text).ids
    plain = time.monotonic() - began
    done.set()
    ticker.join()
    assert list(long.ids) == ids
    assert text.strip() in tokenizer.decode(chat.ids, skip_special_tokens=False)
    assert gap < max(0.2, plain / 2)


def test_text_beyond_the_limit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """B147: all text of a request counts, in bytes, on every endpoint that tokenises."""
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    monkeypatch.setattr(Tokenizer, "encode_guarded", lambda *_: pytest.fail("tokenised"))
    half = "\u00e9" * 26  # 52 bytes
    message = {"role": "user", "content": half}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"prompt": half + half}, "prompt"),
        (COMPLETIONS, {"prompt": [half, half]}, "prompt"),
        ("/v1/chat/completions", {"messages": [message, message]}, "messages"),
        ("/generate", {"text": half + half}, "text"),
        ("/tokenize", {"prompt": half + half}, "prompt"),
        ("/tokenize", {"messages": [message, message]}, "messages"),
    ]
    with TestClient(create_app(stub_engine(), ServerSettings(max_prompt_bytes=103))) as client:
        wait_ready(client)
        for path, body, field in bodies:
            error = assert_error(client.post(path, json=body), 400)
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
            assert "103 bytes" in error["message"]
