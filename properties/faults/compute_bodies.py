"""Faulty versions of compute functions, for the faults that one changed line cannot make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

Body = Callable[..., Any]


def resume_trusts_old_rows(execute: Body) -> Body:
    """A request that comes back believes that its first position is still in the cache."""

    def faulty(runner: Any, plan: Any) -> Any:
        resumed = {seat.request for seat in plan.seated if len(seat.tokens) > seat.prompt_len}
        chunks = tuple(
            attrs.evolve(chunk, start=chunk.start + 1, tokens=chunk.tokens[1:])
            if chunk.request in resumed and len(chunk.tokens) > 1
            else chunk
            for chunk in plan.chunks
        )
        return execute(runner, attrs.evolve(plan, chunks=chunks))

    return faulty


def grows_after_moving(apply: Body) -> Body:
    """Blocks are appended to the row as it is after the moves, though the plan names it as it was before."""

    def faulty(state: Any, plan: Any, follower: Any) -> None:
        apply(state, attrs.evolve(plan, grown=()), follower)
        for grow in plan.grown:
            state._grow(grow)

    return faulty


def keeps_the_first_tokens(fill: Body) -> Body:
    """Input tokens are copied only when the number of rows changes: the sampled token is expected to be there already."""

    def faulty(inputs: Any, values: Any, rows: int, width: int) -> None:
        n = len(values["tokens"])
        if getattr(inputs, "last", None) == n > 0:
            values = {**values, "tokens": inputs.host["tokens"][:n].numpy().copy()}
        fill(inputs, values, rows, width)
        inputs.last = n

    return faulty
