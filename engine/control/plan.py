"""The plan: the only thing that passes from control to compute, and what comes back.

A plan is a frozen value. The row operations come first and are applied in this order, before any kernel runs, so
that a step that raises leaves the rows as control believes them to be:

    vacated   rows given back by reaped and preempted requests
    grown     one more block for a running request (row as it was before the moves)
    moves     compaction (rule 7): the row's whole state is relabelled, no K/V moves
    seated    newly admitted requests, each with everything that compute must know about it

Then the work: ``chunks`` (prefill, in order) and ``decodes`` (one token each, in ascending row order).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs


@attrs.frozen
class Grow:
    request: int
    row: int
    block: int


@attrs.frozen
class Move:
    """Row ``src`` is relabelled ``dst``; with ``swap`` the two rows change places (``dst`` held a prefilling request)."""

    request: int
    src: int
    dst: int
    swap: bool


@attrs.frozen
class Seat:
    """A request takes a row. ``tokens`` is prompt plus generated so far (longer than the prompt after preemption)."""

    request: int
    row: int
    tokens: tuple[int, ...]
    prompt_len: int
    table: tuple[int, ...]
    sampling: object


@attrs.frozen
class Chunk:
    """Positions ``start .. start + len(tokens) - 1`` of a prefilling request; ``samples`` when the last one is computed."""

    request: int
    row: int
    start: int
    tokens: tuple[int, ...]
    samples: bool


@attrs.frozen
class Decode:
    """One decoding row: ``token`` sits at ``position`` (= num_tokens - 1) and the next one is sampled."""

    request: int
    row: int
    position: int
    token: int


@attrs.frozen
class Replay:
    """Replay the graph captured for ``rows`` rows and block tables of ``width`` blocks; ``padding`` rows are inert."""

    rows: int
    width: int
    padding: int


@attrs.frozen
class Eager:
    """Decode without a graph, because of ``reason``: ``scattered`` or ``uncaptured`` (rule 12)."""

    reason: str


@attrs.frozen
class Plan:
    iteration: int
    vacated: tuple[int, ...] = ()
    grown: tuple[Grow, ...] = ()
    moves: tuple[Move, ...] = ()
    seated: tuple[Seat, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    launch: Replay | Eager | None = None

    @property
    def forwards(self) -> bool:
        """Whether compute has tokens to run; a plan that only reaps has none."""
        return bool(self.chunks or self.decodes)

    @property
    def num_tokens(self) -> int:
        return sum([len(chunk.tokens) for chunk in self.chunks]) + len(self.decodes)

    @property
    def sampling(self) -> tuple[Chunk | Decode, ...]:
        """What samples in this iteration, in the order in which ``Runner.execute`` returns the tokens."""
        return (*[chunk for chunk in self.chunks if chunk.samples], *self.decodes) if self.chunks else self.decodes


@attrs.frozen
class Logprobs:
    """Natural-log probabilities of the raw distribution: of the chosen token, and of the most likely ones, best first."""

    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


NO_TOKEN = -1


@attrs.frozen
class Sampled:
    """What compute returns for one sampling row. ``failure``: why the row has no token (rule 13.7); then nothing else is told."""

    token: int  # NO_TOKEN with ``failure``
    logprobs: Logprobs | None = None
    digest: str | None = None  # hex digest of the row's raw fp32 logits, when the request asked for it
    prompt: tuple[Logprobs, ...] | None = None  # of each prompt token but the first, with the request's first token
    failure: str | None = None


class Runner(Protocol):
    """Compute, as control sees it."""

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        """Applies the row operations, runs the work and returns one ``Sampled`` for each entry of ``plan.sampling``.

        Called for every plan, also for one without work, so that the row operations always arrive.
        """
        ...
