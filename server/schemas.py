"""The bodies of requests, as OpenAI, vLLM and SGLang name their fields.

Types and presence are checked here, ranges in ``engine.request``, so that HTTP and offline callers meet one rule.
Types are strict: ``"5"``, ``5.0`` and ``true`` are not integers. Fields that are not named here land in
``model_extra`` and are judged by ``server.fields``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from engine.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    SEED_RANGE,
)

MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_PARTS = 1024
MAX_STOP_IDS = 1024
INT32 = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=INT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
Seed = Annotated[int, Field(ge=SEED_RANGE[0], le=SEED_RANGE[1])]
Priority = Annotated[int, Field(ge=-(2**31), le=INT32, description="Lower is served first, as in vLLM.")]
Salt = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description="The prefix cache is shared only among requests of one salt; a secret one keeps others from guessing.",
    ),
]
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=64)]
_TOKEN_ID, _REQUEST_ID = r"^(0|[1-9][0-9]{0,9})$", r"^[A-Za-z0-9._:-]+$"
ALLOWED = {  # what a pattern, or a list of literals, asks for, in words
    _TOKEN_ID: "a token id in decimal digits",
    _REQUEST_ID: "letters, digits and any of . _ : -",
    "'system', 'developer', 'user', 'assistant', 'tool' or 'function'": "system, developer, user or assistant",
}
KEYED = frozenset({"logit_bias"})  # fields whose entries have names that the client chose
_NULL = {"type": "null"}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS}]
_ID_LISTS = [_IDS, {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS}]
Prompt = Annotated[
    Any,
    Field(
        description="Text, token ids, or a list of either.",
        json_schema_extra={"anyOf": [*_TEXTS, *_ID_LISTS]},
        examples=["The capital of France is", ["One prompt", "another"], [1, 72, 105]],
    ),
]


def _few(given: Any) -> Any:
    """A dict that is too large is refused before its entries are judged: each of them might be an error of its own."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIAS:
        context = {"field_type": "Dictionary", "max_length": MAX_LOGIT_BIAS, "actual_length": len(given)}
        raise PydanticKnownError("too_long", context)
    return given


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _shown(*examples: dict[str, Any], **schema: Any) -> ConfigDict:
    """The settings of ``Body`` for a body whose schema holds ``examples``, and what ``schema`` says beside."""
    return ConfigDict(**Body.model_config, json_schema_extra={**schema, "examples": list(examples)})


def _one_of(one: str, other: str) -> dict[str, Any]:
    """What a schema says about two fields of which exactly one must be given."""
    given = {"not": _NULL}
    return {
        "oneOf": [
            {"required": [this], "properties": {this: given, that: _NULL}}
            for this, that in ((one, other), (other, one))
        ]
    }


class Sampling(Body):
    """The sampling fields that every endpoint has under the same name. ``null`` means the default."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32, description="0 and -1 are off.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=_TOKEN_ID)],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_LOGIT_BIAS),
            BeforeValidator(_few),
        ]
        | None
    ) = None
    stop: Stop | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: Annotated[bool, Field(description="SGLang's name of include_stop_str_in_output.")] | None = None
    seed: Annotated[Seed, Field(description="Repeats an answer. Without one, it is drawn and reported.")] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis: accepted, nothing is padded


ParseSpecial = Annotated[
    bool,
    Field(
        description="Whether the spelling of a control token, as <|im_end|>, becomes that token. By default in prompts, "
        "which are the model's whole input, and not in messages, whose control tokens are the template's."
    ),
]


class OpenAIBody(Sampling):
    """What completions and chat share."""

    model: str | None = None
    max_tokens: (
        Annotated[
            Count,
            Field(
                description="Left out, or null: for completions 16, or what the context leaves if that is less; for chat "
                "all that it leaves. A number that does not fit is refused."
            ),
        ]
        | None
    ) = None
    min_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Field(ge=0, le=MAX_LOGPROBS, description="vLLM's: so many for every prompt token; not in a stream."),
        ]
        | None
    ) = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: ParseSpecial | None = None


class CompletionBody(OpenAIBody):
    model_config = _shown(
        {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        {"prompt": ["One prompt", "another"], "max_tokens": 4, "n": 2, "seed": 7, "logprobs": 2, "echo": True},
        {
            "prompt": "A stream",
            "max_tokens": 4,
            "stop": ["\n"],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: (
        Annotated[
            bool,
            Field(
                description="The prompt goes before the text, and with logprobs its tokens before the answer's: "
                "then nothing is taken from the prefix cache. max_tokens may be 0."
            ),
        ]
        | None
    ) = None


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_PARTS = {"type": "array", "items": _PART, "minItems": 1, "maxItems": MAX_PARTS}


class Message(Body):
    """``content``: text, or text parts, which are joined by a newline. The spelling of a control token in it stays text,
    unless ``parse_special`` asks for the token: a user cannot begin a turn of somebody else."""

    model_config = ConfigDict(**Body.model_config, json_schema_extra={"required": ["role", "content"]})

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        Field(json_schema_extra={"enum": ["system", "developer", "user", "assistant"]}),  # the others: a 400 in words
    ]
    content: Annotated[
        str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)] | None,
        Field(json_schema_extra={"anyOf": [{"type": "string"}, _PARTS]}),
    ] = None
    name: Annotated[str, Field(max_length=256)] | None = None


class ChatBody(OpenAIBody):
    model_config = _shown(
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_completion_tokens": 8},
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            "max_completion_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
        },
    )

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class GenerateSampling(Sampling):
    """SGLang's ``sampling_params``."""

    max_new_tokens: Annotated[
        Count | None,
        Field(description="Left out: 128, or what the context leaves if that is less. null: all that it leaves."),
    ] = 128
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None


class GenerateBody(Body):
    """SGLang's native request: exactly one of ``text`` and ``input_ids``."""

    model_config = _shown(
        {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
        {"input_ids": [1, 72, 105], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True},
        **_one_of("text", "input_ids"),
    )

    text: Annotated[Any, Field(json_schema_extra={"anyOf": [*_TEXTS, _NULL]})] = None
    input_ids: Annotated[Any, Field(json_schema_extra={"anyOf": [*_ID_LISTS, _NULL]})] = None
    sampling_params: GenerateSampling | None = None
    model: str | None = None
    stream: bool | None = None
    rid: Annotated[str, Field(max_length=128, pattern=_REQUEST_ID)] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_start_len: (
        Annotated[int, Field(ge=-1, le=INT32, description="From this prompt token on, with return_logprob; -1: none.")]
        | None
    ) = None
    parse_special: ParseSpecial | None = None
    return_logits_digest: (
        Annotated[
            bool,
            Field(description="Adds a digest of the raw logits behind every token: equal digests mean equal bytes."),
        ]
        | None
    ) = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class TokenizeBody(Body):
    """Exactly one of ``prompt`` and ``messages``."""

    model_config = _shown(
        {"prompt": "The capital of France is", "return_token_strs": True},
        {"messages": [{"role": "user", "content": "Hello"}]},
        **_one_of("prompt", "messages"),
    )

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    parse_special: ParseSpecial | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model_config = _shown({"tokens": [1, 72, 105]})

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], Field(max_length=2**20, fail_fast=True)]
    skip_special_tokens: bool | None = None
