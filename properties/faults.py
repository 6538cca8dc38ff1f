"""The fault catalogue: single mistakes, each armed from outside, each with the checks that must see it.

A fault replaces one function or one line of ``engine.*`` while it is armed; the engine itself has no switch for it. A line
is replaced in the function's own source, compiled in its own module; if the engine's text no longer holds that line, arming
raises, so that a fault cannot fade away unnoticed. ``expect`` are the checks that must fire, each judged alone, somewhere
in the corpus and the generated workloads; every fault has a witness in ``properties/regress``. Z00 proves the plumbing.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import attrs

import engine.control.scheduler
import engine.engine
from engine.control.blocks import BlockPool
from engine.control.limits import Limits
from engine.control.request import Request
from engine.control.rows import RowTable
from engine.control.scheduler import Scheduler

Change = tuple[object, str, Any]  # owner, name, what stands there while the fault is armed


class Faded(Exception):
    """The engine no longer holds the text that a fault replaces: bring the fault up to date."""


@attrs.frozen
class Fault:
    """``change`` is made anew each time the fault is armed, so a fault that counts starts from nothing in every run."""

    id: str
    title: str
    expect: tuple[str, ...]
    change: Callable[[], Change]


@contextmanager
def armed(fault_id: str | None) -> Iterator[None]:
    """Arms a fault of the catalogue for one run; None arms nothing. Raises ``KeyError`` for an unknown id."""
    with ExitStack() as stack:
        if fault_id is not None:
            owner, name, value = CATALOGUE[fault_id].change()
            stack.enter_context(patch.object(owner, name, value))
        yield


def line(owner: object, name: str, old: str, new: str) -> Callable[[], Change]:
    """A change of one place in a function's text. ``old`` must stand there exactly once."""

    def change() -> Change:
        function = inspect.getattr_static(owner, name)
        text = textwrap.dedent(inspect.getsource(function.fget if isinstance(function, property) else function))
        if text.count(old) != 1:
            raise Faded(f"{name} holds {old!r} {text.count(old)} times, but a fault needs it exactly once")
        made: dict[str, Any] = {}
        source = inspect.getmodule(function.fget if isinstance(function, property) else function)
        exec(compile(text.replace(old, new), f"<{name} with a fault>", "exec"), vars(source), made)
        return owner, name, made[name]

    return change


def instead(owner: object, name: str, make: Callable[[Any], Any]) -> Callable[[], Change]:
    """A whole new function. ``make`` gets the one that stands there."""
    return lambda: (owner, name, make(inspect.getattr_static(owner, name)))


# Faults that need more than a line -------------------------------------------------------------------------------


def _takes_an_owned_block(take: Callable[[BlockPool], int]) -> Any:
    def faulty(pool: BlockPool) -> int:
        owned = [block for block, references in enumerate(pool.references) if references]
        if len(owned) < 3:
            return take(pool)
        pool.references[owned[0]] += 1
        return owned[0]

    return faulty


def _loses_the_first_of_the_third(release: Callable[..., None]) -> Any:
    """Whatever the order in which blocks go back, table[0] of the third table does not."""
    count = 0

    def faulty(pool: BlockPool, table: list[int]) -> None:
        nonlocal count
        count += 1
        release(pool, table[1:] if count == 3 else table)

    return faulty


def _skips_a_blocked_head(fits: Callable[..., bool]) -> Any:
    def faulty(scheduler: Scheduler, request: Request) -> bool:
        for at, candidate in enumerate(scheduler.waiting):
            if fits(scheduler, candidate):
                scheduler.waiting.insert(0, scheduler.waiting.pop(at))
                return True
        return False

    return faulty


def _reaps_one_iteration_late(reap: Callable[..., Any]) -> Any:
    seen: set[int] = set()

    def faulty(scheduler: Scheduler) -> Any:
        fresh = [r for r in scheduler.running if r.status == "finished" and r.id not in seen]
        seen.update(r.id for r in fresh)
        scheduler.running = [r for r in scheduler.running if r not in fresh]
        result = reap(scheduler)
        scheduler.running = sorted([*scheduler.running, *fresh], key=lambda r: r.order)
        return result

    return faulty


def _second_abort_raises(abort: Callable[..., None]) -> Any:
    def faulty(scheduler: Scheduler, request_id: int) -> None:
        if scheduler.requests[request_id].aborted:
            raise RuntimeError(f"request {request_id} is already aborted")
        abort(scheduler, request_id)

    return faulty


def _forgets_aborts_of_preempted(abort: Callable[..., None]) -> Any:
    def faulty(scheduler: Scheduler, request_id: int) -> None:
        request = scheduler.requests.get(request_id)
        if request is None or not (request.preemptions and request.status == "waiting"):
            abort(scheduler, request_id)

    return faulty


def _door_without(name: str) -> Any:
    def make(check: Callable[..., int]) -> Any:
        return lambda limits, *rest: check(attrs.evolve(limits, **{name: 1 << 20}), *rest)

    return make


S, P, R = Scheduler, BlockPool, RowTable
_FAULTS = (
    # The block pool
    Fault("A01", "take hands out the block that was freed first", ("ledger",), line(P, "take", "_blank.pop()", "_blank.pop(0)")),
    Fault("A02", "take returns a block that is still owned", ("audit", "ledger"), instead(P, "take", _takes_an_owned_block)),
    Fault("A03", "release drops the last block of a table", ("audit", "ledger", "drain"), line(P, "release", "reversed(table)", "reversed(table[:-1])")),
    Fault("A04", "release pushes a block twice", ("audit", "ledger"), line(P, "release", "self._blank.append(block)", "self._blank += [block, block]")),
    Fault("A05", "the third release loses the first block of the table", ("audit", "ledger", "drain"), instead(P, "release", _loses_the_first_of_the_third)),
    Fault("A07", "the free count says 1 when it is 0", ("raises",), line(P, "num_free", "len(self._blank)", "max(1, len(self._blank))")),
    Fault("A08", "blocks are rounded down instead of up", ("audit", "decisions", "ledger"), line(Limits, "blocks_for", "-(-tokens // self.block_size)", "tokens // self.block_size")),
    Fault("A09", "a table goes back head first", ("ledger",), line(P, "release", "reversed(table)", "list(table)")),
    Fault("A10", "the watermark is compared with < instead of <=", ("decisions",), line(S, "_fits", "need <= self.pool", "need < self.pool")),
    Fault("A12", "the watermark is never waived, so a large request waits for ever", ("decisions", "drain"), line(S, "_fits", "reserve = 0", "pass")),
    # The scheduler
    Fault("S01", "a row is enough to be admitted, blocks or not", ("raises",), instead(S, "_fits", lambda _: lambda scheduler, request: True)),
    Fault("S02", "admission looks at the first chunk instead of the whole context", ("raises",), line(S, "_fits", "request.num_tokens", "min(request.num_tokens, self.limits.max_num_seqs)")),
    Fault("S03", "a head that does not fit is overtaken", ("decisions", "ledger"), instead(S, "_fits", _skips_a_blocked_head)),
    Fault("S05", "a finished request stays one iteration too long", ("decisions", "ledger"), instead(S, "_reap", _reaps_one_iteration_late)),
    Fault("S06", "decoding rows do not count against the budget", ("decisions",), line(S, "plan", "self.limits.max_num_batched_tokens - len(decodes)", "self.limits.max_num_batched_tokens")),
    Fault("S07", "the queue is as long as it likes", ("decisions",), instead(engine.control.scheduler, "check_door", _door_without("max_waiting"))),
    Fault("S08", "the door lets in what the pool can never hold", ("decisions",), instead(engine.control.scheduler, "check_door", _door_without("num_blocks"))),
    Fault("S09", "one token more than max_tokens", ("decisions", "solo"), line(S, "_append", "request.generated >= request.max_tokens", "request.generated > request.max_tokens")),
    Fault("S10", "a stop at the last token is reported as length", ("decisions", "solo"), line(S, "_append", "if may_stop and token", "if request.generated < request.max_tokens and may_stop and token")),
    Fault("S11", "the abort of a preempted request is forgotten", ("decisions", "ledger"), instead(S, "abort", _forgets_aborts_of_preempted)),
    Fault("S12", "a waiting request that is aborted is never told", ("decisions", "solo"), line(S, "_reap", "aborted.append(", "request.row is None or aborted.append(")),
    Fault("S13", "a second abort raises", ("raises",), instead(S, "abort", _second_abort_raises)),
    Fault("S14", "stop tokens count before min_tokens", ("decisions", "solo"), line(S, "_append", "if may_stop and token", "if token")),
    Fault("S15", "ties of priority go to the later arrival", ("decisions", "ledger"), line(Request, "order", "(self.priority, self.id)", "(self.priority, -self.id)")),
    Fault("S16", "a failed step counts what it would have computed", ("ledger",), line(S, "fail", "opened = self._close(plan)", "opened = self._close(plan)\n    for chunk in plan.chunks:\n        self.requests[chunk.request].computed += len(chunk.tokens)")),
    # Preemption
    Fault("P01", "the victim is the oldest", ("decisions", "ledger"), line(S, "_grow", "self.running[-1]", "self.running[0]")),
    Fault("P02", "the victim goes to the back of the queue", ("audit", "ledger"), line(S, "_preempt", "self._enqueue(victim)", "self.waiting.append(victim)")),
    Fault("P03", "the victim keeps its progress", ("audit", "ledger"), line(S, "_preempt", "victim.computed = 0", "pass")),
    Fault("P04", "the victim keeps its blocks", ("audit", "ledger"), line(S, "_preempt", "self._give_back(victim)", "victim.row\n    self.rows.release(row)\n    victim.row = None")),
    Fault("P05", "the victim's row stays taken", ("audit",), line(S, "_preempt", "self._give_back(victim)", "victim.row\n    self.pool.release(victim.table)\n    victim.table, victim.row = [], None")),
    # Rows
    Fault("T03", "compaction moves the row, but the request does not learn of it", ("audit", "rows"), line(S, "_compact", "decoding[src].row = dst", "pass")),
    Fault("T04", "two requests in one row", ("raises",), line(R, "take", "self.owner.index(None)", "max(0, self.owner.index(None) - 1)")),
    Fault("T05", "a swap forgets the request that was displaced", ("audit", "rows"), line(S, "_compact", "self.requests[displaced].row = src", "pass")),
    Fault("T06", "strays are paired in descending order", ("rows",), line(R, "misplaced", "if row >= d)", "if row >= d)[::-1]")),
    Fault("T07", "a returned row is not counted", ("audit",), line(R, "release", "self.num_free += 1", "pass")),
    # Replay
    Fault("G01", "the largest graph that is too small instead of the smallest that is large enough", ("replay",), line(engine.control.scheduler, "decide", "bisect_left(captures, (d, 0)) :", "max(0, bisect_left(captures, (d, 0)) - 1) :")),
    Fault("G02", "scattered rows are replayed", ("replay",), line(engine.control.scheduler, "decide", "rows[-1] != d - 1", "False")),
    Fault("G05", "the width of a graph is not looked at", ("replay",), line(engine.control.scheduler, "decide", "if width >= longest:", "if width:")),
    Fault("G06", "padding counts all rows of the graph", ("replay",), line(engine.control.scheduler, "decide", "captured_rows - d", "captured_rows")),
    # Tokens
    Fault("M01", "two neighbours get each other's token", ("tokens", "solo"), line(S, "commit", "zip(plan.sampling, sampled, strict=True)", "zip(plan.sampling, sampled[::-1], strict=True)")),
    Fault("M02", "a decoding row is fed the token before the last", ("tokens",), line(S, "_decodes", "r.tokens[-1]", "r.tokens[-2]")),
    Fault("M03", "a resumed request is recomputed from its prompt alone", ("tokens",), line(S, "_admit", "tuple(request.tokens)", "tuple(request.tokens[: request.prompt_len])")),
    # What people are told
    Fault("K01", "preemptions are not counted", ("counters",), line(S, "_preempt", "self.counters.preemptions += 1", "pass")),
    Fault("K02", "usage counts the prompt as generated", ("solo",), line(Request, "facts", "generated_tokens=self.generated", "generated_tokens=self.num_tokens")),
    Fault("K03", "the engine stops before finished requests gave back what they hold", ("drain",), line(S, "has_work", "bool(self.requests)", "any(r.status != 'finished' for r in self.requests.values())")),
    # The plumbing
    Fault("Z00", "canary: every audit complains", ("audit",), instead(engine.engine, "audit", lambda _: lambda scheduler: ["canary"])),
)  # fmt: skip
CATALOGUE: dict[str, Fault] = {fault.id: fault for fault in _FAULTS}
