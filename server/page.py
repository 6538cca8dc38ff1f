"""GET / and what it loads: the server's own page, and GET /live, which feeds it.

The files are read once, when this module is imported, and named here one by one: no path of a request leads to the disk.
The page holds no data and needs no key; what it asks for afterwards does. Its content security policy allows nothing but
this server, and no inline script, so whatever a model says stays text.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Send

from server.answer import Answer, send_events
from server.context import context_of

_STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_SCRIPTS = ("main.js", "stream.js", "playground.js", "engine.js", "grid.js", "charts.js", "workload.js", "dom.js")

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@attrs.frozen
class StaticFile:
    data: bytes = attrs.field(repr=False)
    media_type: str
    etag: str

    @classmethod
    def read(cls, name: str) -> StaticFile:
        data = (_STATIC / name).read_bytes()
        return cls(data, _KINDS[Path(name).suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')


FILES = {
    "/": StaticFile.read("index.html"),
    **{f"/static/{name}": StaticFile.read(name) for name in ("page.css", *_SCRIPTS)},
}

router = APIRouter(include_in_schema=False)  # the page's own; an endless stream is nothing for generated clients


async def static(request: Request) -> Response:
    found = FILES[request.scope["path"].removeprefix(request.scope.get("root_path", ""))]
    headers = {**_HEADERS, "ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.media_type, headers=headers)


for _path in FILES:
    router.add_api_route(_path, static, methods=["GET", "HEAD"], response_class=Response)


@router.get("/live", response_class=Response)
async def live(request: Request) -> Response:
    """Server-sent events about blocks, rows, queue and latencies: see server/live_view.py. Ends when the bridge drains."""
    context = context_of(request)

    async def work(send: Send) -> None:
        if (refusal := context.bridge.refusal()) is not None:
            raise refusal
        with context.live.watching(context.bridge):
            await send_events(send, context.live.frames(context.settings.ping_interval))

    return Answer(work)
