"""The engine's own invariants, checked between iterations without any second opinion.

What it can see: leaks, double ownership, references that do not add up, rows that two requests believe to hold, queues out of
order, progress that overtakes the tokens. What it cannot see: a wrong but consistent decision (a wrong victim, an
overtaken head); that is what the lockstep with ``model_sim`` is for. Everything is re-derived from the requests' own
tables, never from the pool's totals, so that a fault in the books cannot hide itself.

Callable on a live server between two iterations; O(blocks + requests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise

from engine.control.prefix import BlockKey
from engine.control.request import Request, Status
from engine.control.scheduler import Scheduler


def audit(scheduler: Scheduler) -> list[str]:
    """All violations, each message naming block, row and request; empty when everything holds.

    Each part first compares whole values, and looks for whom to name only when they differ.
    """
    return [
        *_blocks(scheduler),
        *_cache(scheduler),
        *_rows(scheduler),
        *_queues(scheduler),
        *_progress(scheduler),
    ]


def _blocks(s: Scheduler) -> Iterator[str]:
    tables = [block for request in (*s.waiting, *s.running) for block in request.table]
    free = (*s.pool.blank(), *s.pool.cached())
    once = sorted((*tables, *free)) == list(range(s.pool.num_blocks))  # each block free or in one table, and only there
    if once and sum(s.pool.references) == len(tables) and all(s.pool.references[block] == 1 for block in tables):
        return
    holders: dict[int, list[int]] = {}
    for request in (*s.waiting, *s.running):
        for block in request.table:
            holders.setdefault(block, []).append(request.id)
        for block, times in _repeated(request.table):
            yield f"block {block} stands {times} times in the table of request {request.id}"
    for block, times in _repeated(free):
        yield f"block {block} stands {times} times among the free ones"
    for block, references in enumerate(s.pool.references):
        held = holders.get(block, [])
        if held and block in free:
            yield f"block {block} is free, but request {held[0]} holds it"
        elif not held and block not in free:
            yield f"block {block} is allocated but no request holds it"
        if references != len(held) and (held or block in free):
            yield f"block {block} counts {references} references, but stands in {len(held)} tables (requests {held})"
    yield from _shared(s, {block: held for block, held in holders.items() if len(held) > 1})


def _repeated(blocks: Collection[int]) -> list[tuple[int, int]]:
    """(block, times) of each block that stands more than once, in ascending order."""
    if len(set(blocks)) == len(blocks):
        return []
    return [(block, times) for block, times in sorted(Counter(blocks).items()) if times > 1]


def _shared(s: Scheduler, holders: dict[int, list[int]]) -> Iterator[str]:
    """A block in two tables must be published, and each holder must be past it: nobody writes a shared block."""
    published = s.pool.published()
    for block, held in holders.items():
        if block not in published:
            yield f"block {block} is held by requests {held}, but its content is not published"
        for request in (s.requests[i] for i in held if i in s.requests):
            if request.computed < (request.table.index(block) + 1) * s.limits.block_size:
                yield f"block {block} is shared by requests {held}, but request {request.id} has yet to write it"


def _cache(s: Scheduler) -> Iterator[str]:
    published, cached = s.pool.published(), s.pool.cached()
    if published and not s.limits.prefix_cache:
        yield f"block {next(iter(published))} carries a hash, but the prefix cache is off"
    for block in cached:
        if block not in published:
            yield f"block {block} waits among the cached ones, but its content is not published"
    if not published:
        return
    blank = set(s.pool.blank())
    for block, key in published.items():
        if block in blank:
            yield f"block {block} is blank, but still carries a hash"
        if s.pool.find(key) != block:
            yield f"block {block} carries a hash that leads to block {s.pool.find(key)}"
    for request in s.running:
        yield from _content(s, request, published)


def _content(s: Scheduler, request: Request, published: dict[int, BlockKey]) -> Iterator[str]:
    """What a published block of a table claims to hold is what the request's own tokens say."""
    size = s.limits.block_size
    for index, block in enumerate(request.table):
        key = published.get(block)
        if key is None:
            continue
        own = tuple(request.tokens[index * size : (index + 1) * size])
        if key.tokens != own:
            yield f"block {block} is published with tokens {key.tokens}, but request {request.id} holds it for {own}"
        if (index + 1) * size > request.computed:
            yield f"block {block} is published, but request {request.id} has computed only {request.computed} positions"


def _rows(s: Scheduler) -> Iterator[str]:
    free = s.rows.owner.count(None)
    if free != s.rows.num_free:
        yield f"{free} rows are free, but the count says {s.rows.num_free}"
    believed = [(request.row, request.id) for request in s.running]
    marked = [(row, owner) for row, owner in enumerate(s.rows.owner) if owner is not None]
    if len(believed) == len(marked) and set(believed) == set(marked):
        return
    seen: dict[int, int] = {}
    for request in s.running:
        if request.row is None:
            yield f"request {request.id} is {request.status}, but has no row"
            continue
        if request.row in seen:
            yield f"row {request.row} is held by requests {seen[request.row]} and {request.id}"
        seen[request.row] = request.id
    for row, owner in enumerate(s.rows.owner):
        if owner is not None and seen.get(row) != owner:
            yield f"row {row} is marked as request {owner}'s, but no running request holds it as that"
        if owner is None and row in seen:
            yield f"row {row} is marked free, but request {seen[row]} holds it"


def _queues(s: Scheduler) -> Iterator[str]:
    for name, queue in (("waiting", s.waiting), ("running", s.running)):
        for before, after in pairwise(queue):
            if before.order >= after.order:
                yield f"the {name} queue has request {before.id} before request {after.id}: orders {before.order}, {after.order}"
    for request in s.waiting:
        if request.status is not Status.WAITING:
            yield f"request {request.id} stands in the waiting queue, but is {request.status}"
        if request.table or request.row is not None or request.computed:
            held = f"blocks {request.table}, row {request.row}, computed {request.computed}"
            yield f"request {request.id} is waiting, but holds {held}"
    for request in s.running:
        if request.status is Status.WAITING:
            yield f"request {request.id} stands among the running ones, but is waiting"
    queued = [r.id for r in (*s.waiting, *s.running)]
    if len(queued) == len(s.requests) and s.requests.keys() == set(queued):
        return
    known = Counter(queued)
    for request_id in sorted(s.requests.keys() - known.keys()):
        yield f"request {request_id} is known, but stands in no queue"
    for request_id, times in known.items():
        if times > 1 or request_id not in s.requests:
            known_as = "known" if request_id in s.requests else "unknown"
            yield f"request {request_id} stands {times} times in the queues and is {known_as}"


def _progress(s: Scheduler) -> Iterator[str]:
    partial = [r.id for r in s.running if r.status is Status.PREFILLING]
    if len(partial) > 1:
        yield f"requests {partial} are part-prefilled, but at most one may be"
    for request in s.running:
        yield from _one(s, request)


def _one(s: Scheduler, r: Request) -> Iterator[str]:
    capacity = len(r.table) * s.limits.block_size
    if r.computed > capacity:
        yield f"request {r.id} has {r.computed} computed positions, but its {len(r.table)} blocks hold {capacity}"
    # A token sampled just now gets its block in the next iteration's growth, never earlier (rule 5).
    if r.status is not Status.FINISHED and len(r.table) not in (
        s.limits.blocks_for(r.num_tokens),
        s.limits.blocks_for(r.num_tokens - 1),
    ):
        yield f"request {r.id} holds {len(r.table)} blocks for {r.num_tokens} tokens of block size {s.limits.block_size}"
    if r.status is Status.DECODING and r.computed != r.num_tokens - 1:
        yield f"request {r.id} is decoding with {r.computed} of {r.num_tokens} tokens computed, but only the last may be missing"
    if r.status is Status.PREFILLING and r.computed >= r.num_tokens:
        yield f"request {r.id} is prefilling, but has all {r.num_tokens} tokens computed"
    if r.generated > r.max_tokens:
        yield f"request {r.id} generated {r.generated} tokens, but max_tokens is {r.max_tokens}"
