"""The front door in plain ASGI, outside FastAPI: request id, name, key, body size, access log.

Plain ASGI, because a middleware that wraps requests and responses in tasks of its own hides the client's leaving from
the handler and costs a copy per event. The whole body is read here, so that its size is judged by the bytes that
really came.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import tracing
from server.errors import ApiError, of_exception
from server.fields import IGNORED_HEADER, in_header
from server.hosts import Hosts, allowed
from server.logs import printable
from server.outlet import ClientLeft, Outlet
from server.page import FILES
from server.settings import ServerSettings
from server.tracing import RequestSpan, Tracing

# Answered without a key. A browser cannot send one for the page itself, which holds no data; what it asks for needs one.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", *FILES})
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}  # probes: logged at debug only
_READ_ON = 8  # times the limit: so much of a body that is too large is read before it is refused
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log = structlog.get_logger("lockstep.http")


class _ClientGone(Exception):
    """The client left while it was still sending the body."""


class FrontDoor:
    """Wraps the application. Anything that is not HTTP (the lifespan) passes through."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        outlet: Outlet | None = None,
        tracing: Tracing | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.app = app
        self._hosts = hosts or allowed(settings.allowed_hosts)
        self._tracing = tracing
        self.outlet = outlet or Outlet(settings.send_timeout)
        self.max_body_bytes = settings.max_body_bytes
        self._keys = settings.api_keys
        self._admin_keys = settings.admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = clean_id(headers.get("x-request-id"))
        started = time.perf_counter()
        status = 0
        whole = False
        abort = scope.get("state", {}).get("abort")

        async def tagged(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                more = MutableHeaders(scope=message)
                more["X-Request-Id"] = request_id
                if ignored := scope["state"]["ignored"]:
                    more[IGNORED_HEADER] = in_header(ignored)
            await self.outlet.send(send, message, abort)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        scope.setdefault("state", {}).update(request_id=request_id, ignored={})  # see server.fields
        span = self._begin(scope, headers, request_id)
        ids = {"request_id": request_id} | ({} if span is None else {"trace_id": span.trace_id})
        with structlog.contextvars.bound_contextvars(**ids):
            try:
                await self._answer(scope, headers, receive, tagged)
            except (_ClientGone, ClientLeft):
                status = 499
            except Exception as error:  # noqa: BLE001 - an error object even for what nobody foresaw
                answer = of_exception(error)
                if not status:
                    await answer.response()(scope, receive, tagged)
            finally:
                status = status if whole else 499  # the client was gone before the end
                if span is not None:
                    tracing.current.set(None)
                    span.end(status, getattr(scope.get("route"), "path", None))
                write = log.debug if scope["path"] in _QUIET_PATHS else log.info
                write(
                    "request",
                    method=scope["method"],
                    path=printable(scope["path"][:200]),
                    status=status,
                    seconds=round(time.perf_counter() - started, 4),
                )

    def _begin(self, scope: Scope, headers: Headers, request_id: str) -> RequestSpan | None:
        if self._tracing is None or scope["path"] in _QUIET_PATHS:
            return None
        span = self._tracing.begin(scope["method"], printable(scope["path"]), headers, request_id)
        tracing.current.set(span)
        return span

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            self._check_host(scope, headers)
            self._check_key(scope, headers)
            body = await self._read(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope["state"]["body_bytes"] = len(body)
        replayed = False

        async def again() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        why = self._hosts.refusal(headers.getlist("host"), (scope.get("server") or (None,))[0])
        if why is not None:
            raise ApiError(400, why, code="host_not_allowed")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        admin = _has_key(headers, self._admin_keys)
        trusted = not self._keys or admin or _has_key(headers, self._keys)
        scope["state"]["admin"] = admin
        scope["state"]["trusted"] = trusted  # open paths say less to strangers
        debug = scope["path"].startswith("/debug/")
        if debug and not self._admin_keys:
            raise ApiError(404, "there is no such path", code="not_found")
        if not (admin if debug else trusted or scope["path"] in OPEN_PATHS):
            raise ApiError(
                401,
                "a valid key is needed, as in 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """The body, judged by its announced length and by the bytes that arrive."""
        announced = headers.get("content-length", "")
        too_large = announced.isdecimal() and len(announced) < 20 and int(announced) > self.max_body_bytes
        parts: list[bytes] = []
        size = 0
        more = True
        while more and size <= _READ_ON * self.max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            size += len(message.get("body", b""))
            too_large = too_large or size > self.max_body_bytes
            if too_large:  # thrown away: a client that is still sending would never see an answer
                parts.clear()
            else:
                parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        if too_large:
            raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self.max_body_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _has_key(headers: Headers, digests: Sequence[bytes]) -> bool:
    """Keys are told by their bytes: UTF-8, as terminals send them, or Latin-1, as browsers and some HTTP clients do."""
    scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")  # the bytes as they came
    key = key.strip()
    given = [hashlib.sha256(spelled).digest() for spelled in (key, key.decode("latin-1").encode())]
    known = [hmac.compare_digest(one, digest) for one in given for digest in digests]  # all of them, in constant time
    return scheme.lower() == b"bearer" and any(known)


def clean_id(given: str | None) -> str:
    """The client's request id if it is harmless, else a new one. For logs and headers; the engine never sees it."""
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex
