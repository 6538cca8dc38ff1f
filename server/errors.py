"""Every refusal and failure as OpenAI's error object, bounded in size, with a status that says whose fault it is.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Whatever a client sent, the message is short: ``server.shown`` bounds a value, ``server.findings`` the findings of a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from engine.request import InvalidRequest
from server.findings import told
from server.shown import MAX_INPUT, shorten
from server.strict_json import dumps

MAX_MESSAGE = 2000
RETRY_AFTER = "1"

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}
_CODE_OF_REASON = dict.fromkeys(("max_model_len", "pool"), "context_length_exceeded")

log = structlog.get_logger("lockstep.errors")


class ApiError(HTTPException):
    """A response with OpenAI's error object. ``code`` is a stable word for programs, ``param`` the field to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if status in (429, 503):
            headers = {"Retry-After": RETRY_AFTER, **(headers or {})}
        super().__init__(status, detail=message, headers=dict(headers or {}))
        self.message = shorten(message, MAX_MESSAGE)
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The error object, also used as an event after the first byte of a stream."""
        kind = _TYPE_OF_STATUS.get(
            self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(
            dumps(self.body()), status_code=self.status_code, media_type="application/json", headers=self.headers
        )


def of_invalid(error: InvalidRequest, names: Mapping[str, str] | None = None) -> ApiError:
    """The engine's refusal as a response. ``names`` maps the engine's field names to those of the endpoint."""
    if error.code == "queue_full":
        return ApiError(429, f"{error}; try again later", code="queue_full")
    param = (names or {}).get(error.param, error.param) or None
    message = str(error)
    if param and message.startswith(f"{error.param} "):
        message = param + message.removeprefix(error.param)
    return ApiError(400, message, code=_CODE_OF_REASON.get(error.code, error.code), param=param)


def of_exception(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Any exception as a response; what was not foreseen is logged and says nothing about the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return of_invalid(error, names)
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "the server failed on this request", code="internal_error")


def of_validation(errors: Sequence[Any]) -> ApiError:
    """pydantic's findings as a response."""
    message, param = told(errors)
    return ApiError(400, message, code="invalid_value", param=param)


def install(app: FastAPI) -> None:
    """Makes every error of the app, also those of the router, an error object."""

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return error.response()
        status = error.status_code
        message = str(error.detail)
        if status == 404:
            message = f"there is no {shorten(request.url.path, MAX_INPUT)}"
        elif status == 405:
            message = f"{request.method} is not allowed on {shorten(request.url.path, MAX_INPUT)}"
        headers = dict(error.headers or {})
        return ApiError(status, message, code=_CODE_OF_STATUS.get(status), headers=headers).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, Exception)
        return of_exception(error).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(InvalidRequest, on_invalid)
