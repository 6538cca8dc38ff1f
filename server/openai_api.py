"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Send

from engine.request import SamplingParams
from server.answer import Answer, refuse_stream_options
from server.context import Context, context_of
from server.documents import CHAT, COMPLETION
from server.errors import ApiError
from server.fields import Ignored
from server.logprobs import Namer
from server.params import of_chat, of_completion
from server.prompts import Prompt, need_tokenizer, read_messages, read_prompts
from server.schemas import ChatBody, CompletionBody, OpenAIBody
from server.shapes import ChatShape, CompletionShape, Wish
from server.strict_json import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post("/v1/completions", responses=COMPLETION, response_class=Response)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continues a prompt: text, token ids, or a list of either."""
    context = context_of(request)
    model = _common(context, body, request.state.ignored)
    params = of_completion(body)

    async def work(send: Send) -> None:
        context.glance(params.n)
        reading = context.reading(body.add_special_tokens is not False, body.parse_special is not False)
        prompts = await context.desk.run(read_prompts, body.prompt, "prompt", reading, size=request.state.body_bytes)
        wish = _wish(
            context,
            body,
            model,
            params,
            echo=await context.desk.run(_echo, context, prompts, body) if body.echo else (),
            drop_tokens=body.max_tokens == 0,
        )
        await context.answer(
            send,
            prompts,
            params,
            partial(CompletionShape, wish=wish),
            stream=bool(body.stream),
            priority=body.priority or 0,
            salt=body.cache_salt,
            fit=body.max_tokens is None,
        )

    return Answer(work)


@router.post("/v1/chat/completions", responses=CHAT, response_class=Response)
async def chat(body: ChatBody, request: Request) -> Response:
    """Answers a conversation through the model's chat template."""
    context = context_of(request)
    model = _common(context, body, request.state.ignored)
    context.judge.judge_messages(body.messages, request.state.ignored)
    params = of_chat(body)

    async def work(send: Send) -> None:
        context.glance(params.n)
        render = partial(
            read_messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            kwargs=body.chat_template_kwargs,
        )
        reading = context.reading(bool(body.add_special_tokens), bool(body.parse_special))
        prompt = await context.desk.run(render, body.messages, reading, size=request.state.body_bytes)
        wish = _wish(context, body, model, params)
        await context.answer(
            send,
            [prompt],
            params,
            partial(ChatShape, wish=wish),
            stream=bool(body.stream),
            priority=body.priority or 0,
            salt=body.cache_salt,
            names={"prompt": "messages"},
        )

    return Answer(work)


def _common(context: Context, body: OpenAIBody, ignored: Ignored) -> str:
    """Checks what both bodies share and returns the model's name in the answer."""
    model = context.model_name(body.model)
    if isinstance(body, ChatBody) and (body.model_extra or {}).get("echo") not in (None, False):
        raise ApiError(400, "echo is not supported in chat", code="unsupported_parameter", param="echo")
    context.judge.judge(body, ignored, n=body.n or 1)
    refuse_stream_options(body.stream, body.stream_options)
    context.judge.judge(body.stream_options, ignored, prefix="stream_options.")
    return model


def _wish(
    context: Context,
    body: OpenAIBody,
    model: str,
    params: SamplingParams,
    *,
    echo: tuple[str, ...] = (),
    drop_tokens: bool = False,
) -> Wish:
    options = body.stream_options
    usage = options is not None and bool(options.include_usage)
    return Wish(
        model=model,
        fingerprint=context.fingerprint(),
        namer=Namer(context.model.tokenizer, bool(body.return_tokens_as_token_ids)),
        user_stop_ids=frozenset(params.stop_token_ids),
        logprobs=params.logprobs is not None,
        token_ids=bool(body.return_token_ids),
        include_usage=usage,
        continuous_usage=usage and options is not None and bool(options.continuous_usage_stats),
        echo=echo,
        echo_logprobs=params.logprobs if echo else None,
        prompt_logprobs=body.prompt_logprobs,
        drop_tokens=drop_tokens,
    )


def _echo(context: Context, prompts: list[Prompt], body: CompletionBody) -> tuple[str, ...]:
    """The prompts as text: as they came, or decoded where they came as ids. Runs on a worker thread."""
    skip = body.skip_special_tokens is not False
    texts = []
    for prompt in prompts:
        if prompt.text is not None:
            texts.append(prompt.text)
            continue
        tokenizer = need_tokenizer(context.model, "echo")
        try:
            texts.append(tokenizer.decode(prompt.ids, skip_special_tokens=skip))
        except ValueError as error:
            raise ApiError(400, f"prompt: {error}", code="token_out_of_range", param="prompt") from None
    return tuple(texts)
