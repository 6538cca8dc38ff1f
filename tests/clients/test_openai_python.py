"""openai (Python), sync and async, without retries, against the real engine on a real socket.

``max_retries=0``, since the client retries 408, 409, 429 and 5xx by default and so hides what went wrong. What the
client parses is typed, so a missing or misnamed field of an answer shows here as it would to a user.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from server.settings import ServerSettings
from tests.clients.checks import Checks
from tests.clients.planted import CHANGING_ID, CHAT_KIND, NO_DATA, NO_FINISH, NO_LOGPROBS, NO_USAGE, SERVER_ERROR, Plant
from tests.clients.served import MODEL, Served, serve, tiny_engine

HELLO: Any = [{"role": "user", "content": "hello world"}]
SEEDED: dict[str, Any] = {"model": MODEL, "seed": 4}


def _client(served: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60} | options)


def _async_client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def models(client: openai.OpenAI, checks: Checks) -> None:
    checks.equal("models", [model.id for model in client.models.list()], [MODEL])
    model = client.models.retrieve(MODEL)
    checks.equal("model", (model.id, model.object, type(model.created)), (MODEL, "model", int))


def chat(client: openai.OpenAI, checks: Checks) -> None:
    plain = client.chat.completions.create(messages=HELLO, max_completion_tokens=12, **SEEDED)
    choice = plain.choices[0]
    checks.equal("object", plain.object, "chat.completion")
    checks.equal("role", (choice.message.role, choice.message.refusal), ("assistant", None))
    checks.true("finish", choice.finish_reason in ("stop", "length"))
    assert plain.usage is not None
    checks.equal("total", plain.usage.total_tokens, plain.usage.prompt_tokens + plain.usage.completion_tokens)
    chunks = list(
        client.chat.completions.create(
            messages=HELLO, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}, **SEEDED
        )
    )
    said = [chunk for chunk in chunks if chunk.choices]
    checks.equal("streamed", "".join(c.choices[0].delta.content or "" for c in said), choice.message.content)
    checks.equal("chunk object", {c.object for c in chunks}, {"chat.completion.chunk"})
    checks.equal("one id", len({(c.id, c.created, c.model) for c in chunks}), 1)
    checks.equal("one role", [c.choices[0].delta.role for c in said], ["assistant", *[None] * (len(said) - 1)])
    ends = [c.choices[0].finish_reason for c in said]
    checks.equal("one finish, last", ends, [*[None] * (len(said) - 1), choice.finish_reason])
    checks.equal("usage comes last, alone", [c.usage is not None for c in chunks], [*[False] * len(said), True])
    assert chunks[-1].usage is not None
    checks.equal("streamed usage", chunks[-1].usage.total_tokens, plain.usage.total_tokens)


def stream_helper(client: openai.OpenAI, checks: Checks) -> None:
    """``.stream()``, which accumulates chunks into a typed answer and raises on what it cannot place."""
    free = client.chat.completions.create(messages=HELLO, max_completion_tokens=20, n=2, **SEEDED)
    asked: Any = {**SEEDED, "n": 2, "stop": _stops([choice.message.content for choice in free.choices])}
    plain = client.chat.completions.create(messages=HELLO, **asked)
    events = []
    with client.chat.completions.stream(messages=HELLO, **asked) as stream:
        events += [event.type for event in stream]
        final = stream.get_final_completion()
    checks.equal("choices", len(final.choices), 2)
    for got, wanted in zip(final.choices, plain.choices, strict=True):
        checks.equal("content", got.message.content, wanted.message.content)
        checks.equal("finish", (got.finish_reason, wanted.finish_reason), ("stop", "stop"))
    checks.equal("content.done", events.count("content.done"), 2)
    checks.true("content.delta", "content.delta" in events)


def _stops(texts: list[str | None]) -> list[str]:
    """Something that each text holds: the helper takes an answer that ends by its length for a failure."""
    return [text[8:12] for text in texts if text is not None]


def completions(client: openai.OpenAI, checks: Checks) -> None:
    plain = client.completions.create(prompt=["hello", "water"], max_tokens=7, n=2, **SEEDED)
    checks.equal("indices", [choice.index for choice in plain.choices], [0, 1, 2, 3])
    checks.equal("object", plain.object, "text_completion")
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(prompt=["hello", "water"], max_tokens=7, n=2, stream=True, **SEEDED):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    checks.equal("streamed", list(texts.values()), [choice.text for choice in plain.choices])
    echoed = client.completions.create(prompt="hello", max_tokens=7, echo=True, **SEEDED)
    checks.equal("echo", echoed.choices[0].text, "hello" + plain.choices[0].text)
    ids = client.completions.create(prompt=[[259, 260, 261], [5, 6]], max_tokens=2, **SEEDED)
    checks.equal("token ids", len(ids.choices), 2)


def logprobs(client: openai.OpenAI, checks: Checks) -> None:
    answer = client.chat.completions.create(
        messages=HELLO, max_completion_tokens=6, logprobs=True, top_logprobs=3, **SEEDED
    )
    table = answer.choices[0].logprobs
    assert table is not None
    assert table.content is not None
    assert answer.usage is not None
    checks.equal("entries", len(table.content), answer.usage.completion_tokens)
    checks.equal("top", {len(entry.top_logprobs) for entry in table.content}, {3})
    checks.true("none above 0", all(entry.logprob <= 0 for entry in table.content))
    said = b"".join(bytes(entry.bytes or ()) for entry in table.content).decode("utf-8", "replace")
    checks.true("bytes", said.startswith((answer.choices[0].message.content or "").rstrip("\ufffd")))
    flat = client.completions.create(prompt="hello", max_tokens=6, logprobs=2, **SEEDED).choices[0].logprobs
    assert flat is not None
    lists = (flat.tokens, flat.token_logprobs, flat.top_logprobs, flat.text_offset)
    checks.equal("parallel lists", {len(one or ()) for one in lists}, {6})
    echo = client.completions.create(prompt="hello world", max_tokens=1, echo=True, logprobs=1, **SEEDED)
    whole = echo.choices[0].logprobs
    assert whole is not None
    values: Any = whole.token_logprobs
    checks.true("the first token of an echo has none", values[0] is None and None not in values[1:])


def stops(client: openai.OpenAI, checks: Checks) -> None:
    free = client.completions.create(prompt="hello", max_tokens=40, **SEEDED).choices[0].text
    stop = free[8:11]
    cut = client.completions.create(prompt="hello", max_tokens=40, stop=[stop], **SEEDED).choices[0]
    checks.equal("text before the stop", cut.text, free[: free.index(stop)])
    checks.equal("finish", cut.finish_reason, "stop")
    parts = list(client.completions.create(prompt="hello", max_tokens=40, stop=stop, stream=True, **SEEDED))
    checks.equal("streamed", "".join(part.choices[0].text for part in parts), cut.text)


def raises(checks: Checks, kind: type[openai.APIError], call: Callable[[], Any], **wanted: Any) -> None:
    try:
        call()
    except openai.APIError as error:
        checks.equal("class", type(error), kind)
        for name, value in wanted.items():
            checks.equal(name, getattr(error, name), value)
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def errors(client: openai.OpenAI, checks: Checks) -> None:
    create = client.completions.create
    raises(checks, openai.NotFoundError, lambda: create(model="gpt-4", prompt="x"), code="model_not_found")
    raises(checks, openai.NotFoundError, lambda: client.models.retrieve("nope"), code="model_not_found")
    for stream in (False, True):
        raises(
            checks,
            openai.BadRequestError,
            lambda stream=stream: create(model=MODEL, prompt="x", temperature=-1, stream=stream),
            param="temperature",
            type="invalid_request_error",
            status_code=400,
        )
    raises(
        checks,
        openai.BadRequestError,
        lambda: create(model=MODEL, prompt=[5] * 513, max_tokens=1),
        code="context_length_exceeded",
    )
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    raises(
        checks,
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=HELLO, tools=[tool]),
        code="unsupported_parameter",
        param="tools",
    )


BEHAVIOURS = (models, chat, stream_helper, completions, logprobs, stops, errors)


async def _async_behaviours(client: openai.AsyncOpenAI, checks: Checks) -> None:
    checks.equal("models", [model.id async for model in client.models.list()], [MODEL])
    prompts = [f"hello {'water ' * k}" for k in range(8)]

    async def plain(prompt: str) -> str:
        return (await client.completions.create(prompt=prompt, max_tokens=10, **SEEDED)).choices[0].text

    async def streamed(prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, max_tokens=10, stream=True, **SEEDED)
        return "".join([chunk.choices[0].text async for chunk in stream])

    together = await asyncio.gather(*map(plain, prompts), *map(streamed, prompts))
    for index, prompt in enumerate(prompts):
        checks.equal("together as alone", together[index], await plain(prompt))
        checks.equal("streamed as plain", together[index + len(prompts)], together[index])
    free = await client.chat.completions.create(messages=HELLO, max_completion_tokens=20, **SEEDED)
    stop = _stops([free.choices[0].message.content])
    async with client.chat.completions.stream(messages=HELLO, stop=stop, **SEEDED) as stream:
        final = await stream.get_final_completion()
    answer = await client.chat.completions.create(messages=HELLO, stop=stop, **SEEDED)
    checks.equal("helper", final.choices[0].message.content, answer.choices[0].message.content)
    try:
        await client.chat.completions.create(model=MODEL, messages=[])
    except openai.BadRequestError as error:
        checks.equal("param", error.param, "messages")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as served:
        yield served


def test_sync(served: Served, record_property: Callable[[str, Any], None]) -> None:
    checks = Checks()
    with served.counted() as calls, _client(served) as client:
        for behaviour in BEHAVIOURS:
            behaviour(client, checks)
    assert calls["/v1/chat/completions", 200] >= 6
    assert calls["/v1/completions", 200] >= 8
    record_property("told", f"openai (Python, sync): {calls.total()} calls, {checks.held} checks held")


def test_async(served: Served, record_property: Callable[[str, Any], None]) -> None:
    checks = Checks()

    async def run() -> None:
        async with _async_client(served) as client:
            await _async_behaviours(client, checks)

    with served.counted() as calls:
        asyncio.run(run())
    assert calls["/v1/completions", 200] == 24
    record_property("told", f"openai (Python, async): {calls.total()} calls, {checks.held} checks held")


def test_early_close_frees_the_request() -> None:
    """A closed stream, a broken-off helper, a cancelled task: each request is aborted, none of its blocks stays."""
    endless: dict[str, Any] = {**SEEDED, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}  # seconds long
    with serve(tiny_engine(context=8192, num_kv_blocks=1100)) as served:
        with _client(served) as client:
            stream = client.completions.create(prompt="hello", stream=True, **endless)
            next(stream)
            stream.close()
            served.wait_idle()
            with client.chat.completions.stream(messages=HELLO, **endless) as helper:
                next(iter(helper))
            served.wait_idle()

        async def cancelled() -> None:
            async with _async_client(served) as client:
                task = asyncio.create_task(client.completions.create(prompt="hello", **endless))
                deadline = time.monotonic() + 30
                while not served.bridge.num_open and time.monotonic() < deadline:  # noqa: ASYNC110 - the server's thread
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait({task})

        asyncio.run(cancelled())
        served.wait_idle()
        assert served.engine.counters.finished == {"abort": 3}


def test_the_class_of_each_refusal(served: Served, record_property: Callable[[str, Any], None]) -> None:
    """401, 413, 429 and 503 as the client's own exceptions, and a port on which nobody listens."""
    checks = Checks()
    settings = ServerSettings(served_model_name=(MODEL,), log_level="error", api_keys=("k",), max_body_bytes=1024)
    with serve(tiny_engine(max_num_seqs=1, max_waiting=1), settings) as closed:
        with _client(closed) as stranger:
            raises(checks, openai.AuthenticationError, stranger.models.list, code="invalid_api_key")
        with _client(closed, api_key="k") as client:
            create = client.completions.create
            raises(checks, openai.APIStatusError, lambda: create(model=MODEL, prompt="x" * 1025), code="body_too_large")
            long: dict[str, Any] = {"model": MODEL, "prompt": "x", "stream": True, "extra_body": {"ignore_eos": True}}
            with create(max_tokens=500, **long) as running:
                next(running)
                with create(max_tokens=500, **long):
                    raises(checks, openai.RateLimitError, lambda: create(model=MODEL, prompt="x"), code="queue_full")
            closed.wait_idle()
            asyncio.run_coroutine_threadsafe(closed.bridge.drain(0.0), _loop_of(closed)).result(30)
            raises(checks, openai.InternalServerError, lambda: create(model=MODEL, prompt="x"), status_code=503)
        url = closed.url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as nobody:
        raises(checks, openai.APIConnectionError, nobody.models.list)
    record_property("told", f"openai (Python, refusals): {len(closed.calls)} calls, {checks.held} checks held")


def _loop_of(served: Served) -> asyncio.AbstractEventLoop:
    loop = served.bridge._loop
    assert loop is not None
    return loop


@pytest.mark.parametrize(
    ("plant", "behaviour"),
    [
        (CHAT_KIND, chat),
        (CHANGING_ID, chat),
        (NO_FINISH, chat),
        (NO_USAGE, chat),
        (NO_DATA, stream_helper),
        (NO_DATA, completions),
        (NO_LOGPROBS, logprobs),
        (SERVER_ERROR, errors),
    ],
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
def test_a_wrong_shape_is_seen(plant: Plant, behaviour: Callable[[openai.OpenAI, Checks], None]) -> None:
    """One thing of the answer is spoilt between application and socket; the checks above must fail."""
    with (
        serve(between=plant) as served,
        _client(served) as client,
        pytest.raises((AssertionError, openai.OpenAIError)),
    ):
        behaviour(client, Checks())
