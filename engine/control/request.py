"""A request as control sees it: tokens, progress, blocks, row. One progress number, no phases.

Prefill, a chunk of it, decode and recompute after preemption are all "bring ``computed`` up to ``num_tokens``".
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import attrs

from engine.control.prefix import Chain
from engine.control.record import Facts


class Status(StrEnum):
    WAITING = "waiting"  # holds nothing; new or preempted
    PREFILLING = "prefilling"  # from admission until it samples, even with one token left
    DECODING = "decoding"
    FINISHED = "finished"  # its result was delivered; blocks and row go back in the next iteration (rule 4)


class StopText(Protocol):
    """Incremental text with stop strings, fed on the engine thread because a match ends the request (rule 13)."""

    @property
    def matched(self) -> str | None: ...

    def push(self, token: int, may_stop: bool = True, last: bool = False) -> bool:
        """True when a stop string is complete with this token. ``last``: it reaches ``max_tokens``."""
        ...


@attrs.frozen
class Submission:
    """What the door looks at. ``texts`` and ``payloads`` hold one entry per choice, or nothing."""

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    priority: int = 0
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    texts: tuple[StopText, ...] = ()
    payloads: tuple[object, ...] = ()
    salt: str | None = None  # requests with different salts never share a block (rule 11)
    takes_hits: bool = True  # False for prompt logprobs, which need every position computed


class Refusal(Exception):
    """The door's no (rule 1). ``reason`` is a stable word, the message names the number that was wrong."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@attrs.define(eq=False)
class Request:
    id: int  # also the arrival number
    priority: int
    tokens: list[int]  # prompt, then what was generated
    prompt_len: int
    max_tokens: int
    stop_ids: frozenset[int]
    min_tokens: int
    text: StopText | None = None
    payload: object = None
    chain: Chain | None = None  # keys of the full blocks; None when the prefix cache is off
    takes_hits: bool = True

    status: Status = Status.WAITING
    computed: int = 0  # positions whose K/V stands in the blocks
    table: list[int] = attrs.field(factory=list)
    row: int | None = None
    aborted: bool = False
    published: int = 0  # leading blocks of the table whose content was announced
    cached: int = 0  # tokens that the first admission found in the cache

    preemptions: int = 0
    recomputed: int = 0
    replayed_steps: int = 0
    first_iteration: int | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Rule 2: by priority, then arrival; lower first."""
        return (self.priority, self.id)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 for a decoding request."""
        return len(self.tokens) - self.computed

    def facts(self, iteration: int) -> Facts:
        return Facts(
            prompt_tokens=self.prompt_len,
            generated_tokens=self.generated,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            replayed_steps=self.replayed_steps,
            cached_tokens=self.cached,
            first_iteration=self.first_iteration,
            last_iteration=iteration,
        )
