"""Faults to plant between application and socket, each of which a client's checks must notice.

Every change keeps the number of bytes, so that a plain answer still fits its Content-Length.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@attrs.frozen
class Plant:
    """Rewrites statuses and each piece of each body; ``pieces`` counts those of one answer from 0. ``path``: of this one
    alone. ``hangs``: it never answers."""

    name: str
    body: Callable[[bytes, int], bytes] = lambda data, pieces: data
    status: Callable[[str, int], int] = lambda path, status: status
    path: str | None = None
    hangs: bool = False

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def spoilt(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or self.path not in (None, scope["path"]):
                await app(scope, receive, send)
                return
            if self.hangs:
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            pieces = 0

            async def rewriting(message: Message) -> None:
                nonlocal pieces
                if message["type"] == "http.response.start":
                    message = {**message, "status": self.status(scope["path"], message["status"])}
                elif message["type"] == "http.response.body":
                    data = message.get("body", b"")
                    message = {**message, "body": self.body(data, pieces)}
                    assert len(message["body"]) == len(data)
                    pieces += 1
                await send(message)

            await app(scope, receive, rewriting)

        return spoilt


def _swap(name: str, old: bytes, new: bytes) -> Plant:
    return Plant(name, lambda data, pieces: data.replace(old, new))


CHAT_KIND = _swap("chunk kind", b"chat.completion.chunk", b"text_completion.chunk")
NO_FINISH = _swap("no finish", b'"finish_reason":"length"', b'"finish_reason":null    ')
NO_USAGE = _swap("no usage", b'"usage":', b'"usagx":')
NO_TEXT = _swap("no content", b'"content":', b'"contnt":')
NO_DATA = _swap("no framing", b"data: ", b"dota: ")
NO_LOGPROBS = _swap("no logprobs", b'"token_logprobs":', b'"toxen_logprobs":')
CHANGING_ID = Plant(
    "changing id", lambda data, pieces: re.sub(rb'"id":"(\w+)-..', rb'"id":"\1-%02d' % (pieces % 100), data)
)
SERVER_ERROR = Plant("500 for 400", status=lambda path, status: 500 if status == 400 else status)
