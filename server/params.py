"""From the body's sampling fields to ``SamplingParams``. A refusal names the field as the endpoint calls it."""

from __future__ import annotations

from typing import Any

from engine.request import InvalidRequest, SamplingParams
from server.errors import ApiError, of_invalid
from server.schemas import ChatBody, CompletionBody, GenerateBody, GenerateSampling, OpenAIBody, Sampling

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "seed",
    "n",
)


def of_completion(body: CompletionBody) -> SamplingParams:
    """``max_tokens: 0`` is for ``echo`` only; it runs as 1 and the token is dropped (rule 1)."""
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1
    asked = [k for k in (body.logprobs if body.echo else None, _prompt_logprobs(body)) if k is not None]
    return _make(
        _sampling(body)
        | {
            "max_tokens": max_tokens,
            "min_tokens": body.min_tokens or 0,
            "logprobs": body.logprobs,
            "prompt_logprobs": max(asked, default=None),
        }
    )


def of_chat(body: ChatBody) -> SamplingParams:
    """Without a limit, the answer may be as long as context and pool allow."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(
            400,
            f"max_tokens is {body.max_tokens}, but max_completion_tokens is {body.max_completion_tokens}",
            code="invalid_value",
            param="max_completion_tokens",
        )
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400,
            f"top_logprobs is {body.top_logprobs}, but needs logprobs to be true",
            code="invalid_value",
            param="top_logprobs",
        )
    newer = body.max_completion_tokens is not None
    limit = body.max_completion_tokens if newer else body.max_tokens
    return _make(
        _sampling(body)
        | {
            "max_tokens": limit,
            "min_tokens": body.min_tokens or 0,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "prompt_logprobs": _prompt_logprobs(body),
        },
        {"max_tokens": "max_completion_tokens"} if newer else {},
    )


def of_generate(body: GenerateBody) -> SamplingParams:
    given = body.sampling_params or GenerateSampling()
    values = _sampling(given)
    if given.sampling_seed is not None:
        if given.seed not in (None, given.sampling_seed):
            raise ApiError(
                400,
                f"sampling_params.seed is {given.seed}, but sampling_params.sampling_seed is {given.sampling_seed}",
                code="invalid_value",
                param="sampling_params.sampling_seed",
            )
        values["seed"] = given.sampling_seed
    if body.top_logprobs_num and not body.return_logprob:
        raise ApiError(
            400,
            f"top_logprobs_num is {body.top_logprobs_num}, but needs return_logprob to be true",
            code="invalid_value",
            param="top_logprobs_num",
        )
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if start >= 0 and not body.return_logprob:
        raise ApiError(
            400,
            f"logprob_start_len is {start}, but needs return_logprob to be true",
            code="invalid_value",
            param="logprob_start_len",
        )
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    names = {name: f"sampling_params.{name}" for name in (*_PLAIN, "stop", "stop_token_ids", "logit_bias")}
    names |= {"max_tokens": "sampling_params.max_new_tokens", "min_tokens": "sampling_params.min_new_tokens"}
    return _make(
        values
        | {
            "max_tokens": given.max_new_tokens,
            "min_tokens": given.min_new_tokens or 0,
            "logprobs": logprobs,
            "prompt_logprobs": logprobs if start >= 0 else None,
            "logits_digest": bool(body.return_logits_digest),
        },
        names,
    )


def _prompt_logprobs(body: OpenAIBody) -> int | None:
    """vLLM's field, with its limit: a stream has no place for them."""
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs needs stream to be false", code="invalid_value", param="prompt_logprobs")
    return body.prompt_logprobs


def _sampling(body: Sampling) -> dict[str, Any]:
    values = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.stop:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    values["stop_token_ids"] = tuple(body.stop_token_ids or ())
    values["logit_bias"] = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    values["include_stop_str_in_output"] = bool(body.include_stop_str_in_output or body.no_stop_trim)
    return values


def _make(values: dict[str, Any], names: dict[str, str] | None = None) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        raise of_invalid(error, names) from None
