"""What can be asked about the server: models, health, readiness, version, settings, metrics, and its tokenizer."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from engine import __version__
from server.context import TORCH, Context, context_of
from server.documents import ANY_OBJECT, COUNT, LOOK, READ, answers, describe, fields
from server.errors import ApiError
from server.facts import REQUEST_LIMITS, longest, promises, readings
from server.phase import Phase
from server.prompts import need_tokenizer, read_messages, read_prompts
from server.schemas import DetokenizeBody, TokenizeBody
from server.strict_json import MAX_VALUES, JsonRoute, dumps

router = APIRouter(tags=["server"])
json_router = APIRouter(route_class=JsonRoute, tags=["server"])

_CARD = fields("created root", id={"type": "string"}, object={"const": "model"}, max_model_len=COUNT)
_CARDS = {"type": "array", "items": _CARD, "minItems": 1}
_TOKENS = answers(fields(tokens={"type": "array", "items": COUNT}, count=COUNT, max_model_len=COUNT), *READ)
_TEXT = answers(fields(prompt={"type": "string"}, text={"type": "string"}), *READ)
_EXPOSITION = {**ANY_OBJECT, 200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}}


def _json(body: Any) -> Response:
    return Response(dumps(body), media_type="application/json")


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=ANY_OBJECT, response_class=Response)
async def health(request: Request) -> Response:
    """200 while the engine's loop is alive: 503 while it loads, when it has stopped, and when an iteration is stuck."""
    context = context_of(request)
    bridge = context.bridge
    if bridge.phase not in (Phase.READY, Phase.DRAINING):
        raise bridge.refusal() or ApiError(503, "the engine has stopped", code="engine_dead")
    began = bridge.step_began
    limit = context.settings.stall_timeout
    if limit and began is not None and time.monotonic() - began > limit:
        raise ApiError(503, f"an iteration has been running for more than {limit:g} seconds", code="engine_stalled")
    if not request.state.trusted:
        return _json({"status": "ok"})
    return _json({"status": "ok", "promises": _promises(context), "readings": readings(context.metrics)})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=ANY_OBJECT, response_class=Response)
async def ready(request: Request) -> Response:
    """200 when new requests are taken: 503 also while shutting down."""
    if (refusal := context_of(request).bridge.refusal()) is not None:
        raise refusal
    return _json({"status": "ready"})


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request) -> Response:
    """Made on first demand, off the event loop: it takes half a second."""
    context = context_of(request)
    generic = await context.desk.run(request.app.openapi)
    if context.bridge.refusal() is not None:
        return _json(describe(generic, (), None))
    return _json(describe(generic, context.names, context.bridge.engine.limits))


@router.get("/version", responses=ANY_OBJECT, response_class=Response)
async def version() -> Response:
    return _json({"version": __version__})


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", responses=_EXPOSITION, response_class=Response)
async def metrics(request: Request) -> Response:
    """503 until the model's name is known: every series carries it."""
    context = context_of(request)
    if not context.metrics.model_name:
        raise context.bridge.refusal() or ApiError(503, "the engine has stopped", code="engine_dead")
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", responses=answers(fields(data=_CARDS), *LOOK), response_class=Response)
async def models(request: Request) -> Response:
    context = context_of(request)
    return _json({"object": "list", "data": [_card(context, name) for name in context.names]})


@router.get("/v1/models/{name:path}", responses=answers(_CARD, 404, *LOOK), response_class=Response)
async def model(name: str, request: Request) -> Response:
    context = context_of(request)
    return _json(_card(context, context.model_name(name)))


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "lockstep",
        "root": context.model.name,
        "parent": None,
        "max_model_len": longest(context.bridge.engine.limits),
    }


@router.get("/server_info", responses=ANY_OBJECT, response_class=Response)
async def server_info(request: Request) -> Response:
    """What equal bytes depend on (version, model, device, compute path), what was decided at start, totals so far."""
    context = context_of(request)
    return _json(
        {
            "version": __version__,
            "torch": TORCH,
            "model": context.model.name,
            "system_fingerprint": context.fingerprint(),
            "phase": str(context.bridge.phase),
            "capacity": dict(context.bridge.engine.capacity()),
            **_promises(context),  # flat as well, where routers and benchmark clients look for sizes
            "promises": _promises(context),
            "readings": readings(context.metrics),
        }
    )


def _promises(context: Context) -> dict[str, Any]:
    limits: dict[str, float | None] = {**REQUEST_LIMITS, "body_bytes": context.settings.max_body_bytes}
    limits |= {"body_values": MAX_VALUES, "prompt_bytes": context.settings.max_prompt_bytes}
    limits["seconds"] = context.settings.request_timeout or None
    return {"served_model_name": list(context.names), "request_limits": limits, **promises(context.bridge.engine)}


@router.get("/model_info", responses=ANY_OBJECT, response_class=Response)
async def model_info(request: Request) -> Response:
    """The short description that routers ask for."""
    context = context_of(request)
    loaded = context.model
    return _json(
        {
            "model_path": loaded.name,
            "is_generation": True,
            "model_type": loaded.config.family,
            "vocab_size": loaded.config.vocab_size,
            "weight_types": loaded.weight_types,
            "max_model_len": longest(context.bridge.engine.limits),
        }
    )


@router.get("/tokenizer_info", responses=ANY_OBJECT, response_class=Response)
async def tokenizer_info(request: Request) -> Response:
    loaded = context_of(request).model
    tokenizer = need_tokenizer(loaded, "tokenizer")

    def name(ids: list[int]) -> str | None:
        return tokenizer.token_text(ids[0]) if ids else None

    return _json(
        {
            "bos_token": name([] if tokenizer.bos_id is None else [tokenizer.bos_id]),
            "eos_token": name(sorted(loaded.eos_token_ids)),
            "eos_token_ids": sorted(loaded.eos_token_ids),
            "vocab_size": tokenizer.vocab_size,
            "chat_template": None if loaded.template is None else loaded.template.source,
        }
    )


@json_router.post("/tokenize", responses=_TOKENS, response_class=Response)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a prompt or of a rendered conversation."""
    context = context_of(request)
    context.model_name(body.model)
    context.judge.judge(body, request.state.ignored, generates=False)
    context.judge.judge_messages(body.messages or (), request.state.ignored)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is needed", code="invalid_value", param="prompt")
    data = await context.desk.run(_tokenized, body, context, size=request.state.body_bytes)
    return Response(data, media_type="application/json")


def _tokenized(body: TokenizeBody, context: Context) -> bytes:
    """The whole answer, which may be long: runs on a worker thread."""
    ids = _tokenize(body, context)
    answer: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": longest(context.bridge.engine.limits),
    }
    if body.return_token_strs:
        tokenizer = need_tokenizer(context.model, "return_token_strs")
        answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
    return dumps(answer)


def _tokenize(body: TokenizeBody, context: Context) -> list[int]:
    if body.messages is not None:
        reading = context.reading(bool(body.add_special_tokens), bool(body.parse_special))
        add_prompt = body.add_generation_prompt is not False
        kwargs = body.chat_template_kwargs
        return list(read_messages(body.messages, reading, add_generation_prompt=add_prompt, kwargs=kwargs).ids)
    reading = context.reading(body.add_special_tokens is not False, body.parse_special is not False)
    (prompt,) = read_prompts(body.prompt, "prompt", reading)
    return list(prompt.ids)


@json_router.post("/detokenize", responses=_TEXT, response_class=Response)
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Text of token ids, under vLLM's name (``prompt``) and SGLang's (``text``)."""
    context = context_of(request)
    context.model_name(body.model)
    context.judge.judge(body, request.state.ignored, generates=False)
    tokenizer = need_tokenizer(context.model, "tokens")
    try:
        text = await context.desk.run(
            lambda: tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens)),
            size=request.state.body_bytes,
        )
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", code="token_out_of_range", param="tokens") from None
    return _json({"prompt": text, "text": text})
