"""POST /generate, in SGLang's shape."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Send

from server.answer import Answer
from server.context import context_of
from server.documents import GENERATE
from server.errors import ApiError
from server.generate_shape import GenerateShape
from server.logprobs import Namer
from server.params import of_generate
from server.prompts import Prompt, Reading, read_prompts
from server.schemas import GenerateBody
from server.strict_json import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["native"])


@router.post("/generate", responses=GENERATE, response_class=Response)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Continues text or token ids and reports what the engine did for it."""
    context = context_of(request)
    model = context.model_name(body.model)
    sampling = body.sampling_params
    context.judge.judge(sampling, request.state.ignored, n=(sampling and sampling.n) or 1, prefix="sampling_params.")
    context.judge.judge(body, request.state.ignored)
    params = of_generate(body)
    field = "text" if body.text is not None else "input_ids"
    given = body.text if body.text is not None else body.input_ids
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "exactly one of text and input_ids is needed", code="invalid_value", param="text")

    async def work(send: Send) -> None:
        context.glance(params.n)
        engine = context.bridge.engine
        reading = context.reading(True, body.parse_special is not False)
        prompts = await context.desk.run(_read, given, field, reading, size=request.state.body_bytes)
        batch = isinstance(given, list) and type(given[0]) is not int
        shape = partial(
            GenerateShape,
            model=model,
            namer=Namer(engine.model.tokenizer),
            rid=body.rid,
            many=batch or params.n > 1,
            with_logprobs=params.logprobs is not None,
            logprob_start=-1 if body.logprob_start_len is None else body.logprob_start_len,
            with_digests=params.logits_digest,
        )
        await context.answer(
            send,
            prompts,
            params,
            shape,
            stream=bool(body.stream),
            priority=body.priority or 0,
            salt=body.cache_salt,
            names={"prompt": field, "max_tokens": "sampling_params.max_new_tokens", "stop": "sampling_params.stop"},
            fit=sampling is None or "max_new_tokens" not in sampling.model_fields_set,
        )

    return Answer(work)


def _read(given: Any, field: str, reading: Reading) -> list[Prompt]:
    """``text`` holds text alone, ``input_ids`` token ids alone. Runs on a worker thread."""
    prompts = read_prompts(given, field, reading)
    for index, prompt in enumerate(prompts):
        if (prompt.text is not None) != (field == "text"):
            kinds = ("text", "token ids") if field == "text" else ("token ids", "text")
            where = field if len(prompts) == 1 else f"{field}[{index}]"
            raise ApiError(400, f"{where} must be {kinds[0]}, but is {kinds[1]}", code="invalid_value", param=where)
    return prompts
