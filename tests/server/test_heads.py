"""Heads of requests over real sockets: a bound of size, a bound of time, and trailers that count for nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

pytest.importorskip("httptools", reason="optional package httptools is missing")

from server import heads

Send = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with the headers that it was shown and the length of the body."""
    if scope["type"] != "http":
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    shown = {name.decode(): len(value) for name, value in scope["headers"]}
    body = json.dumps({"headers": shown, "size": size}).encode()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


def served(
    talk: Send, protocol: type[heads.HttpToolsProtocol] = heads.BoundedHeads, app: Callable[..., Any] = echo
) -> bytes:
    async def play() -> bytes:
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", http=protocol)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return await asyncio.wait_for(talk(reader, writer), 60)
        finally:
            writer.close()
            server.should_exit = True
            await serving

    return asyncio.run(play())


def say(*pieces: bytes, pause: float = 0.0) -> Send:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for piece in pieces:
            writer.write(piece)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(pause)
        try:
            return await reader.read(65536)
        except ConnectionError:
            return b"reset"

    return talk


GET = b"GET / HTTP/1.1\r\nHost: a\r\n"


def test_a_head_of_fair_size_passes_and_a_body_in_the_same_piece_does_not_count() -> None:
    body = b"x" * (3 * heads.HEAD_BYTES)
    answer = served(say(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"size": %d' % len(body) in answer


def test_the_end_of_a_head_may_lie_across_two_pieces() -> None:
    body = b"x" * (2 * heads.HEAD_BYTES)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = served(say(head[:-2], head[-2:] + body, pause=0.05))
    assert b'"size": %d' % len(body) in answer


@pytest.mark.parametrize("pieces", [1, 40])
def test_a_head_above_the_bound_is_refused(pieces: int) -> None:
    value = b"a" * (heads.HEAD_BYTES + 100)
    whole = GET + b"X-A: " + value
    step = -(-len(whole) // pieces)
    answer = served(say(*(whole[at : at + step] for at in range(0, len(whole), step))))
    assert answer.startswith(b"HTTP/1.1 431") or answer == b"reset"


def test_a_second_head_on_the_same_connection_is_bounded_too() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(GET + b"\r\n")
        first = await reader.readuntil(b'"size": 0}')
        assert first.startswith(b"HTTP/1.1 200")
        return await say(GET + b"X-A: " + b"a" * (heads.HEAD_BYTES + 100))(reader, writer)

    answer = served(talk)
    assert b" 431 " in answer or answer == b"reset"


def test_half_a_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    assert served(say(GET)).startswith(b"HTTP/1.1 408")
    assert served(say(GET + b"\r\n")).startswith(b"HTTP/1.1 200")


CHUNKED = (
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: Bearer k\r\n\r\n"
)


def test_trailers_are_no_headers() -> None:
    answer = served(say(CHUNKED))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"authorization" not in answer


def test_uvicorn_alone_takes_trailers_for_headers() -> None:
    """Why the class is needed; when this fails, uvicorn does it itself."""
    assert b"authorization" in served(say(CHUNKED), heads.HttpToolsProtocol)


def test_every_request_of_a_pipelining_client_hears_that_it_left() -> None:
    """uvicorn itself tells only the latest; here that one waits in line, and the one that is answered is an earlier one."""
    began, gone = asyncio.Event(), asyncio.Event()

    async def waits(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        began.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /1 HTTP/1.1\r\nhost: a\r\n\r\nGET /2 HTTP/1.1\r\nhost: a\r\n\r\n")
        await began.wait()
        writer.close()
        await gone.wait()
        return b"told"

    assert served(talk, app=waits) == b"told"
