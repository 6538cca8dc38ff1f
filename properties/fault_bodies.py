"""The mistakes that need more than one changed line. Each gets the real function and returns the faulty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from engine.control.blocks import BlockPool
from engine.control.scheduler import Scheduler


def takes_an_owned_block(take: Callable[[BlockPool], int]) -> Any:
    def faulty(pool: BlockPool) -> int:
        owned = [block for block, references in enumerate(pool.references) if references]
        if len(owned) < 3:
            return take(pool)
        pool.references[owned[0]] += 1
        return owned[0]

    return faulty


def loses_the_first_of_the_third(release: Callable[..., None]) -> Any:
    """Whatever the order in which blocks go back, table[0] of the third table does not."""
    count = 0

    def faulty(pool: BlockPool, table: list[int]) -> None:
        nonlocal count
        count += 1
        release(pool, table[1:] if count == 3 else table)

    return faulty


def reaps_one_iteration_late(reap: Callable[..., Any]) -> Any:
    seen: set[int] = set()

    def faulty(scheduler: Scheduler) -> Any:
        fresh = [r for r in scheduler.running if r.status == "finished" and r.id not in seen]
        seen.update(r.id for r in fresh)
        scheduler.running = [r for r in scheduler.running if r not in fresh]
        result = reap(scheduler)
        scheduler.running = sorted([*scheduler.running, *fresh], key=lambda r: r.order)
        return result

    return faulty


def second_abort_raises(abort: Callable[..., None]) -> Any:
    def faulty(scheduler: Scheduler, request_id: int) -> None:
        if scheduler.requests[request_id].aborted:
            raise RuntimeError(f"request {request_id} is already aborted")
        abort(scheduler, request_id)

    return faulty


def forgets_aborts_of_preempted(abort: Callable[..., None]) -> Any:
    def faulty(scheduler: Scheduler, request_id: int) -> None:
        request = scheduler.requests.get(request_id)
        if request is None or not (request.preemptions and request.status == "waiting"):
            abort(scheduler, request_id)

    return faulty


def door_without(name: str) -> Any:
    def make(check: Callable[..., int]) -> Any:
        return lambda limits, *rest: check(attrs.evolve(limits, **{name: 1 << 20}), *rest)

    return make
