"""Who is told of every step, beside those who asked: metrics and the page. And what the clock saw of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import attrs

from engine.control.record import StepRecord

if TYPE_CHECKING:
    from engine.engine import Engine


@attrs.define
class StepTimes:
    """What the clock saw of one step, for metrics. Seconds; one entry per token or request."""

    first_tokens: list[float] = attrs.field(factory=list)
    between_tokens: list[float] = attrs.field(factory=list)
    ends: list[float] = attrs.field(factory=list)
    judged: list[str] = attrs.field(factory=list)  # the engine's reasons of ends that count in Bridge.told instead
    prompt_tokens: int = 0
    text: float = 0.0  # incremental text of requests with stop strings, on the engine thread (rule 13)


class Sink(Protocol):
    """Told of every step on the engine thread, between two iterations. What it raises is logged and goes no further."""

    def step(self, engine: Engine, record: StepRecord, times: StepTimes) -> Callable[[], None] | None:
        """What it returns is called on the event loop, behind the tokens of this step, and holds up no iteration."""
        ...
