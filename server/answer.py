"""A response that works and watches: as soon as the client leaves, the work is cancelled and the engine told.

Frameworks differ in when a handler learns that its client is gone, from version to version and between streams and
plain answers. So this response does it itself, the same way for both and under every ASGI version: the work races
against ``receive``, which says ``http.disconnect``; a ``send`` that raises ``OSError`` says the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import structlog
from sse_starlette.event import ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, of_exception
from server.live import Delta, Generation
from server.strict_json import dumps

log = structlog.get_logger("lockstep.answer")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx not to collect events
]

_DONE = ServerSentEvent("[DONE]", sep="\n").encode()
_PING = ServerSentEvent(comment="ping", sep="\n").encode()


class Shape(Protocol):
    """How one endpoint writes an answer: in events, or whole."""

    def first(self) -> Iterable[Mapping[str, Any]]:
        """Events before any news."""
        ...

    def events(self, delta: Delta) -> Iterable[Mapping[str, Any]]: ...

    def last(self) -> Iterable[Mapping[str, Any]]:
        """Events after every choice has ended."""
        ...

    def whole(self, deltas: Sequence[Delta]) -> Any:
        """The body of a plain answer; one delta per choice, in order."""
        ...


class Answer(Response):
    """``work(send)`` sends the whole response, or raises before it has begun to."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self.work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched_send(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def work() -> None:
            try:
                await self.work(watched_send)
            except OSError as error:  # ASGI 2.4 and later: the client is gone
                log.debug("send failed", error=str(error))
            except Exception as error:  # noqa: BLE001 - the last stop for whatever this request did
                answer = of_exception(error)
                if not begun:
                    with suppress(OSError):
                        await answer.response()(scope, receive, send)

        await race(work(), receive)


async def race(work: Awaitable[None], receive: Receive) -> None:
    """Runs ``work`` until it ends or the client leaves, whichever is first; then ``work`` is cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        while not task.done():
            task.cancel()  # again and again, should it be swallowed on the way
            await asyncio.wait({task}, timeout=1.0)
    finally:  # nothing is awaited here: this may itself be a cancellation
        task.cancel()
        watcher.cancel()
    if not task.cancelled():
        task.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_whole(send: Send, data: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def frame(event: Mapping[str, Any]) -> bytes:
    """One server-sent event. LF only: many clients split at an empty line and know no CRLF."""
    return b"data: " + dumps(event) + b"\n\n"  # JSON is one line, so there is nothing to split


async def send_events(send: Send, events: AsyncIterator[bytes]) -> None:
    """Streams frames, then ``[DONE]``. An error on the way is an event too; ``[DONE]`` comes last, always."""
    await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
    try:
        async for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - after the first byte, an error can only be an event
        data = frame(of_exception(error).body())
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def frames(shape: Shape, generation: Generation, ping_interval: float) -> AsyncIterator[bytes]:
    """One piece per round of news; a comment when there is none for ``ping_interval`` seconds (0: never)."""
    with _failing(generation):
        if head := b"".join(frame(event) for event in shape.first()):
            yield head
        async for deltas in generation.news(ping_interval or None):
            if not deltas:
                yield _PING
            elif data := b"".join(frame(event) for delta in deltas for event in shape.events(delta)):
                yield data
        if tail := b"".join(frame(event) for event in shape.last()):
            yield tail


@contextmanager
def _failing(generation: Generation) -> Iterator[None]:
    """An answer that cannot be written failed, though the engine did not: metrics and spans are to know."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it was, it ends this answer
        failure = of_exception(error)
        generation.fail(failure)
        raise failure from None


async def reply(send: Send, shape: Shape, generation: Generation, *, stream: bool, ping_interval: float) -> None:
    """Sends a submitted generation, streamed or whole. The caller closes it."""
    if stream:
        await send_events(send, frames(shape, generation, ping_interval))
        return
    with _failing(generation):
        data = dumps(shape.whole(await generation.everything()))
    await send_whole(send, data)


def refuse_stream_options(stream: bool | None, given: object) -> None:
    if given is not None and not stream:
        raise ApiError(400, "stream_options needs stream to be true", code="invalid_value", param="stream_options")
