"""What must hold of any scheduler's iteration, whatever it decided: each function says what does not, one sentence each.

These know nothing of our rules. Beside them stand the promises, which are checked only where they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral

from engine.trace import Shape
from properties.subject import Batch, Holdings, Promises, Told, Work


def blocks(held: Holdings, shape: Shape, promises: Promises) -> Iterator[str]:
    """Conservation: each block of the pool is free once or held, and nothing is beyond the pool."""
    holders: dict[int, list[int]] = {}
    for request, table in sorted(held.tables.items()):
        for block, times in Counter(table).items():
            holders.setdefault(block, []).append(request)
            if times > 1:
                yield f"block {block} stands {times} times in the table of r{request}"
    free = Counter(held.free)
    for block in sorted({*holders, *free} - set(range(shape.blocks))):
        yield f"block {block} is beyond the pool of {shape.blocks}"
    for block in range(shape.blocks):
        owners = holders.get(block, [])
        if owners and free[block]:
            yield f"block {block} is held by r{owners[0]} and free"
        elif not owners and not free[block]:
            yield f"block {block} is held by nobody and not free"
        elif free[block] > 1:
            yield f"block {block} is free {free[block]} times"
        if len(owners) > 1 and not promises.shares:
            yield f"block {block} is held by {' and '.join(f'r{request}' for request in owners)}"
    for block in sorted(set(held.cached) - set(held.free)):
        yield f"block {block} is cached, but not free"


def told(value: object) -> Iterator[str]:
    """What ``step`` must return, before anything is read of it."""
    if not isinstance(value, Told):
        yield f"step returns {_shown(value)}, but must return a Told"
        return
    if not _numbers(value.preempted):
        yield f"step returns preempted {_shown(value.preempted)}, but must tell the numbers of requests"
    pairs = isinstance(value.ended, Sequence) and all(
        isinstance(end, tuple | list) and len(end) == 2 for end in value.ended
    )
    if not pairs or not all(_number(r) and isinstance(reason, str) for r, reason in value.ended):
        yield f"step returns ended {_shown(value.ended)}, but must tell pairs of a request and a reason"


def holdings(value: object) -> Iterator[str]:
    """What ``ledger`` must return."""
    if not isinstance(value, Holdings):
        yield f"ledger returns {_shown(value)}, but must return Holdings"
        return
    for name in ("waiting", "running", "free", "cached"):
        if not _numbers(getattr(value, name)):
            yield f"ledger returns {name} {_shown(getattr(value, name))}, but must list numbers"
    for name, fits in (("tables", _numbers), ("rows", _number)):
        listed = getattr(value, name)
        if not isinstance(listed, Mapping) or not all(_number(key) and fits(held) for key, held in listed.items()):
            yield f"ledger returns {name} {_shown(listed)}, but must map the numbers of requests"


def audit(value: object) -> Iterator[str]:
    """What ``audit`` returns is what does not hold, if it is sentences."""
    if not isinstance(value, list | tuple) or not all(isinstance(sentence, str) for sentence in value):
        yield f"audit returns {_shown(value)}, but must return a list of sentences"


def _numbers(value: object) -> bool:
    return isinstance(value, Sequence) and all(map(_number, value))


def _number(value: object) -> bool:
    return isinstance(value, Integral)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def rows(held: Holdings, shape: Shape) -> Iterator[str]:
    taken: dict[int, int] = {}
    for request, row in sorted(held.rows.items()):
        if not 0 <= row < shape.rows:
            yield f"r{request} has row {row}, but there are {shape.rows}"
        if row in taken:
            yield f"row {row} is held by r{taken[row]} and r{request}"
        taken[row] = request
    for request in held.running:
        if request not in held.rows:
            yield f"r{request} is running without a row"
    for request in held.waiting:
        if request in held.rows or request in held.running:
            yield f"r{request} is waiting and running"
    for request, times in Counter((*held.waiting, *held.running)).items():
        if times > 1:
            yield f"r{request} stands {times} times in the queues"


def plan(batch: Batch, shape: Shape) -> Iterator[str]:
    """What makes a batch impossible to compute at all."""
    for work in batch.work:
        last = work.start + len(work.tokens) - 1
        if not work.tokens or work.start < 0:
            yield f"r{work.request} computes {len(work.tokens)} tokens from position {work.start}"
        elif last // shape.block_size >= len(work.table):
            yield f"r{work.request} computes position {last}, but its table has {len(work.table)} blocks of {shape.block_size}"
    for block in {block for work in batch.work for block in work.table} | {b for pair in batch.copies for b in pair}:
        if not 0 <= block < shape.blocks:
            yield f"the batch names block {block}, but the pool has {shape.blocks}"
    for what, values in (
        ("request r", [work.request for work in batch.work]),
        ("row ", [work.row for work in batch.work]),
    ):
        for value, times in Counter(values).items():
            if times > 1:
                yield f"{what}{value} stands {times} times in one batch"
    for work in batch.work:
        if not 0 <= work.row < shape.rows:
            yield f"r{work.request} computes in row {work.row}, but there are {shape.rows}"


def budget(batch: Batch, shape: Shape) -> Iterator[str]:
    tokens = sum(len(work.tokens) for work in batch.work)
    if tokens > shape.budget:
        yield f"{tokens} tokens in one iteration, the budget is {shape.budget}"


def tokens(work: Work, known: Sequence[int], computed: int, promises: Promises) -> Iterator[str]:
    """``known`` is prompt and generated so far, of which ``computed`` positions are computed. A request that was set back
    starts again at 0, or behind what it found again; whether that is there, reading it will tell."""
    expected = tuple(known[work.start : work.start + len(work.tokens)])
    if work.tokens != expected:
        yield f"r{work.request} computes {work.tokens} from position {work.start}, but {expected} stand there"
    again = promises.preempts and work.start == 0
    if work.start != computed and not again and not promises.shares:
        yield f"r{work.request} computes from position {work.start}, but {computed} positions are computed"
    end = work.start + len(work.tokens)
    if work.samples != (end == len(known)):
        yield f"r{work.request} {'samples' if work.samples else 'does not sample'} at {end} of {len(known)} tokens"


def writes(batch: Batch, held: Mapping[int, tuple[int, ...]], block_size: int) -> Iterator[str]:
    """A block that is written belongs to nobody else, neither in this batch nor by what was held before it."""
    tables = {**held, **{work.request: work.table for work in batch.work}}
    for work in batch.work:
        first, last = work.start // block_size, (work.start + len(work.tokens) - 1) // block_size
        for block in work.table[first : last + 1]:
            for other, table in tables.items():
                if other != work.request and block in table:
                    yield f"r{work.request} writes block {block}, which r{other} holds"


def order(
    first: Sequence[int], waiting: Sequence[int], promises: Promises, priority: Mapping[int, int]
) -> Iterator[str]:
    """``first`` are computed for the first time in this iteration, ``waiting`` never were: nobody was overtaken."""
    for started in first:
        for left in waiting:
            if promises.fifo and priority[left] == priority[started] and left < started:
                yield f"r{started} is computed before r{left}, which arrived first"
            if promises.priorities and priority[left] < priority[started]:
                yield f"r{started} (priority {priority[started]}) is computed before r{left} (priority {priority[left]})"
