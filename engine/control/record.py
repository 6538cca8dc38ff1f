"""What an iteration did: the value that lockstep compares and from which the server makes its answers."""

from __future__ import annotations

import attrs

from engine.control.plan import Plan, Sampled
from engine.control.prefix import BlockKey


@attrs.frozen
class Facts:
    """What happened to one request, reported with its end."""

    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    recomputed_tokens: int  # every token computed in a prefill after a preemption
    replayed_steps: int
    first_iteration: int | None  # of its first admission; None when it never ran
    last_iteration: int
    cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache


@attrs.frozen
class Finished:
    """``reason``: ``stop`` (end-of-sequence, stop id or stop string), ``length``, ``abort`` or ``error``."""

    request: int
    reason: str
    stop: int | str | None = None  # the token id or the string that stopped it
    facts: Facts | None = attrs.field(default=None, eq=False)
    why: str | None = attrs.field(default=None, eq=False)  # it alone could not go on (rules 13.7, 13.8): for its caller
    cause: str | None = attrs.field(default=None, eq=False)  # the exception behind that: for who runs the engine


@attrs.frozen
class StepRecord:
    """One iteration. Requests appear in the order in which the rules treat them."""

    iteration: int
    plan: Plan
    aborted: tuple[Finished, ...] = ()  # aborts applied in this iteration to requests that had not finished
    reaped: tuple[int, ...] = ()  # gave back blocks and row; a waiting request that is aborted holds none (rule 4.3)
    preempted: tuple[int, ...] = ()
    sampled: tuple[
        tuple[int, Sampled], ...
    ] = ()  # those that got a token; a row that has none is in ``finished`` (rule 13.7)
    finished: tuple[Finished, ...] = ()
    error: str | None = None  # why execute raised; every request of the plan is then in ``finished``


@attrs.frozen
class Ledger:
    """The whole control state after commit, as plain values."""

    waiting: tuple[int, ...]  # rule 2 order
    running: tuple[int, ...]  # rule 2 order; finished requests that are not yet reaped included
    tables: dict[int, tuple[int, ...]]
    rows: dict[int, int]
    computed: dict[int, int]
    num_tokens: dict[int, int]
    status: dict[int, str]  # waiting, prefilling, decoding, finished
    blank: tuple[int, ...]  # next to be handed out first
    references: tuple[int, ...]  # per block
    cached: tuple[int, ...] = ()  # published blocks that nobody owns, the next to be evicted first
    published: dict[int, BlockKey] = attrs.field(factory=dict)  # what each published block holds
