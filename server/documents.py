"""Pieces of the OpenAPI document that several endpoints share."""

from __future__ import annotations

from typing import Any

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _error(why: str) -> dict[str, Any]:
    return {"description": why, "content": {"application/json": {"schema": _ERROR}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error("The request can never be served; the message names the field."),
    401: _error("A key is needed."),
    404: _error("The model is not served here."),
    413: _error("The body is too large."),
    415: _error("The body is not JSON."),
    422: _error("Never sent; a body that does not fit is a 400."),
    429: _error("The queue is full; Retry-After says when to try again."),
    500: _error("The engine failed on this request."),
    504: _error("The request ran longer than this server allows."),
    503: _error("Loading, shutting down, or stopped."),
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events that end with `data: [DONE]`.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {},
        },
    },
    **ERRORS,
}
