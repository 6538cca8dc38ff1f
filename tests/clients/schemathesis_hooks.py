"""What schemathesis makes, made answerable: of the bodies, two of three have their fields brought together.

A schema bounds each field; that two of them fit each other (a prompt and its answer into one context, ``min_tokens`` below
``max_tokens``, ``top_logprobs`` with ``logprobs``) it does not say, and random fields rarely do. The third body stays as
it was made, and so does whatever is of the wrong type. Loaded by schemathesis itself, outside .venv.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import schemathesis


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cap(body: dict[str, Any], name: str, low: int, high: int) -> None:
    if _integer(body.get(name)):
        body[name] = min(max(body[name], low), high)


def reconcile(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` with no two of its fields against each other, and short answers."""
    body = dict(body)
    sampling = body.get("sampling_params")
    for part in (body, sampling) if isinstance(sampling, dict) else (body,):
        for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
            _cap(part, name, 1, 8)
        for name in ("min_tokens", "min_new_tokens"):
            _cap(part, name, 0, 1)
        _cap(part, "n", 1, 3)
        if isinstance(part.get("logit_bias"), dict):
            part["logit_bias"] = {
                str(zlib.crc32(k.encode("utf-8", "replace")) % 500): v for k, v in part["logit_bias"].items()
            }
    if "messages" in body and "max_tokens" in body:
        body.pop("max_completion_tokens", None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    elif isinstance(body.get("stream"), bool):
        body.pop("prompt_logprobs", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if not body.get("return_logprob"):
        for name in ("top_logprobs_num", "logprob_start_len"):
            body.pop(name, None)
    if "messages" in body and "max_completion_tokens" not in body and "temperature" in body:
        body.setdefault("max_tokens", 8)  # without a limit an answer is as long as the context
    for name in ("prompt", "text", "input_ids"):
        if isinstance(body.get(name), list):
            body[name] = [one[:20] if isinstance(one, (list, str)) else one for one in body[name][:4]]
        elif isinstance(body.get(name), str):
            body[name] = body[name][:20]
    return body


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    kind = zlib.crc32(json.dumps(body, sort_keys=True, default=str).encode()) % 3
    return body if kind == 0 else reconcile(body)
