"""What schemathesis makes, made answerable: of the bodies, two of three have their fields brought together.

A schema bounds each field; that two of them fit each other (a prompt and its answer into one context, ``min_tokens`` below
``max_tokens``, ``top_logprobs`` with ``logprobs``) it does not say, and random fields rarely do; and 1.0 is an integer to a
schema, but not here. The third body stays as it was made, and so does whatever is wrong by itself. Loaded by schemathesis
itself, outside .venv.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import schemathesis

CONTEXT, MOST_CHOICES = 128, 16  # of the server that is asked: see small_server


def _within(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _cap(body: dict[str, Any], name: str, low: int, high: int, allowed: int) -> None:
    """A wrong value stays wrong: only what is allowed is made smaller."""
    if _within(body.get(name), 0, allowed):
        body[name] = min(max(body[name], low), high)


def _drop(body: dict[str, Any], name: str, low: int, high: int) -> None:
    if _within(body.get(name), low, high):
        del body[name]


def _short(prompt: Any) -> Any:
    """The beginning of a prompt that is allowed."""
    if isinstance(prompt, str):
        return prompt[:20]
    if not isinstance(prompt, list) or not 1 <= len(prompt) <= CONTEXT:
        return prompt
    if all(_within(one, 0, 511) for one in prompt):
        return prompt[:20]
    ids = [isinstance(one, list) and one and all(_within(token, 0, 511) for token in one) for one in prompt]
    if all(ids) or all(isinstance(one, str) and one for one in prompt):
        return [one[:20] for one in prompt[:4]]
    return prompt


def _whole(value: Any) -> Any:
    """``value`` with whole floats written as integers."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and abs(value) < 2**53 and value.is_integer() else value


def reconcile(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` with no two of its fields against each other, and short answers."""
    body = _whole(body)
    if ("text" in body or "input_ids" in body) and body.get("sampling_params") is None:
        body["sampling_params"] = {}
    sampling = body.get("sampling_params")
    parts = [body]
    if isinstance(sampling, dict):
        if sampling.get("max_new_tokens") is None:
            sampling["max_new_tokens"] = 4
        parts.append(sampling)
    for part in parts:
        for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
            _cap(part, name, 1, 8, CONTEXT - 1)
        for name in ("min_tokens", "min_new_tokens"):
            _cap(part, name, 0, 1, CONTEXT - 1)
        if _within(part.get("n"), 1, MOST_CHOICES):
            part["n"] = min(part["n"], 3)
        bias = part.get("logit_bias")
        if isinstance(bias, dict) and len(bias) <= 500 and all(re.fullmatch("[0-9]{1,10}", name) for name in bias):
            part["logit_bias"] = {str(int(name) % 500): value for name, value in bias.items()}
    if _within(body.get("max_tokens"), 0, CONTEXT - 1):
        _drop(body, "max_completion_tokens", 0, CONTEXT - 1)
    options = body.get("stream_options")
    if not body.get("stream") and isinstance(options, dict) and all(v in (None, True, False) for v in options.values()):
        del body["stream_options"]
    if body.get("stream") is True:
        _drop(body, "prompt_logprobs", 0, 20)
    if not body.get("logprobs"):
        _drop(body, "top_logprobs", 0, 20)
    if not body.get("return_logprob"):
        _drop(body, "top_logprobs_num", 0, 20)
        _drop(body, "logprob_start_len", -1, 2**31 - 1)
    for name in ("prompt", "text", "input_ids"):
        if name in body:
            body[name] = _short(body[name])
    return body


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    kind = zlib.crc32(json.dumps(body, sort_keys=True, default=str).encode()) % 3
    return body if kind == 0 else reconcile(body)
