"""Sending to clients that may not read: how long a send may block, what becomes of the client, and what is counted.

The policy: an answer waits in a buffer that merges and never holds more than itself (``server.live``), the socket's buffers
fill, then ``send`` blocks. Blocking costs nobody else anything. A send that blocks for ``timeout`` seconds ends the
connection, and with it the request. While sends block, ``blocked_seconds`` rises.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOTICED = 0.01  # seconds; a shorter send did not wait for its reader

log = structlog.get_logger("lockstep.http")


class ClientLeft(OSError):
    """The connection is closed: nobody is left to be told."""


class SlowReader(ClientLeft):
    """The client did not read for too long and was cut off. For whoever answers it is one that left."""


class Outlet:
    """One per application; used on the event loop. ``timeout`` is in seconds, 0 waits for ever."""

    def __init__(self, timeout: float = 0.0) -> None:
        self.timeout = timeout
        self.dropped = 0  # clients that were cut off
        self.timed_out = 0  # requests that ran longer than they may; counted here since it is about clients, too
        self._blocked: dict[object, float] = {}  # sends on their way -> when they began
        self._seconds = 0.0

    @property
    def blocked(self) -> int:
        """Sends that wait for their reader now."""
        now = time.monotonic()
        return sum(now - began > NOTICED for began in self._blocked.values())

    @property
    def blocked_seconds(self) -> float:
        """All time that sends have waited, including those that still do."""
        now = time.monotonic()
        waiting = [now - began for began in self._blocked.values()]
        return self._seconds + sum(seconds for seconds in waiting if seconds > NOTICED)

    async def send(self, send: Send, message: Message, abort: Callable[[], None] | None) -> None:
        """Raises ``SlowReader`` after the time-out, when the connection has been ended by ``abort``."""
        key = object()
        began = self._blocked[key] = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout or None):
                await send(message)
        except TimeoutError:
            self.dropped += 1
            log.warning("a client does not read and is cut off", seconds=self.timeout)
            if abort is not None:
                abort()
                await asyncio.sleep(0)  # lets the server see that the connection is gone, before the answer ends
            raise SlowReader("the client does not read") from None
        finally:
            del self._blocked[key]
            waited = time.monotonic() - began
            if waited > NOTICED:
                self._seconds += waited


class Abortable:
    """Goes around the application, next to the server: puts into the scope how to end the connection at once. An ordinary
    close would wait for the very bytes that the client does not read."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = getattr(getattr(send, "__self__", None), "transport", None)  # of uvicorn's request cycle
        if scope["type"] != "http" or not isinstance(transport, asyncio.Transport):
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})["abort"] = partial(_reset, transport)

        async def send_if_open(message: Message) -> None:
            try:
                await send(message)
            except RuntimeError as error:  # uvloop's transports raise where asyncio's say nothing
                if not transport.is_closing():
                    raise
                raise ClientLeft(str(error)) from None

        await self.app(scope, receive, send_if_open)


def _reset(transport: asyncio.Transport) -> None:
    """Throws away what was not read, in the system's buffers too."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
