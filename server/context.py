"""What every endpoint needs, handed to it in one value, and the way from a read request to a sent answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

import attrs
import structlog
from fastapi import Request
from starlette.types import Send

from engine import __version__
from engine.control.door import most_tokens
from engine.engine import Engine
from engine.loading.model import LoadedModel
from engine.request import InvalidRequest, SamplingParams
from server import tracing
from server.answer import Shape, reply
from server.bridge import Bridge
from server.errors import ApiError, of_invalid
from server.fields import FieldJudge
from server.live import Generation
from server.live_view import LiveView
from server.metrics import Metrics
from server.prompts import Desk, Prompt, Reading, make_choices
from server.settings import ServerSettings
from server.shown import brief

log = structlog.get_logger("lockstep.answer")

TORCH = metadata.version("torch")
# Rows of the table that change no byte.
_SIZES = frozenset({"weights", "KV cache", "context", "prefix cache", "batch", "recorded graphs"})


@attrs.define
class Context:
    settings: ServerSettings
    bridge: Bridge
    metrics: Metrics
    desk: Desk
    judge: FieldJudge
    started: float  # seconds since the epoch
    live: LiveView = attrs.field(factory=LiveView)
    turned_away: int = 0  # requests, by a glance at the queue

    @property
    def model(self) -> LoadedModel:
        return self.bridge.engine.model

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served; the first one is told where nobody asked by name."""
        return self.settings.served_model_name or (self.model.name,)

    def reading(self, add_special_tokens: bool, parse_special: bool) -> Reading:
        limits = self.bridge.engine.limits
        return Reading(
            self.model, limits.max_model_len, self.settings.max_prompt_bytes, add_special_tokens, parse_special
        )

    def model_name(self, asked: str | None) -> str:
        """Raises a 404 for a model that is not served. No name at all means the one there is."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(repr(name) for name in self.names)
            raise ApiError(
                404, f"model is {brief(asked)}, but only {served} is served", code="model_not_found", param="model"
            )
        return asked

    def glance(self, answers: int = 1) -> None:
        """Raises what the door would say now to ``answers`` requests that it could serve: 503, or 429 for a full queue. Costs
        nothing, so it comes before any work for them; the door judges the queue again as it then is."""
        if (refusal := self.bridge.refusal()) is not None:
            raise refusal
        room, waiting = self.bridge.engine.limits.max_waiting, self.bridge.num_waiting
        if waiting + answers > room >= answers:  # more than the whole queue is a mistake, and told as one
            self.turned_away += answers
            message = f"{waiting} requests are waiting, and the queue holds {room}; try again later"
            raise ApiError(429, message, code="queue_full")

    def fingerprint(self) -> str:
        """Changes whenever the same seed might give other bytes: with version, torch, model, device or compute path."""
        rows = [row for row in self.bridge.engine.capacity() if row[0] not in _SIZES]
        facts = repr((__version__, TORCH, self.model.name, self.model.weight_types, rows))
        return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    async def answer(
        self,
        send: Send,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        shape: Callable[[Generation], Shape],
        *,
        stream: bool,
        priority: int = 0,
        salt: str | None = None,
        names: Mapping[str, str] | None = None,
        fit: bool = False,
    ) -> None:
        """Submits, sends, and leaves nothing behind, however it ends. ``names``: see ``of_invalid``. ``fit``: nobody asked for
        ``params.max_tokens``, so each prompt gets as much of it as context and pool leave."""
        engine = self.bridge.engine
        total = len(prompts) * params.n
        if total > engine.limits.max_waiting:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n = {params.n} are {total} answers, but at most "
                f"{engine.limits.max_waiting} fit into the queue",
                code="invalid_value",
                param="n",
            )
        try:
            each = _fitting(engine, prompts, params) if fit else (params,) * len(prompts)
            for prompt, its in zip(prompts, each, strict=True):  # before texts are made for what can never be served
                engine.check(prompt.ids, its)
        except InvalidRequest as error:
            raise of_invalid(error, names) from None
        self.glance(total)
        choices = await self.desk.run(make_choices, prompts, params, engine.model)
        try:
            generation = await self.bridge.submit([p.ids for p in prompts], params, choices, priority, salt, each)
        except InvalidRequest as error:
            raise of_invalid(error, names) from None
        span = tracing.current.get()
        if span is not None:
            span.asked(self.names[0], each[0], stream)
        limit = self.settings.request_timeout
        timer = asyncio.get_running_loop().call_later(limit, self._time_out, generation) if limit else None
        try:
            await reply(send, shape(generation), generation, stream=stream, ping_interval=self.settings.ping_interval)
        finally:
            if timer is not None:
                timer.cancel()
            self.bridge.close(generation)
            if span is not None:
                span.answered(generation)
            _log(generation)

    def _time_out(self, generation: Generation) -> None:
        """What came so far was sent; the rest is one error."""
        if not generation.ended:
            self.metrics.outlet.timed_out += 1
            limit = self.settings.request_timeout
            generation.fail(
                ApiError(504, f"the request ran longer than {limit:g} seconds and was ended", code="request_timeout")
            )


def _log(generation: Generation) -> None:
    """One line for an answer, with numbers only: neither prompt nor text."""
    first, now = generation.first_token, time.monotonic()
    ends = [choice.end for choice in generation.choices]
    log.info(
        "answer",
        choices=len(ends),
        prompt_tokens=sum(len(ids) for ids in generation.prompts),
        completion_tokens=generation.num_tokens,
        cached_tokens=sum(end.facts.cached_tokens for end in ends if end is not None and end.facts is not None),
        ended="error"
        if generation.failed
        else ",".join(sorted({end.reason if end is not None else "open" for end in ends})),
        ttft=None if first is None else round(first - generation.arrived, 4),
        seconds=round(now - generation.arrived, 4),
    )


def _fitting(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[SamplingParams, ...]:
    """``params`` for each prompt, ``max_tokens`` lowered to what its context leaves; 1 where that is nothing, for the door to
    refuse. Prompts do not lower each other's: an answer depends on its own prompt alone."""
    assert params.max_tokens is not None
    made = {params.max_tokens: params}

    def fitted(length: int) -> SamplingParams:
        most = max(1, min(params.max_tokens or 1, most_tokens(engine.limits, length)))
        if most not in made:
            made[most] = attrs.evolve(params, max_tokens=most)
        return made[most]

    return tuple(fitted(len(prompt.ids)) for prompt in prompts)


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
