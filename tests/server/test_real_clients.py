"""A real uvicorn on loopback and the openai client, without retries: they hide what goes wrong.

Also where the scripted client of the other tests is checked against the truth: the ASGI version that this uvicorn
speaks is one of those they play, and a client that really closes its socket frees its request.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import openai
import pytest
import uvicorn

from engine.engine import Engine
from engine.loading.synthetic import synthetic_model
from server.app import create_app
from server.bridge import Bridge
from server.settings import ServerSettings
from server.sockets import bind
from tests.server.stub import StubRunner, stub_engine
from tests.server.world import SPECS, parse_events

TOKENIZER = synthetic_model().tokenizer
assert TOKENIZER is not None
BYE = TOKENIZER.encode("bye", add_special_tokens=False)
ANSWER = (*TOKENIZER.encode("AB", add_special_tokens=False), 2)


class SlowRunner(StubRunner):
    """Takes a millisecond a step, so that there is time to leave. Answers "bye" with "AB" and end-of-sequence."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: ANSWER if set(BYE) <= set(prompt) and len(prompt) < 30 and 1 in prompt else ())

    def execute(self, plan: Any) -> Any:
        time.sleep(0.001)
        return super().execute(plan)


@attrs.frozen
class Served:
    url: str
    port: int
    engine: Engine
    bridge: Bridge
    seen_specs: set[str]

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 30
        while (self.bridge.num_open or self.engine.has_work) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not self.engine.has_work
        assert self.engine.audit() == []
        assert not any(self.engine.ledger().references)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = stub_engine(
        SlowRunner(), num_blocks=2048, max_num_seqs=8, max_model_len=2000, captures=((8, 500),), max_waiting=256
    )
    app = create_app(engine, ServerSettings(served_model_name=("tiny",), log_level="error"))
    specs: set[str] = set()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            specs.add(scope["asgi"]["spec_version"])
        await app(scope, receive, send)

    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(watched, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    port = sock.getsockname()[1]
    bridge = app.state.context.bridge
    deadline = time.monotonic() + 10
    while not (server.started and bridge.refusal() is None) and time.monotonic() < deadline:
        time.sleep(0.005)
    yield Served(f"http://127.0.0.1:{port}", port, engine, bridge, specs)
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_the_scripted_client_plays_this_servers_asgi_version(served: Served, client: openai.OpenAI) -> None:
    client.models.list()
    assert served.seen_specs
    assert served.seen_specs <= set(SPECS)


def test_openai_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    plain = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, seed=4, logprobs=True
    )
    assert plain.choices[0].message.role == "assistant"
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 9
    assert plain.choices[0].logprobs is not None
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_completion_tokens=9,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == plain.usage.total_tokens  # the second may find more in the prefix cache
    with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "bye"}]) as helper:
        final = helper.get_final_completion()
    assert final.choices[0].message.content == "AB"
    assert final.choices[0].finish_reason == "stop"


def test_openai_completions(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt=["hello", "water"], max_tokens=7, seed=4, n=2, logprobs=2)
    assert len(plain.choices) == 4
    chunks = list(client.completions.create(model="tiny", prompt="hello", max_tokens=7, seed=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_openai_raises_on_an_error_in_the_stream(served: Served, client: openai.OpenAI) -> None:
    """B115."""
    runner: Any = served.engine.runner
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    runner.fail_requests = set(served.bridge._live)
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    runner.fail_requests = set()
    assert client.completions.create(model="tiny", prompt="x", max_tokens=3).usage
    served.wait_idle()


def send(served: Served, body: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return sock


LONG = b'{"prompt":"hello","max_tokens":1900,"ignore_eos":true,"stream":%s}'


@pytest.mark.parametrize("stream", [b"true", b"false"], ids=["stream", "plain"])
def test_closing_the_socket_frees_the_request(served: Served, stream: bytes) -> None:
    """B030, B033: many at once, queued ones among them, closed without reading to the end."""
    before = served.engine.counters.finished["abort"]
    socks = [send(served, LONG % stream) for _ in range(24)]
    deadline = time.monotonic() + 10
    while served.bridge.num_open < 24 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert served.bridge.num_open == 24
    if stream == b"true":
        assert b"200 OK" in socks[0].recv(4000)
    for sock in socks:
        sock.close()
    served.wait_idle()
    assert served.engine.counters.finished["abort"] == before + 24


def test_many_streams_none_closed(served: Served) -> None:
    """B034: nobody is cut off who did not leave; every stream ends with [DONE]."""
    before = served.engine.counters.finished["abort"]
    body = b'{"prompt":"hello","max_tokens":20,"ignore_eos":true,"stream":true,"temperature":0}'
    answers: list[bytes] = []

    def one() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answers.append(connection.getresponse().read())
        connection.close()

    threads = [threading.Thread(target=one) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    texts = set()
    for answer in answers:
        events = parse_events(answer)
        assert events[-1] == "[DONE]"
        texts.add("".join(event["choices"][0]["text"] for event in events[:-1]))
    assert len(answers) == 60
    assert len(texts) == 1
    assert served.engine.counters.finished["abort"] == before
    served.wait_idle()


def test_keep_alive_serves_the_next_request(served: Served) -> None:
    """The watcher of the first answer must not eat the second request of the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    for stream in ("true", "false", "true", "false"):
        body = '{"prompt":"hello","max_tokens":3,"stream":%s}' % stream  # noqa: UP031
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        response.read()
    connection.close()
