"""Fields that no schema names: unsupported ones are refused, harmless ones ignored, unknown ones warned about.

A client that asks for a tool call or a JSON schema and silently gets prose is worse off than with an error; and so is one
that limits its answer by the name which another endpoint has for it. A router or a newer client that adds a field of its own
should not fail for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from server.errors import ApiError, brief, shorten
from server.logs import printable
from server.schemas import Body, ChatBody, CompletionBody, GenerateBody, GenerateSampling

MAX_NAMES = 256  # names that are remembered; a stranger must not fill the memory with them

# Field -> values that ask for nothing. Any other value is a 400.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "audio_data": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "custom_logit_processor": (None,),
    "custom_params": (None,),
    "documents": (None, []),
    "ebnf": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "grammar": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "image_data": (None,),
    "input_embeds": (None,),
    "json_schema": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "lora_path": (None,),
    "lora_request": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "regex": (None,),
    "response_format": (None, {"type": "text"}),
    "return_hidden_states": (None, False),
    "session_params": (None,),
    "stop_regex": (None, []),
    "structural_tag": (None,),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "token_ids_logprob": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "video_data": (None,),
    "web_search_options": (None,),
}

# Fields that change nothing about the answer's text, by the promise of those who defined them.
IGNORED = frozenset(
    {
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "return_text_in_logprobs",
        "rid",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "stream_reasoning",
        "user",
        "verbosity",
    }
)

_BODIES: tuple[tuple[str, type[Body]], ...] = (
    ("sampling_params of /generate", GenerateSampling),
    ("/generate", GenerateBody),
    ("/v1/completions", CompletionBody),
    ("/v1/chat/completions", ChatBody),
)

log = structlog.get_logger("lockstep.fields")


class FieldJudge:
    """One per application: remembers which unknown names were warned about."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def judge(self, extra: Mapping[str, Any] | None, *, n: int = 1, prefix: str = "", generates: bool = True) -> None:
        """Raises ``ApiError`` 400 for an unsupported field that asks for something, and where text is generated for a field of
        another endpoint. ``prefix`` goes before its name."""
        for name, value in (extra or {}).items():
            if name in UNSUPPORTED:
                if not _neutral(name, value, n):
                    raise ApiError(
                        400,
                        f"{prefix}{name} is {brief(value)}, but is not supported; leave it out",
                        code="unsupported_parameter",
                        param=prefix + name,
                    )
            elif name in IGNORED:
                continue
            elif generates and value is not None and value is not False and (homes := _homes(name)):
                raise ApiError(
                    400,
                    f"{prefix}{name} is {brief(value)}, but that is a field of {', '.join(homes)} and not of this body",
                    code="invalid_value",
                    param=prefix + name,
                )
            else:
                self._warn(prefix + name)

    def _warn(self, name: str) -> None:
        name = printable(shorten(name, 64))
        if name not in self._seen and len(self._seen) < MAX_NAMES:
            self._seen.add(name)
            log.warning("unknown field is ignored; said once", field=name)


def _homes(name: str) -> list[str]:
    """Where a name that this body does not know means something."""
    return [home for home, body in _BODIES if name in body.model_fields]


def _neutral(name: str, value: Any, n: int) -> bool:
    if name == "best_of" and value == n and not isinstance(value, bool):
        return True
    return any(value == calm and isinstance(value, bool) == isinstance(calm, bool) for calm in UNSUPPORTED[name])
