"""The OpenAPI document: what endpoints answer, with which statuses, and this server's own limits in place of the widest.

FastAPI writes the document from the types of the bodies. What only a running engine knows is put in here: the names of the
model, the context, the vocabulary. So a client that keeps to the document meets a refusal only where two fields together
ask for too much, and the message then names them.
"""

from __future__ import annotations

import copy
from typing import Any

from engine.control.limits import Limits
from engine.request import MAX_CHOICES, SEED_RANGE
from server.facts import longest
from server.fields import IGNORED_HEADER

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
_WHY = {
    400: "The request can never be served; the message names the field, or the Host that is not answered.",
    401: "A key is needed.",
    404: "The model is not served here.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The engine failed on this request.",
    503: "Loading, shutting down, or stopped; Retry-After says when to try again.",
    504: "The request ran longer than this server allows.",
}

_IGNORED = "Fields of the body that nobody knows here, if there were any: percent-encoded, eight at most, then `...`."

Responses = dict[int | str, dict[str, Any]]


def _errors(*statuses: int) -> Responses:
    schema = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _WHY[status], "content": schema} for status in statuses}


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """The schema of an object: ``required`` names fields of any type, ``properties`` those whose type is told."""
    names = [*required.split(), *properties]
    return {"type": "object", "required": names, "properties": properties}


def answers(schema: dict[str, Any], *statuses: int, stream: bool = False) -> Responses:
    """A 200 with a JSON body of ``schema``, perhaps streamed instead, and the errors that the endpoint may give."""
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    text = "The answer."
    if stream:
        content["text/event-stream"] = {"schema": fields(data={"type": "string"})}  # of each event
        text = "The answer; with `stream`, server-sent events that end with `data: [DONE]`."
    good: dict[str, Any] = {"description": text, "content": content}
    if 415 in statuses:  # it has a body
        good["headers"] = {IGNORED_HEADER: {"description": _IGNORED, "schema": {"type": "string"}}}
    return {200: good, **_errors(*statuses)}


LOOK = (400, 401, 413, 500, 503)  # what every GET may answer instead
READ = (400, 401, 404, 413, 415, 500, 503)  # a POST that asks the tokenizer only
WORK = (*READ, 429, 504)  # a POST that the engine works for

COUNT = {"type": "integer", "minimum": 0}
_USAGE = fields(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)


def _openai(kind: str, **choice: Any) -> dict[str, Any]:
    reason = {"enum": ["stop", "length"]}
    choices = {"type": "array", "minItems": 1, "items": fields("logprobs", index=COUNT, finish_reason=reason, **choice)}
    text = {"type": "string"}
    return fields("created", id=text, model=text, object={"const": kind}, choices=choices, usage=_USAGE)


COMPLETION = answers(_openai("text_completion", text={"type": "string"}), *WORK, stream=True)
CHAT = answers(
    _openai("chat.completion", message=fields("refusal", role={"const": "assistant"}, content={"type": "string"})),
    *WORK,
    stream=True,
)
_RESULT = fields(
    text={"type": "string"},
    output_ids={"type": "array", "items": COUNT},
    meta_info=fields("id finish_reason seed", prompt_tokens=COUNT, completion_tokens=COUNT),
)
GENERATE = answers({"anyOf": [_RESULT, {"type": "array", "items": _RESULT}]}, *WORK, stream=True)
ANY_OBJECT = answers({"type": "object"}, *LOOK)

_EXACT = {2.0**63: SEED_RANGE[1], -(2.0**63): SEED_RANGE[0]}
_LENGTHS = ("max_tokens", "min_tokens", "max_completion_tokens", "max_new_tokens", "min_new_tokens")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def describe(generic: dict[str, Any], names: tuple[str, ...], limits: Limits | None) -> dict[str, Any]:
    """``generic`` as FastAPI makes it, with ``names`` of the model and, once there is an engine, its ``limits``."""
    document = copy.deepcopy(generic)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # FastAPI's own; a body that does not fit is a 400 here
    _walk(document)
    if limits is not None:
        for schema in document["components"]["schemas"].values():
            _tighten(schema.get("properties", {}), names, limits)
    return document


def _walk(node: Any) -> None:
    """Whole numbers as such: FastAPI makes floats of bounds, and the largest 64-bit integer then is none."""
    if isinstance(node, dict):
        for key in _BOUNDS:
            value = node.get(key)
            if isinstance(value, float) and value.is_integer():
                node[key] = _EXACT.get(value, int(value))
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _walk(child)


def _tighten(properties: dict[str, Any], names: tuple[str, ...], limits: Limits) -> None:
    last = {"maximum": limits.vocab_size - 1}
    most = max(1, longest(limits) - 1)  # of a prompt, whose answer has at least one token; and the other way round
    changes: dict[str, dict[str, Any]] = {
        "model": {"enum": list(names)},
        "n": {"maximum": min(MAX_CHOICES, limits.max_waiting)},
        **{name: {"maximum": most} for name in _LENGTHS},
    }
    for name, change in changes.items():
        for branch in properties.get(name, {}).get("anyOf", ()):
            if branch.get("type") != "null":
                branch.update(change)
    for name in ("stop_token_ids", "prompt", "input_ids", "tokens"):
        _tighten_ids(properties.get(name, {}), last, most if name in ("prompt", "input_ids") else None)


def _tighten_ids(schema: dict[str, Any], last: dict[str, int], most: int | None) -> None:
    """Every list of integers in ``schema`` is one of token ids."""
    for branch in (schema, *schema.get("anyOf", ())):
        items = branch.get("items", {})
        if items.get("type") == "integer":
            items.update(last)
            if most is not None:
                branch["maxItems"] = min(most, branch.get("maxItems", most))
        elif items:
            _tighten_ids(items, last, most)
