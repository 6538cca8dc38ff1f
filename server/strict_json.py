"""JSON as the standard has it: no NaN, no Infinity, either way; and a route class that reads bodies so.

Python's json module accepts and writes ``NaN`` and ``Infinity``, which other languages refuse. Answers are ASCII, since
some clients split events at every Unicode line separator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

_encode = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False
).encode  # made once: an event per token comes through here


def dumps(value: Any) -> bytes:
    """Compact ASCII JSON. Raises ``ValueError`` on a number that JSON cannot hold."""
    return _encode(value).encode("ascii")


def loads(body: bytes) -> Any:
    """Raises ``json.JSONDecodeError`` for whatever is wrong with the text, its depth or its numbers."""
    try:
        return json.loads(body, parse_constant=_no_constant)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except UnicodeDecodeError:
        raise json.JSONDecodeError("the text is not UTF-8", "", 0) from None
    except ValueError as error:  # NaN and friends, and integers of thousands of digits
        raise json.JSONDecodeError(str(error) if "JSON" in str(error) else "a number is too long", "", 0) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = loads(await self.body())
        return self._json


class JsonRoute(APIRoute):
    """A POST route whose body must be JSON by its content type (415) and by its text (400)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            from server.errors import ApiError

            content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
            kind, _, subtype = content_type.partition("/")
            if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
                raise ApiError(
                    415,
                    f"the content type is {content_type[:100]!r}, but must be application/json",
                    code="unsupported_media_type",
                )
            return await handle(_StrictRequest(request.scope, request.receive))

        return handler
