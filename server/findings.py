"""What pydantic found in a body, in the words of every other refusal: the field, what stood there, what is allowed.

One body can hold thousands of wrong values, so what is repeated from it has a limit: entries, characters of input, and
characters of the whole message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.schemas import ALLOWED, KEYED
from server.shown import MAX_INPUT, brief, shorten

MAX_ENTRIES = 10

_BRANCHES = frozenset({"str", "int", "float", "bool"})  # what pydantic calls the alternatives of a union
_KEY = "[key]"  # what it puts behind a key that is wrong itself
_OBJECT = dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object")
_TYPES = {
    **_OBJECT,
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
}
_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
}
_SIZES = {
    "too_short": ("at least", "min_length", "entry", "entries"),
    "too_long": ("at most", "max_length", "entry", "entries"),
    "string_too_short": ("at least", "min_length", "character", "characters"),
    "string_too_long": ("at most", "max_length", "character", "characters"),
}


def told(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One message, and the first field to blame. Of a union, the finding that lies deepest says most."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    more = False
    for entry in errors:
        field = _field(entry.get("loc", ()))
        if len(found) == MAX_ENTRIES and field not in found:
            more = True
            break
        if parent := field.rpartition("[")[0]:
            found.pop(parent, None)  # "must be text" about a list whose entry is wrong
        found.setdefault(field, []).append(entry)
    lines = [_line(field, entries) for field, entries in found.items()]
    message = "; ".join([*lines, "and more"] if more else lines)
    return message or "the body is not valid", next(iter(found), None) or None


def _field(loc: Sequence[Any]) -> str:
    """``("body", "messages", 0, "content", "list[...]", 1)`` as ``messages[0].content[1]``, without union branches."""
    path, before = "", None
    for part in loc[1:] if loc and loc[0] == "body" else loc:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""
        elif before in KEYED:
            path += f".{part if str(part).isalnum() else repr(part)}"
        elif isinstance(part, str) and part.isidentifier() and part not in _BRANCHES:
            path += f".{part}" if path else part
        before = part
    return shorten(path, MAX_INPUT)


def _line(field: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """The findings of one field: that it is of none of several types, or what is wrong with it as one of them."""
    entry = next((one for one in entries if one.get("type") not in _TYPES), entries[0])
    kind, given, context = str(entry.get("type")), entry.get("input"), entry.get("ctx") or {}
    if kind == "json_invalid":
        why = context.get("error", "")
        return f"the body is not valid JSON{f': {why}' if why else ''}"
    if not field and (kind == "missing" or kind in _OBJECT):
        return "the body must be a JSON object"
    if kind == "missing":
        return f"{field} is required"
    name = field or "the body"
    if kind in _SIZES:
        return f"{name} {_size(kind, given, context)}"
    if kind in _TYPES:
        allowed = " or ".join(dict.fromkeys(_TYPES[str(one.get("type"))] for one in entries))
    elif kind in _BOUNDS:
        allowed = _BOUNDS[kind].format_map({name: _plain(value) for name, value in context.items()})
    elif kind == "string_pattern_mismatch":
        allowed = ALLOWED.get(context["pattern"], f"text that matches {context['pattern']}")
    elif kind == "literal_error":
        allowed = ALLOWED.get(context["expected"], context["expected"])
    else:
        message = str(entry.get("msg", "is not valid")).removeprefix("Value error, ")
        return f"{name} is {brief(given)}: {shorten(message, 2 * MAX_INPUT)}"
    if entry.get("loc", ())[-1:] == (_KEY,):
        return f"{_field(entry['loc'][:-2])} has the key {brief(given)}, but each key must be {allowed}"
    return f"{name} is {brief(given)}, but must be {allowed}"


def _plain(bound: Any) -> Any:
    """2 for 2.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _size(kind: str, given: Any, context: Mapping[str, Any]) -> str:
    """``has 17 entries, but at most 16 are allowed``. Where pydantic stopped counting, the value itself knows."""
    bound, name, one, many = _SIZES[kind]
    limit, size = context[name], len(given) if hasattr(given, "__len__") else context.get("actual_length")
    unit = one if size == 1 else many
    verb = "is" if limit == 1 else "are"
    return f"has {size} {unit}, but {bound} {limit} {verb} {'needed' if bound == 'at least' else 'allowed'}"
