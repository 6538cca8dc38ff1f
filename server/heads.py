"""Request heads with bounds: how large one may be, how long it may take, and that nothing after it counts as a part of it.

httptools, which uvicorn takes when it is installed, collects a head of any size, one copy for each piece that arrives, and
tells the trailers of a chunked body as if they were headers, so that a key or an id could come where no proxy looks for it.
The other parser, h11, has a bound of the same size and keeps trailers apart.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from asyncio import Transport

HEAD_BYTES = 64 * 1024  # request line and headers
HEAD_SECONDS = 20.0
_END = b"\r\n\r\n"


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol; a head over a bound is answered with 431 or 408, and the connection closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = False  # a head has begun, or is due, and has not ended
        self._size = 0
        self._tail = b""
        self._late: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # of pipelined requests there are several

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        for cycle in self._cycles:  # uvicorn tells only the latest
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles = []
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._open:
            seen = self._tail + data  # the end of the head may lie across two pieces
            end = seen.find(_END)
            self._size += len(data) if end < 0 else max(0, end - len(self._tail))
            self._tail = seen[-len(_END) + 1 :]
            if self._size > HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        if self._late is None:
            self._time()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._open:  # what comes later is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()
        latest = [] if self.cycle is None else [self.cycle]  # none: an upgrade was asked for
        self._cycles = [cycle for cycle in (*self._cycles, *latest) if not cycle.response_complete]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect()  # of the next request; how long that may be awaited is uvicorn's own timeout

    def _expect(self) -> None:
        self._open, self._size, self._tail = True, 0, b""

    def _time(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _end(self) -> None:
        self._open, self._tail = False, b""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: HTTPStatus) -> None:
        self._end()
        if not self.transport.is_closing():
            line = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(line.encode("ascii"))
            self.transport.close()
