"""One HTTP exchange through the bare ASGI interface: a client that reads, stalls or leaves, and what it was sent.

A server that speaks ASGI 2.3 swallows what is sent to a client that is gone, one that speaks 2.4 raises ``OSError``; clients
come in both kinds. What is sent is read as a client would read it: frames, JSON, and a text for each choice.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from properties.checks import Fact, differing
from properties.tally import Caller

Answer = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

STALL = 6  # iterations that a client which stalls does not read, after the first that it reads


class Client:
    """``requests``: the choices of the answer, in order. ``manner``: one of ``engine.trace.CLIENTS``."""

    def __init__(self, requests: range, manner: str, spec: str) -> None:
        self.requests = requests
        self.streams = manner != "whole"
        self.stalls = manner == "stalls" and len(requests) == 1  # of several choices, one may end the others' answer
        self.task: asyncio.Task[None] | None = None
        self.left = False
        self.silent_after: int | None = None  # messages that had come when it left
        self.ends: dict[int, str] = {}  # reasons, as the specification has them
        self.status = 0
        self.messages = 0
        self.texts = [""] * len(requests)
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.finishes: list[list[tuple[str, object]]] = [[] for _ in requests]
        self.usage: dict[str, int] | None = None
        self.ids: set[str] = set()
        self.errors: list[str | None] = []
        self.dones = 0
        self.after_done = 0  # messages and events behind the end
        self.commits = False  # its text is made on the engine's side, for stop strings
        self.happened: Counter[str] = Counter()  # for the floors
        self._spec = spec
        self._gone = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._age = 0  # iterations since it asked
        self._over = False

    # The exchange ------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, answer: Answer) -> None:
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": self._spec}, "headers": []}
        self.task = loop.create_task(self._run(answer, scope))

    async def _run(self, answer: Answer, scope: dict[str, Any]) -> None:
        await answer(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._reading.wait()
        if self._gone.is_set():
            if self._spec >= "2.4":
                raise OSError("the client is gone")
            return
        self.messages += 1
        self.after_done += self._over
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if self.streams and self.status == 200:
            self._read_events(message["body"])
        else:
            self._read_whole(json.loads(message["body"]))
        self._over = not message.get("more_body", False)

    def leave(self) -> None:
        """Twice is once; after the answer it changes nothing."""
        if not self.left and not self.done:
            self.left = True
            self.silent_after = self.messages
        self._gone.set()
        self._reading.set()

    def tick(self) -> None:
        """An iteration is about to run."""
        self._age += 1
        if self.stalls and self._age == 2:
            self._reading.clear()
        if self._age == 2 + STALL:
            self.resume()

    def resume(self) -> None:
        self._reading.set()

    @property
    def reads(self) -> bool:
        return self._reading.is_set()

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()

    # What was sent -------------------------------------------------------------------------------------------------

    def _read_events(self, body: bytes) -> None:
        for frame in body.decode().split("\n\n"):
            if not frame:
                continue
            self.after_done += self.dones
            payload = frame.removeprefix("data: ")
            if payload == "[DONE]":
                self.dones += 1
            else:
                self._read(json.loads(payload))

    def _read_whole(self, body: Any) -> None:
        self._read(body)
        self.dones += 1

    def _read(self, event: Any) -> None:
        if "error" in event:
            self.errors.append(event["error"]["code"])
            return
        self.ids.add(event["id"])
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event["choices"]:
            at = choice["index"]
            if self.streams and not self.stalls and len(choice["token_ids"]) > 1:
                self.happened["deliveries merged"] += 1
                self.happened["deliveries merged with an end"] += choice["finish_reason"] is not None
                self.happened["deliveries merged with stop strings"] += self.commits
            self.texts[at] += choice["text"]
            self.tokens[at] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                self.finishes[at].append((choice["finish_reason"], choice["stop_reason"]))

    # What should have been sent ------------------------------------------------------------------------------------

    def facts(self, known: Callable[[int], tuple[Caller, int]]) -> tuple[Fact, ...]:
        """``known`` gives a request's caller and how many tokens it has generated by now."""
        if self.left:
            return self._facts_of_leaving()
        pairs: list[tuple[str, object, object]] = []
        cut = any(reason in ("error", "abort") for reason in self.ends.values())
        ended = len(self.ends) == len(self.requests)
        for at, request in enumerate(self.requests):
            caller, generated = known(request)
            if self.ends.get(request) in ("stop", "length"):
                text, tokens = caller.text.text, generated
            else:
                text, tokens = caller.text.told(generated), generated
            mine = self.texts[at]
            behind = not self.reads or (not self.streams and (cut or not ended))
            if mine != text and not (behind and text.startswith(mine)):
                pairs.append((f"text sent of r{request}", ascii(mine), ascii(text)))
            if len(self.tokens[at]) != tokens and not (behind and len(self.tokens[at]) < tokens):
                pairs.append((f"tokens sent of r{request}", len(self.tokens[at]), tokens))
        if self.reads:
            pairs += self._terminals(known, cut, ended)
        return tuple(Fact(name, str(mine), str(theirs)) for name, mine, theirs in pairs if mine != theirs)

    def _terminals(
        self, known: Callable[[int], tuple[Caller, int]], cut: bool, ended: bool
    ) -> list[tuple[str, object, object]]:
        """Each choice ends once; then usage; then the end of the stream, once and last."""
        name = f"answer of r{self.requests[0]}"
        pairs: list[tuple[str, object, object]] = [
            (f"{name}: over", self.done, cut or ended),
            (f"{name}: ends of it", self.dones, int(cut or ended)),
            (f"{name}: behind its end", self.after_done, 0),
            (f"{name}: one id", len(self.ids) > 1, False),
        ]
        if cut:
            code = "engine_error" if "error" in self.ends.values() else "server_shutdown"
            pairs.append((f"{name}: errors", self.errors, [code]))
            return pairs
        pairs.append((f"{name}: errors", self.errors, []))
        usage: dict[str, int] | None = None
        if ended:
            counts = [known(request) for request in self.requests]
            prompt, spent = counts[0][0].prompt_len, sum(generated for _, generated in counts)
            usage = {"prompt_tokens": prompt, "completion_tokens": spent, "total_tokens": prompt + spent}
        sent = None if self.usage is None else {key: self.usage.get(key) for key in usage or self.usage}
        pairs.append((f"{name}: usage", sent, usage))
        for at, request in enumerate(self.requests):
            reason = self.ends.get(request) if self.streams or ended else None
            told = [finish for finish, _ in self.finishes[at]]
            pairs.append((f"ends of r{request}", told, [reason] if reason else []))
        return pairs

    def _facts_of_leaving(self) -> tuple[Fact, ...]:
        return differing(
            [
                (f"r{self.requests[0]} left: served on", not self.done, False),
                (f"r{self.requests[0]} left: sent afterwards", self.messages, self.silent_after),
            ]
        )
