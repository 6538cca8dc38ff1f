"""OpenAI's two answer shapes, completions and chat, streamed and whole. All chunks share id, time and model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from engine.control.record import Finished
from server import logprobs
from server.live import Delta, Generation
from server.logprobs import Namer


@attrs.frozen(kw_only=True)
class Wish:
    """What the client asked about the form of its answer."""

    model: str
    fingerprint: str
    namer: Namer
    user_stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: tuple[str, ...] = ()  # the prompts, to be put before the text
    echo_logprobs: int | None = None  # and with so many logprobs for their tokens
    prompt_logprobs: int | None = None  # vLLM's table of the prompt, in the whole answer
    drop_tokens: bool = False  # max_tokens 0: one token ran and is not shown


class _OpenAIShape:
    """What both shapes share: head, usage, finish."""

    kind = ""
    chunk_kind = ""
    id_prefix = ""

    def __init__(self, generation: Generation, wish: Wish) -> None:
        self.generation = generation
        self.wish = wish
        self._counts = [0] * len(generation.choices)
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": wish.model,
            "system_fingerprint": wish.fingerprint,
        }

    def first(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def last(self) -> Iterator[dict[str, Any]]:
        if self.wish.include_usage:
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if self.wish.include_usage:
            chunk["usage"] = self._usage() if self.wish.continuous_usage else None
        return chunk

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(ids) for ids in self.generation.prompts)
        completion = 0 if self.wish.drop_tokens else sum(self._counts)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if (cached := self._cached()) is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def _cached(self) -> int | None:
        """Prompt tokens found in the prefix cache, each prompt counted once, as its first choice found it: the other
        choices hit what that one computes. None until those have ended, in the usage of a chunk on the way."""
        first = {choice.prompt: choice for choice in reversed(self.generation.choices)}
        ends = [choice.end for choice in first.values()]
        if any(end is None or end.facts is None for end in ends):
            return None
        return sum(end.facts.cached_tokens for end in ends if end is not None and end.facts is not None)

    def _count(self, delta: Delta) -> None:
        self._counts[delta.index] += len(delta.tokens)

    def _finish(self, index: int, end: Finished | None) -> dict[str, Any]:
        """The end of a choice, null until then. ``stop_reason``: the stop string or the client's own stop id that
        matched. ``seed`` asked for again gives the same answer."""
        if end is None:
            return {"finish_reason": None}
        reason = end.stop
        if isinstance(reason, int) and reason not in self.wish.user_stop_ids:
            reason = None
        return {"finish_reason": end.reason, "stop_reason": reason, "seed": self.generation.choices[index].seed}

    def _ids(self, delta: Delta) -> dict[str, Any]:
        if not self.wish.token_ids:
            return {}
        return {"token_ids": [] if self.wish.drop_tokens else [sampled.token for sampled in delta.tokens]}

    def _prompt_table(self, delta: Delta) -> list[dict[str, Any] | None]:
        top = self.wish.prompt_logprobs or 0
        return logprobs.of_prompt(self._prompt_ids(delta.index), delta.tokens[0].prompt or (), self.wish.namer, top)

    def _prompt_ids(self, index: int) -> list[int]:
        return list(self.generation.prompts[self.generation.choices[index].prompt])


class CompletionShape(_OpenAIShape):
    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, generation: Generation, wish: Wish) -> None:
        super().__init__(generation, wish)
        self._offsets = [0] * len(generation.choices)

    def first(self) -> Iterator[dict[str, Any]]:
        """The prompt, unless its logprobs go with it: they come with the first token."""
        echo = self.wish.echo if self.wish.echo_logprobs is None else ()
        for choice in self.generation.choices if echo or self.wish.token_ids else ():
            ids = {"prompt_token_ids": self._prompt_ids(choice.index), "token_ids": []} if self.wish.token_ids else {}
            text = echo[choice.prompt] if echo else ""
            yield self._chunk({"index": choice.index, "text": text, "logprobs": None, "finish_reason": None, **ids})

    def events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if (table := self._echo_table(delta)) is not None:
            text = self.wish.echo[self.generation.choices[delta.index].prompt]
            yield self._chunk({"index": delta.index, "text": text, "logprobs": table, "finish_reason": None})
        self._count(delta)
        if delta.text or delta.end or self.wish.logprobs or self.wish.token_ids:
            yield self._chunk(self._choice(delta))

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = []
        for delta in deltas:
            table = self._echo_table(delta)
            self._count(delta)
            choice = self._choice(delta)
            if table is not None:
                choice["logprobs"] = logprobs.joined(table, choice["logprobs"])
            if self.wish.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_table(delta)
            if self.wish.echo:
                choice["text"] = self.wish.echo[self.generation.choices[delta.index].prompt] + choice["text"]
            if self.wish.token_ids:
                choice["prompt_token_ids"] = self._prompt_ids(delta.index)
            choices.append(choice)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _echo_table(self, delta: Delta) -> dict[str, Any] | None:
        """Logprobs of the echoed prompt, with the first token of a choice; None when they are not wanted or were told."""
        top, index = self.wish.echo_logprobs, delta.index
        if top is None or self._counts[index] or not delta.tokens:
            return None
        table, self._offsets[index] = logprobs.of_echo(
            self._prompt_ids(index), delta.tokens[0].prompt or (), self.wish.namer, top
        )
        return table

    def _choice(self, delta: Delta) -> dict[str, Any]:
        table = None
        if self.wish.logprobs:
            shown = () if self.wish.drop_tokens else delta.tokens
            table, self._offsets[delta.index] = logprobs.of_completion(
                shown, self.wish.namer, self._offsets[delta.index]
            )
        finish = self._finish(delta.index, delta.end)
        if self.wish.drop_tokens and delta.end is not None:
            finish |= {"finish_reason": "length", "stop_reason": None}
        text = "" if self.wish.drop_tokens else delta.text
        return {"index": delta.index, "text": text, "logprobs": table, **finish, **self._ids(delta)}


class ChatShape(_OpenAIShape):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def first(self) -> Iterator[dict[str, Any]]:
        for choice in self.generation.choices:
            delta = {"role": "assistant", "content": "", "refusal": None}
            ids = {"prompt_token_ids": self._prompt_ids(choice.index), "token_ids": []} if self.wish.token_ids else {}
            yield self._chunk({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **ids})

    def events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._count(delta)
        if delta.text or delta.end or self.wish.logprobs or self.wish.token_ids:
            choice = self._choice(delta)
            choice["delta"] = {"content": delta.text} if delta.text else {}
            yield self._chunk(choice)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = []
        for delta in deltas:
            self._count(delta)
            choice = self._choice(delta)
            choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None, "annotations": []}
            if self.wish.token_ids:
                choice["prompt_token_ids"] = self._prompt_ids(delta.index)
            choices.append(choice)
        answer = {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}
        if self.wish.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_table(deltas[0])  # one prompt: beside the choices, as vLLM has it
        return answer

    def _choice(self, delta: Delta) -> dict[str, Any]:
        table = logprobs.of_chat(delta.tokens, self.wish.namer) if self.wish.logprobs else None
        return {"index": delta.index, "logprobs": table, **self._finish(delta.index, delta.end), **self._ids(delta)}
