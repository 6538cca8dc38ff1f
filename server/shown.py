"""Values that a client sent, as a message repeats them: short, in JSON's words, and never rendered whole first."""

from __future__ import annotations

from typing import Any

MAX_INPUT = 200  # characters of a value or a field's path
_WORDS = {None: "null", True: "true", False: "false"}


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def brief(value: Any) -> str:
    """A value for a message: short, whatever it was. Does not render a large value first."""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_INPUT else f"{value[:40]!r}... ({len(value)} characters)"
    if isinstance(value, (list, dict)):
        entries = f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
        return f"{'a list' if isinstance(value, list) else 'an object'} of {entries}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer of more than 30 digits"
    return shorten(repr(value), MAX_INPUT)
