"""JSON as the standard has it: no NaN, no Infinity, either way; and a route class that reads bodies so.

Python's json module accepts and writes ``NaN`` and ``Infinity``, which other languages refuse, and reads half of a surrogate
pair, which is no character and can be neither tokenised nor written. Answers are ASCII, since some clients split events at every
Unicode line separator.

Its parser also holds the interpreter's lock from the first byte to the last, and what it makes has to be looked at by the
collector of garbage: megabytes of ``[],`` take a second in which no other client is served. So a body may hold only so many
strings, arrays and objects; and a large one is read on a worker thread, which gives up the lock at every number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from server.shown import MAX_INPUT, brief, shorten

if TYPE_CHECKING:
    from server.prompts import Desk

MAX_VALUES = 2**17  # strings, arrays and objects of a body; names are strings, too. Its schemas allow for half as many
LARGE = 2**18  # bytes of a body that is read on a worker thread

_PERHAPS_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # of a surrogate pair, spelled out or as it is
_HALF = re.compile(r"[\ud800-\udfff]")

_encode = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False
).encode  # made once: an event per token comes through here


def dumps(value: Any) -> bytes:
    """Compact ASCII JSON. Raises ``ValueError`` on a number that JSON cannot hold."""
    return _encode(value).encode("ascii")


def loads(body: bytes, *, yielding: bool = False) -> Any:
    """Raises ``json.JSONDecodeError`` for whatever is wrong with the text, its depth or its numbers, and ``ApiError`` for more
    than ``MAX_VALUES`` and for text with half of a surrogate pair. ``yielding``: other threads run meanwhile, wherever numbers
    are many; takes twice as long."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        _count_values(text)
        if yielding:  # calls of Python functions are where a thread gives up the interpreter's lock
            value = json.loads(text, parse_constant=_no_constant, parse_int=_integer, parse_float=_number)
        else:
            value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except UnicodeDecodeError:
        raise json.JSONDecodeError("the text is not UTF-8", "", 0) from None
    except ValueError as error:  # NaN and friends, and integers of thousands of digits
        raise json.JSONDecodeError(str(error) if "JSON" in str(error) else "a number is too long", "", 0) from None
    if _PERHAPS_HALF.search(text):
        _refuse_halves(value)
    return value


def _refuse_halves(value: Any) -> None:
    """Raises ``ApiError`` for the first text, or name, that holds half of a surrogate pair; a whole one is a character."""
    rest: list[tuple[str, Any]] = [("", value)]
    while rest:
        path, value = rest.pop()
        path = shorten(path, MAX_INPUT)  # one name may be as long as the body, and stand before every entry
        if isinstance(value, str):
            _refuse_half(path or "the body", value, path)
        elif isinstance(value, list):
            rest += [(f"{path}[{at}]", value[at]) for at in reversed(range(len(value)))]
        elif isinstance(value, dict):
            for name in value:
                _refuse_half(f"a name in {path or 'the body'}", name, path)
            rest += [(f"{path}.{name}" if path else name, value[name]) for name in reversed(value)]


def _refuse_half(what: str, text: str, param: str) -> None:
    if (half := _HALF.search(text)) is None:
        return
    from server.errors import ApiError

    why = f"{half[0]!r} at character {half.start()} is half of a surrogate pair"
    message = f"{what} is {brief(text)}, but must be Unicode text: {why}"
    raise ApiError(400, message, code="invalid_value", param=param or None)


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
