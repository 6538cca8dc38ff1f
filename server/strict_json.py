"""JSON as the standard has it: no NaN, no Infinity, either way; and a route class that reads bodies so.

Python's json module accepts and writes ``NaN`` and ``Infinity``, which other languages refuse. Answers are ASCII, since
some clients split events at every Unicode line separator.

Its parser also holds the interpreter's lock from the first byte to the last, and what it makes has to be looked at by the
collector of garbage: megabytes of ``[],`` take a second in which no other client is served. So a body may hold only so many
strings, arrays and objects; and a large one is read on a worker thread, which gives up the lock at every number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from server.prompts import Desk

MAX_VALUES = 2**17  # strings, arrays and objects of a body; names are strings, too. Its schemas allow for half as many
LARGE = 2**18  # bytes of a body that is read on a worker thread

_encode = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False
).encode  # made once: an event per token comes through here


def dumps(value: Any) -> bytes:
    """Compact ASCII JSON. Raises ``ValueError`` on a number that JSON cannot hold."""
    return _encode(value).encode("ascii")


def loads(body: bytes, *, yielding: bool = False) -> Any:
    """Raises ``json.JSONDecodeError`` for whatever is wrong with the text, its depth or its numbers, and ``ApiError`` for more
    than ``MAX_VALUES``. ``yielding``: other threads run meanwhile, wherever numbers are many; takes twice as long."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        _count_values(text)
        if yielding:  # calls of Python functions are where a thread gives up the interpreter's lock
            return json.loads(text, parse_constant=_no_constant, parse_int=_integer, parse_float=_number)
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except UnicodeDecodeError:
        raise json.JSONDecodeError("the text is not UTF-8", "", 0) from None
    except ValueError as error:  # NaN and friends, and integers of thousands of digits
        raise json.JSONDecodeError(str(error) if "JSON" in str(error) else "a number is too long", "", 0) from None


def _count_values(text: str) -> None:
    """Exact where it refuses: brackets inside of strings do not count. A few passes at the speed of memory."""
    if text.count('"') // 2 + text.count("[") + text.count("{") <= MAX_VALUES:
        return
    if "\\" in text:  # what escapes the end of a string can stand in one alone
        text = text.replace("\\\\", "").replace('\\"', "")
    values = text.count('"') // 2
    if values <= MAX_VALUES:
        outside = "".join(text.split('"')[::2])
        values += outside.count("[") + outside.count("{")
    if values > MAX_VALUES:
        from server.errors import ApiError

        raise ApiError(
            400,
            f"the body holds more than {MAX_VALUES} strings, arrays and objects",
            code="body_too_complex",
        )


def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) > LARGE:
                desk: Desk = self.app.state.context.desk
                self._json = await desk.run(partial(loads, yielding=True), body, size=len(body))
            else:
                self._json = loads(body)
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
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity"):
                raise ApiError(
                    415,
                    f"the content encoding is {encoding[:100]!r}, but bodies must come as they are",
                    code="unsupported_media_type",
                    headers={"Accept-Encoding": "identity"},
                )
            return await handle(_StrictRequest(request.scope, request.receive))

        return handler
