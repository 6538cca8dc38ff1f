"""The fault catalogue: single mistakes, each armed from outside, each with the checks that must see it.

``expect`` are the checks that must fire, each judged alone, somewhere in the corpus and the generated workloads; every
fault has a witness in ``properties/regress``. Z00 proves the plumbing. Ids: A block pool, S scheduler, P preemption, T rows,
G replay, M tokens, K what people are told; numbers leave gaps where a fault needs a part that does not exist yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import engine.engine as facade
from engine.control import prefix, scheduler
from engine.control.blocks import BlockPool
from engine.control.limits import Limits
from engine.control.request import Request
from engine.control.rows import RowTable
from engine.control.scheduler import Scheduler
from properties import fault_bodies
from properties.arming import Faded, Fault, instead, line

__all__ = ["CATALOGUE", "Faded", "Fault", "armed"]


@contextmanager
def armed(fault_id: str | None) -> Iterator[None]:
    """Arms a fault of the catalogue for one run; None arms nothing. Raises ``KeyError`` for an unknown id."""
    if fault_id is None:
        yield
        return
    owner, name, value = CATALOGUE[fault_id].change()
    with patch.object(owner, name, value):
        yield


_FAULTS = (
    # The block pool
    Fault(
        "A01",
        "take hands out the block that was freed first",
        ("ledger",),
        line(BlockPool, "take", "_blank.pop()", "_blank.pop(0)"),
    ),
    Fault(
        "A02",
        "take returns a block that is still owned",
        ("audit", "ledger"),
        instead(BlockPool, "take", fault_bodies.takes_an_owned_block),
    ),
    Fault(
        "A03",
        "release drops the last block of a table",
        ("audit", "ledger", "drain"),
        line(BlockPool, "release", "reversed(table)", "reversed(table[:-1])"),
    ),
    Fault(
        "A04",
        "release pushes a block twice",
        ("audit", "ledger"),
        line(BlockPool, "release", "self._blank.append(block)", "self._blank += [block, block]"),
    ),
    Fault(
        "A05",
        "the third release loses the first block of the table",
        ("audit", "ledger", "drain"),
        instead(BlockPool, "release", fault_bodies.loses_the_first_of_the_third),
    ),
    Fault(
        "A07",
        "the free count says 1 when it is 0",
        ("raises",),
        line(BlockPool, "num_free", "len(self._blank)", "max(1, len(self._blank))"),
    ),
    Fault(
        "A08",
        "blocks are rounded down instead of up",
        ("audit", "decisions", "ledger"),
        line(Limits, "blocks_for", "-(-tokens // self.block_size)", "tokens // self.block_size"),
    ),
    Fault(
        "A09", "a table goes back head first", ("ledger",), line(BlockPool, "release", "reversed(table)", "list(table)")
    ),
    Fault(
        "A10",
        "the watermark is compared with < instead of <=",
        ("decisions",),
        line(Scheduler, "_fits", "unowned <= self.pool", "unowned < self.pool"),
    ),
    Fault(
        "A12",
        "the watermark is never waived, so a large request waits for ever",
        ("decisions", "drain"),
        line(Scheduler, "_fits", "reserve = 0", "pass"),
    ),
    # The scheduler
    Fault(
        "S01",
        "a row is enough to be admitted, blocks or not",
        ("raises",),
        instead(Scheduler, "_fits", lambda _: lambda scheduler, request, hits: True),
    ),
    Fault(
        "S02",
        "admission looks at the first chunk instead of the whole context",
        ("raises",),
        line(Scheduler, "_fits", "request.num_tokens", "min(request.num_tokens, self.limits.max_num_seqs)"),
    ),
    Fault(
        "S03",
        "a head that does not fit is overtaken",
        ("decisions", "ledger"),
        line(
            Scheduler,
            "_admit",
            "request = self.waiting[0]",
            "request = next((r for r in self.waiting if self._fits(r, self._hits(r))), self.waiting[0])",
        ),
    ),
    Fault(
        "S05",
        "a finished request stays one iteration too long",
        ("decisions", "ledger"),
        instead(Scheduler, "_reap", fault_bodies.reaps_one_iteration_late),
    ),
    Fault(
        "S06",
        "decoding rows do not count against the budget",
        ("decisions",),
        line(
            Scheduler, "plan", "self.limits.max_num_batched_tokens - len(decodes)", "self.limits.max_num_batched_tokens"
        ),
    ),
    Fault(
        "S07",
        "the queue is as long as it likes",
        ("decisions",),
        instead(scheduler, "check_door", fault_bodies.door_without("max_waiting")),
    ),
    Fault(
        "S08",
        "the door lets in what the pool can never hold",
        ("decisions",),
        instead(scheduler, "check_door", fault_bodies.door_without("num_blocks")),
    ),
    Fault(
        "S09",
        "one token more than max_tokens",
        ("decisions", "solo"),
        line(Scheduler, "_append", "request.generated >= request.max_tokens", "request.generated > request.max_tokens"),
    ),
    Fault(
        "S10",
        "a stop at the last token is reported as length",
        ("decisions", "solo"),
        line(
            Scheduler,
            "_append",
            "if may_stop and token",
            "if request.generated < request.max_tokens and may_stop and token",
        ),
    ),
    Fault(
        "S11",
        "the abort of a preempted request is forgotten",
        ("decisions", "ledger"),
        instead(Scheduler, "abort", fault_bodies.forgets_aborts_of_preempted),
    ),
    Fault(
        "S12",
        "a waiting request that is aborted is never told",
        ("decisions", "solo"),
        line(Scheduler, "_reap", "aborted.append(", "request.row is None or aborted.append("),
    ),
    Fault("S13", "a second abort raises", ("raises",), instead(Scheduler, "abort", fault_bodies.second_abort_raises)),
    Fault(
        "S14",
        "stop tokens count before min_tokens",
        ("decisions", "solo"),
        line(Scheduler, "_append", "if may_stop and token", "if token"),
    ),
    Fault(
        "S15",
        "ties of priority go to the later arrival",
        ("decisions", "ledger"),
        line(Request, "order", "(self.priority, self.id)", "(self.priority, -self.id)"),
    ),
    Fault(
        "S16",
        "a failed step counts what it would have computed",
        ("ledger",),
        line(
            Scheduler,
            "fail",
            "opened = self._close(plan)",
            "opened = self._close(plan)\n"
            "    for chunk in plan.chunks:\n"
            "        self.requests[chunk.request].computed += len(chunk.tokens)",
        ),
    ),
    # Preemption
    Fault(
        "P01",
        "the victim is the oldest",
        ("decisions", "ledger"),
        line(Scheduler, "_grow", "self.running[-1]", "self.running[0]"),
    ),
    Fault(
        "P02",
        "the victim goes to the back of the queue",
        ("audit", "ledger"),
        line(Scheduler, "_preempt", "self._enqueue(victim)", "self.waiting.append(victim)"),
    ),
    Fault(
        "P03",
        "the victim keeps its progress",
        ("audit", "ledger"),
        line(Scheduler, "_preempt", "victim.computed = 0", "pass"),
    ),
    Fault(
        "P04",
        "the victim keeps its blocks",
        ("audit", "ledger"),
        line(
            Scheduler,
            "_preempt",
            "self._give_back(victim)",
            "victim.row\n    self.rows.release(row)\n    victim.row = None",
        ),
    ),
    Fault(
        "P05",
        "the victim's row stays taken",
        ("audit",),
        line(
            Scheduler,
            "_preempt",
            "self._give_back(victim)",
            "victim.row\n    self.pool.release(victim.table)\n    victim.table, victim.row = [], None",
        ),
    ),
    # Rows
    Fault(
        "T03",
        "compaction moves the row, but the request does not learn of it",
        ("audit", "rows"),
        line(Scheduler, "_compact", "decoding[src].row = dst", "pass"),
    ),
    Fault(
        "T04",
        "two requests in one row",
        ("raises",),
        line(RowTable, "take", "self.owner.index(None)", "max(0, self.owner.index(None) - 1)"),
    ),
    Fault(
        "T05",
        "a swap forgets the request that was displaced",
        ("audit", "rows"),
        line(Scheduler, "_compact", "self.requests[displaced].row = src", "pass"),
    ),
    Fault(
        "T06",
        "strays are paired in descending order",
        ("rows",),
        line(RowTable, "misplaced", "if row >= d)", "if row >= d)[::-1]"),
    ),
    Fault("T07", "a returned row is not counted", ("audit",), line(RowTable, "release", "self.num_free += 1", "pass")),
    # Replay
    Fault(
        "G01",
        "the largest graph that is too small instead of the smallest that is large enough",
        ("replay",),
        line(scheduler, "decide", "bisect_left(captures, (d, 0)) :", "max(0, bisect_left(captures, (d, 0)) - 1) :"),
    ),
    Fault("G02", "scattered rows are replayed", ("replay",), line(scheduler, "decide", "rows[-1] != d - 1", "False")),
    Fault(
        "G05",
        "the width of a graph is not looked at",
        ("replay",),
        line(scheduler, "decide", "if width >= longest:", "if width:"),
    ),
    Fault(
        "G06",
        "padding counts all rows of the graph",
        ("replay",),
        line(scheduler, "decide", "captured_rows - d", "captured_rows"),
    ),
    # Tokens
    Fault(
        "M01",
        "two neighbours get each other's token",
        ("tokens", "solo"),
        line(
            Scheduler,
            "commit",
            "zip(plan.sampling, sampled, strict=True)",
            "zip(plan.sampling, sampled[::-1], strict=True)",
        ),
    ),
    Fault(
        "M02",
        "a decoding row is fed the token before the last",
        ("tokens",),
        line(Scheduler, "_decodes", "r.tokens[-1]", "r.tokens[-2]"),
    ),
    Fault(
        "M03",
        "a resumed request is recomputed from its prompt alone",
        ("tokens",),
        line(Scheduler, "_seat", "tuple(request.tokens)", "tuple(request.tokens[: request.prompt_len])"),
    ),
    # The prefix cache
    Fault(
        "C01",
        "the hash of a block leaves out its parent",
        ("ledger",),
        line(prefix, "block_key", "blake2b(parent + text", "blake2b(text"),
    ),
    Fault(
        "C02",
        "the salt is ignored",
        ("decisions", "ledger"),
        line(Scheduler, "_chain", "root(submission.salt)", "root(None)"),
    ),
    Fault(
        "C04",
        "a block counts as full when it is begun",
        ("ledger", "audit"),
        line(Scheduler, "_full_keys", "computed // self.limits.block_size", "-(-computed // self.limits.block_size)"),
    ),
    Fault(
        "C05",
        "a prompt may be a hit to its last token",
        ("decisions",),
        line(Scheduler, "_eligible", "(request.num_tokens - 1)", "request.num_tokens"),
    ),
    Fault(
        "C06",
        "hits are not referenced",
        ("audit", "ledger"),
        line(BlockPool, "share", "self.references[block] += 1", "pass"),
    ),
    Fault(
        "C07",
        "hits that nobody owns are not charged against the free blocks",
        ("raises",),
        line(Scheduler, "_fits", "- len(hits) + unowned", "- len(hits)"),
    ),
    Fault(
        "C08",
        "the block that was freed last is evicted first",
        ("ledger",),
        line(BlockPool, "take", "next(iter(self._cached))", "next(reversed(self._cached))"),
    ),
    Fault(
        "C09",
        "the watermark is waived by what is left after hits",
        ("decisions",),
        line(Scheduler, "_fits", "if need >", "if need - len(hits) >"),
    ),
    Fault(
        "C10",
        "nobody waits for a block that is about to be published",
        ("decisions",),
        line(Scheduler, "_admit", "in coming", "in ()"),
    ),
    Fault(
        "C11",
        "an evicted block can still be found",
        ("raises",),
        line(BlockPool, "take", "del self._index[self._published.pop(block).digest]", "self._published.pop(block)"),
    ),
    Fault(
        "C12",
        "cached blocks are no free blocks, so requests are preempted for want of them",
        ("decisions",),
        line(BlockPool, "num_free", "len(self._blank) + len(self._cached)", "len(self._blank)"),
    ),
    # What people are told
    Fault(
        "K01",
        "preemptions are not counted",
        ("counters",),
        line(Scheduler, "_preempt", "self.counters.preemptions += 1", "pass"),
    ),
    Fault(
        "K02",
        "usage counts the prompt as generated",
        ("solo",),
        line(Request, "facts", "generated_tokens=self.generated", "generated_tokens=self.num_tokens"),
    ),
    Fault(
        "K03",
        "the engine stops before finished requests gave back what they hold",
        ("drain",),
        line(
            Scheduler, "has_work", "bool(self.requests)", "any(r.status != 'finished' for r in self.requests.values())"
        ),
    ),
    # The plumbing
    Fault(
        "Z00",
        "canary: every audit complains",
        ("audit",),
        instead(facade, "audit", lambda _: lambda scheduler: ["canary"]),
    ),
)
CATALOGUE: dict[str, Fault] = {fault.id: fault for fault in _FAULTS}
