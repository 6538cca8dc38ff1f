"""Fields that no schema names: unsupported ones are refused, harmless ones ignored, unknown ones ignored and told: once in the
log, with the name that was perhaps meant, and to the client in a header of every such answer.

A client that asks for a tool call or a JSON schema and silently gets prose is worse off than with an error; and so is one
that limits its answer by the name which another endpoint has for it. A router or a newer client that adds a field of its own
should not fail for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote

import structlog

from server.errors import ApiError
from server.logs import printable
from server.schemas import Body, ChatBody, CompletionBody, GenerateBody, GenerateSampling, Message
from server.shown import brief, shorten

MAX_NAMES = 256  # names that are remembered; a stranger must not fill the memory with them
MAX_TOLD = 8  # names in the header of one answer
IGNORED_HEADER = "X-Lockstep-Ignored-Fields"

Ignored = dict[str, None]  # the unknown fields of one request, in order

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

# What clients send back with a message that they got, beside what server.prompts judges. Nothing of it is read.
OF_MESSAGES = frozenset({"annotations", "audio", "function_call", "refusal", "tool_call_id", "tool_calls"})

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

    def judge(
        self, body: Body | None, ignored: Ignored, *, n: int = 1, prefix: str = "", generates: bool = True
    ) -> None:
        """Raises ``ApiError`` 400 for an unsupported field that asks for something, and where text is generated for a field of
        another endpoint. ``prefix`` goes before its name. What is unknown is warned about once and put into ``ignored``."""
        if body is None:
            return
        for name, value in (body.model_extra or {}).items():
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
            elif generates and (homes := _homes(name)):
                if value is not None and value is not False:  # a router that spells out what is off asks for nothing
                    raise ApiError(
                        400,
                        f"{prefix}{name} is {brief(value)}, but that is a field of {', '.join(homes)} and not of this body",
                        code="invalid_value",
                        param=prefix + name,
                    )
            else:
                self._ignore(prefix, name, body, ignored)

    def judge_messages(self, messages: Iterable[Message], ignored: Ignored) -> None:
        """As ``judge``; that a message asks for what is not supported is found where it is read."""
        for message in messages:
            for name, value in (message.model_extra or {}).items():
                if name not in OF_MESSAGES and value not in (None, []):
                    self._ignore("messages[].", name, message, ignored)

    def _ignore(self, prefix: str, name: str, body: Body, ignored: Ignored) -> None:
        if name and len(ignored) <= MAX_TOLD:  # one more, so that the header can say that there were more
            ignored[prefix + shorten(name, 64)] = None
        shown = printable(shorten(prefix + name, 64))
        if shown not in self._seen and len(self._seen) < MAX_NAMES:
            self._seen.add(shown)
            near = get_close_matches(name[:64].lower(), type(body).model_fields, 1, 0.75)
            hint = {"did_you_mean": prefix + near[0]} if near else {}
            log.warning("unknown field is ignored; said once", field=shown, **hint)


def in_header(ignored: Ignored) -> str:
    """The names for ``IGNORED_HEADER``: percent-encoded, separated by commas, ``...`` when there were more."""
    names = [shorten(quote(name, safe="[]"), 80) if name.strip(".") else "%2E" * len(name) for name in ignored]
    return ", ".join(names if len(names) <= MAX_TOLD else [*names[:MAX_TOLD], "..."])


def _homes(name: str) -> list[str]:
    """Where a name that this body does not know means something."""
    return [home for home, body in _BODIES if name in body.model_fields]


def _neutral(name: str, value: Any, n: int) -> bool:
    if name == "best_of" and value == n and not isinstance(value, bool):
        return True
    return any(value == calm and isinstance(value, bool) == isinstance(calm, bool) for calm in UNSUPPORTED[name])
