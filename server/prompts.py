"""From the body's prompt or messages to token ids, off the event loop.

Tokenising and rendering a long prompt takes seconds, and a health probe or another client's stream must not wait for
it. The number of threads is small: they compete with the engine for the same cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from engine.loading.model import LoadedModel
from engine.loading.template import TemplateFailure
from engine.loading.tokenizer import Tokenizer
from engine.request import SamplingParams
from engine.text.stops import StopSet
from engine.text.stream import TextStream
from server.errors import ApiError
from server.live import Choice
from server.schemas import MAX_PROMPTS, Message
from server.shown import brief

LONG_BODY = 2**16  # bytes; tokenising more takes tens of milliseconds
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "documents"})
_ALLOWED = {  # of the two fields of one kind: as a whole, and one of several
    "text": ("text or a non-empty list of texts", "text"),
    "input_ids": ("token ids or a non-empty list of lists of them", "a list of token ids"),
}
_EITHER = ("text, token ids, or a non-empty list of either", "text or a list of token ids")
_ROLES = {"developer": "system"}  # OpenAI's newer name; templates know the older one

T = TypeVar("T")


@attrs.frozen
class Prompt:
    ids: tuple[int, ...]
    text: str | None = None  # as the client gave it


class Desk:
    """The worker threads that read prompts: two for short bodies, one for long ones, so that no short one waits for long
    ones. ``close`` lets running ones end by themselves."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="prompt")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-prompt")

    async def run(self, call: Callable[..., T], *args: Any, size: int = 0) -> T:
        """``size``: bytes of the body that is read."""
        pool = self._long if size > LONG_BODY else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


@attrs.frozen
class Reading:
    """How prompts are read. ``max_len`` is in tokens, ``max_bytes`` in UTF-8 for all text of a request together: what is
    longer is refused before it is tokenised. ``parse_special``: whether the spelling of a control token in text is that
    token."""

    model: LoadedModel
    max_len: int
    max_bytes: int
    add_special_tokens: bool = True
    parse_special: bool = True

    def check_bytes(self, field: str, texts: Iterable[str]) -> None:
        size = 0
        for text in texts:
            size += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            if size > self.max_bytes:
                raise _bad(
                    field,
                    f"{field} has more than {self.max_bytes} bytes of text, the most that this server tokenises",
                    code="context_length_exceeded",
                )

    def tokens(self, text: str, field: str) -> list[int]:
        try:
            return need_tokenizer(self.model, field).encode(
                text, add_special_tokens=self.add_special_tokens, parse_special=self.parse_special
            )
        except ValueError as error:  # lone surrogates
            raise _bad(field, f"{field} cannot be tokenised: {error}") from None


def read_prompts(given: Any, field: str, reading: Reading) -> list[Prompt]:
    """Text, token ids, or a list of either. Raises ``ApiError`` 400 that names ``field``. Runs on a worker thread."""
    max_len = reading.max_len
    whole, several = _ALLOWED.get(field, _EITHER)
    if isinstance(given, str):
        reading.check_bytes(field, [given])
        return [Prompt(tuple(reading.tokens(given, field)), given)]
    if not isinstance(given, list) or not given:
        raise _bad(field, f"{field} is {brief(given)}, but must be {whole}")
    if _is_ids(given, field, max_len):
        return [Prompt(tuple(given))]
    if len(given) > MAX_PROMPTS:
        raise _bad(field, f"{field} has {len(given)} prompts, but at most {MAX_PROMPTS} are allowed")
    reading.check_bytes(field, (one for one in given if isinstance(one, str)))
    prompts = []
    for index, one in enumerate(given):
        name = f"{field}[{index}]"
        if isinstance(one, str):
            prompts.append(Prompt(tuple(reading.tokens(one, name)), one))
        elif isinstance(one, list) and (not one or _is_ids(one, name, max_len)):
            if not one:
                raise _bad(name, f"{name} is empty, but at least 1 token is needed")
            prompts.append(Prompt(tuple(one)))
        else:
            raise _bad(name, f"{name} is {brief(one)}, but must be {several}")
    return prompts


def _is_ids(given: list[Any], name: str, max_len: int) -> bool:
    """Whether it is a list of token ids; judged by the first entry, then all must be."""
    if type(given[0]) is not int:
        return False
    if len(given) > max_len:
        raise _bad(
            name,
            f"{name} has {len(given)} tokens, but the model's context holds {max_len}",
            code="context_length_exceeded",
        )
    for index, token in enumerate(given):
        if type(token) is not int:  # bool is an int to isinstance
            raise _bad(f"{name}[{index}]", f"{name}[{index}] is {brief(token)}, but must be a token id")
        if not 0 <= token < 2**31:
            raise _bad(f"{name}[{index}]", f"{name}[{index}] is {brief(token)}, which is not a token id")
    return True


def need_tokenizer(model: LoadedModel, field: str) -> Tokenizer:
    if model.tokenizer is None:
        raise _bad(field, f"{field}: {model.name} has no tokenizer, so only token ids can be sent")
    return model.tokenizer


def read_messages(
    messages: Sequence[Message],
    reading: Reading,
    *,
    add_generation_prompt: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """A conversation through the model's template. Control tokens come from the template alone unless ``reading`` says
    otherwise: their spelling in a message, a name or a keyword is text. Raises ``ApiError`` 400, with the template's own
    words where it refused. Runs on a worker thread."""
    model = reading.model
    if model.template is None:
        raise _bad("messages", f"{model.name} has no chat template; use /v1/completions")
    if taken := sorted(_RESERVED & set(kwargs or {})):
        raise _bad("chat_template_kwargs", f"chat_template_kwargs must not hold {', '.join(taken)}")
    tokenizer = need_tokenizer(model, "messages")
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    reading.check_bytes("messages", (text for message in plain for text in message.values()))
    extra = dict(kwargs or {})
    if not reading.parse_special:
        plain = [{name: tokenizer.guard(text) for name, text in message.items()} for message in plain]
        extra = _guarded(extra, tokenizer)
    try:
        text = model.template.render(plain, add_generation_prompt=add_generation_prompt, **extra)
    except TemplateFailure as error:
        raise _bad("messages", f"the chat template refused the messages: {error}", code="template_error") from None
    if reading.parse_special:
        return Prompt(tuple(reading.tokens(text, "messages")), text)
    try:
        ids = tokenizer.encode_guarded(text)
    except ValueError as error:  # lone surrogates
        raise _bad("messages", f"messages cannot be tokenised: {error}") from None
    around = tokenizer.encode("") if reading.add_special_tokens else []
    leading = 1 if tokenizer.add_bos else 0
    return Prompt((*around[:leading], *ids, *around[leading:]))


def _guarded(extra: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The template's variables with every text in them guarded, keys too: a template may show any of it."""

    def guard(value: Any) -> Any:
        if isinstance(value, str):
            return tokenizer.guard(value)
        if isinstance(value, list):
            return [guard(one) for one in value]
        if isinstance(value, dict):
            return {tokenizer.guard(key): guard(one) for key, one in value.items()}
        return value

    try:
        return {name: guard(value) for name, value in extra.items()}
    except RecursionError:
        raise _bad("chat_template_kwargs", "chat_template_kwargs is nested too deeply") from None


def _plain(message: Message, name: str) -> dict[str, str]:
    """The message as templates know it: role, content as one text, perhaps a name."""
    extra = message.model_extra or {}
    for field in ("tool_calls", "function_call", "tool_call_id"):
        if extra.get(field) not in (None, []):
            what = f"{name}.{field}"
            raise _bad(what, f"{what} is {brief(extra[field])}, but tools are not supported", "unsupported_parameter")
    if message.role in ("tool", "function"):
        raise _bad(
            f"{name}.role", f"{name}.role is {message.role!r}, but tools are not supported", "unsupported_parameter"
        )
    content = message.content
    if content is None:
        raise _bad(f"{name}.content", f"{name}.content is required")
    if not isinstance(content, str):
        content = _join(content, f"{name}.content")
    plain = {"role": _ROLES.get(message.role, message.role), "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _join(parts: Sequence[Mapping[str, Any]], name: str) -> str:
    if not parts:
        raise _bad(name, f"{name} is an empty list, but at least 1 text part is needed")
    texts = []
    for index, part in enumerate(parts):
        where = f"{name}[{index}]"
        if part.get("type") != "text":
            raise _bad(
                f"{where}.type",
                f"{where}.type is {brief(part.get('type'))}, but only text is supported",
                code="unsupported_parameter",
            )
        if not isinstance(part.get("text"), str):
            raise _bad(f"{where}.text", f"{where}.text is {brief(part.get('text'))}, but must be text")
        texts.append(part["text"])
    return "\n".join(texts)


def make_choices(prompts: Sequence[Prompt], params: SamplingParams, model: LoadedModel) -> list[Choice]:
    """``n`` choices per prompt, each with a text of its own. Runs on a worker thread: a long prompt primes the text."""
    if params.stop:
        need_tokenizer(model, "stop")
    stops = StopSet(params.stop)  # one for all: a request may have a thousand choices
    return [
        Choice(
            index=at * params.n + choice,
            prompt=at,
            text=TextStream(
                model.tokenizer,
                prompt.ids,
                stop=stops,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            ),
            stops_in_commit=bool(params.stop),
        )
        for at, prompt in enumerate(prompts)
        for choice in range(params.n)
    ]


def _bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)
