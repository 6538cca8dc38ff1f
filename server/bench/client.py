"""One request as a client sees it: when it was due, sent, answered for the first time, and every time after that."""

from __future__ import annotations

import json
import time
from typing import Any

import attrs
import httpx2

from server.bench.requests import Ask

APIS = ("completions", "chat", "generate")


@attrs.define
class Answer:
    """Times are seconds on ``time.perf_counter``. ``arrivals``: one per event that brought text or tokens."""

    due: float  # when the load wanted it sent: latencies count from here, or a slow server would hide its own queue
    arrivals: list[float] = attrs.field(factory=list)
    end: float = 0.0
    prompt_tokens: int | None = None  # as the server counted them
    output_tokens: int | None = None
    text: str = ""
    error: str | None = None  # why it does not count: a status, an error event, or a broken connection

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the time between two events of one answer."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


@attrs.frozen
class Target:
    """Where and how to ask. ``model`` is what requests name."""

    url: str
    model: str
    api: str = "completions"
    key: str | None = None

    def request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Path and body: greedy, streamed, end-of-sequence ignored, so that the length of every answer is fixed."""
        fixed = {"temperature": 0, "ignore_eos": True, "stream": True}
        if self.api == "generate":
            field = "text" if isinstance(ask.prompt, str) else "input_ids"
            sampling = {"max_new_tokens": ask.gen, "temperature": 0, "ignore_eos": True}
            return "/generate", {field: _plain(ask.prompt), "sampling_params": sampling, "stream": True}
        body = {"model": self.model, "max_tokens": ask.gen, **fixed, "stream_options": {"include_usage": True}}
        if self.api == "chat":
            if not isinstance(ask.prompt, str):
                raise ValueError("the chat endpoint takes text, but this list holds token ids")
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": ask.prompt}]}
        return "/v1/completions", {**body, "prompt": _plain(ask.prompt)}


def _plain(prompt: tuple[int, ...] | str) -> list[int] | str:
    return prompt if isinstance(prompt, str) else list(prompt)


async def ask_once(client: httpx2.AsyncClient, target: Target, ask: Ask, due: float | None = None) -> Answer:
    """Sends one request and reads the whole answer. Never raises for what the server did: ``Answer.error`` says it."""
    answer = Answer(time.perf_counter() if due is None else due)
    path, body = target.request(ask)
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    try:
        async with client.sse(target.url + path, method="POST", json=body, headers=headers) as events:
            if events.response.status_code != 200:
                await events.response.aread()
                answer.error = f"{events.response.status_code} {events.response.text[:200]}"
            else:
                async for event in events:
                    if event.data == "[DONE]":
                        break
                    _take(answer, json.loads(event.data), target.api)
    except (httpx2.HTTPError, json.JSONDecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end = time.perf_counter()
    if answer.error is None and not answer.arrivals:
        answer.error = "the answer was empty"
    return answer


def _take(answer: Answer, event: dict[str, Any], api: str) -> None:
    if "error" in event:
        answer.error = str(event["error"])[:200]
        return
    if api == "generate":
        meta = event.get("meta_info") or {}
        counted = meta.get("completion_tokens", 0)
        if counted and counted != answer.output_tokens:
            answer.arrivals.append(time.perf_counter())
        answer.prompt_tokens, answer.output_tokens = meta.get("prompt_tokens"), counted
        answer.text = event.get("text", "")
        return
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens, answer.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    choices = event.get("choices")
    if not choices:
        return
    choice = choices[0]
    said = choice if api == "completions" else choice.get("delta") or {}
    piece = said.get("text" if api == "completions" else "content")
    if piece is None or (not piece and ("role" in said or choice.get("finish_reason") is not None)):
        return  # who speaks, or nothing but the end
    answer.arrivals.append(time.perf_counter())
    answer.text += piece
