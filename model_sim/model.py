"""The rules of SPEC.md as a program; numbers in comments are its clauses.

Two things are kept: the live requests, and what published blocks hold. Queue, batch, free rows, and which blocks are
blank, cached or shared are derived on each look, so nothing can leak, be lost or go stale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Launch = tuple[str, int, int, int] | tuple[str, str] | None
Chunk = tuple["Request", int, int]  # request, first position, count
NextToken = Callable[[int, int], int | None]  # 14.1
Content = tuple[str | None, tuple[int, ...]]  # 11.2: salt, tokens from position 0 to the end of the block


class Refused(Exception):
    """A submission did not pass the door; `reason` is one of the six of 1.2."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass
class Request:
    """One live request: waiting without a row, running with one."""

    number: int
    priority: int
    prompt: int
    max_tokens: int
    stop_ids: frozenset[int]
    min_tokens: int
    tokens: list[int]
    salt: str | None = None
    takes_hits: bool = True
    stop_after: int | None = None  # generated tokens at which its text ends it (13.5)
    text_fails: int | None = None  # generated tokens at which its text raises (13.8)
    table: list[int] = field(default_factory=list)
    row: int | None = None
    computed: int = 0
    decoding: bool = False  # has sampled since its admission; not derivable: one missing token may be either phase
    finished: str | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.number  # 2.1

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def status(self) -> str:
        if self.finished is not None:
            return "finished"
        if self.row is None:
            return "waiting"
        return "decoding" if self.decoding else "prefilling"


@dataclass(kw_only=True, eq=False)
class Model:
    """Scheduler without a network: submit and abort between iterations, step makes one, state shows what holds then."""

    blocks: int
    block_size: int
    rows: int
    budget: int
    max_model_len: int
    vocab: int
    watermark: int = 0
    max_waiting: int = 1024
    persistent_batch: bool = True
    prefix_cache: bool = False
    captures: Iterable[tuple[int, int]] = ()  # (rows, width) of each recorded graph

    def __post_init__(self) -> None:
        sizes = (self.blocks, self.block_size, self.rows, self.max_model_len, self.vocab)
        if min(sizes) < 1 or min(self.watermark, self.max_waiting) < 0:
            raise ValueError(f"sizes are {sizes}, each at least 1; watermark and max_waiting are at least 0")
        if self.budget < self.rows:
            raise ValueError(f"budget is {self.budget}, it must be at least rows, {self.rows}")  # 9.1
        self.captures = tuple(self.captures)
        self._live: dict[int, Request] = {}  # in order
        self._aborts: set[int] = set()
        self._numbers = 0
        self._iterations = 0
        # 10.1, 10.2: a stack orders its content by the time of each item's last push, and taking the top changes nobody
        # else's place. So the order of each block's last push is all that has to be remembered; whether a block is blank
        # is read off the tables. Before any push, block 0 counts as the latest. 10.4 reads the same order from the
        # other end. The place after a release by which the block is still shared is overwritten before it is read.
        self._pushed = dict.fromkeys(reversed(range(self.blocks)))  # all blocks, the earliest push first
        self._content: dict[int, Content] = {}  # of published blocks; not derivable, since it outlives its owners

    # -- what is derived ---------------------------------------------------------------------------------------------

    def _ordered(self) -> list[Request]:
        return list(self._live.values())

    def _waiting(self) -> list[Request]:
        return [r for r in self._live.values() if r.row is None]  # 2.2

    def _running(self) -> list[Request]:
        return [r for r in self._live.values() if r.row is not None]

    def _decoding(self) -> list[Request]:
        return [r for r in self._running() if r.decoding]

    def _free_rows(self) -> list[int]:
        return sorted(set(range(self.rows)).difference(r.row for r in self._running()))

    def _held(self) -> list[int]:
        return [block for r in self._live.values() for block in r.table]  # a shared block once for each table

    def _freed(self) -> list[int]:
        held = set(self._held())
        return [block for block in self._pushed if block not in held]

    def _blank(self) -> list[int]:
        return [block for block in reversed(self._freed()) if block not in self._content]  # 10.1

    def _cached(self) -> list[int]:
        return [block for block in self._freed() if block in self._content] if self._content else []  # 10.4

    def _free(self) -> list[int]:
        return self._blank() + self._cached()  # 10.4

    def _content_of(self, request: Request, i: int) -> Content:
        return request.salt, tuple(request.tokens[: (i + 1) * self.block_size])  # 11.2

    def _filled(self, plan: Iterable[Chunk]) -> list[tuple[int, Content]]:
        """The blocks that a plan makes full and their contents, in the order of 11.3."""
        return [
            (request.table[i], self._content_of(request, i))
            for request, at, count in sorted(plan if self.prefix_cache else (), key=lambda work: work[0].rank)  # 11.1
            for i in range(at // self.block_size, (at + count) // self.block_size)
        ]

    def _hits(self, request: Request) -> tuple[list[int], Content | None]:
        """What a waiting request finds published (11.6), and the content that it misses next, if it may have more."""
        holder = {content: block for block, content in self._content.items()}  # 11.4: no content twice
        hits: list[int] = []
        for i in range((len(request.tokens) - 1) // self.block_size if request.takes_hits else 0):  # 11.7
            wanted = self._content_of(request, i)
            if wanted not in holder:
                return hits, wanted
            hits.append(holder[wanted])
        return hits, None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def has_work(self) -> bool:
        """Whether an iteration is due (3.5)."""
        return bool(self._live)

    def state(self) -> dict[str, Any]:
        """What holds now; the observation point is after a step."""
        live, running = self._ordered(), self._running()
        state: dict[str, Any] = {
            "waiting": [r.number for r in self._waiting()],
            "running": [r.number for r in running],
            "tables": {r.number: tuple(r.table) for r in running},
            "rows": {r.number: r.row for r in running},
            "computed": {r.number: r.computed for r in live},
            "num_tokens": {r.number: len(r.tokens) for r in live},
            "status": {r.number: r.status for r in live},
            "blank": self._blank(),
        }
        if self.prefix_cache:  # 11.1
            state |= {
                "cached": self._cached(),
                "published": dict(self._content),
                "references": dict(Counter(self._held())),
            }
        return state

    # -- events ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        *,
        priority: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        n: int = 1,
        salt: str | None = None,
        takes_hits: bool = True,
        stop_after: tuple[int | None, ...] = (),
        text_fails: tuple[int | None, ...] = (),
    ) -> list[int]:
        """Queue n choices of one request and return their numbers; raises Refused (1.2)."""
        if n < 1:
            raise ValueError(f"n is {n}, it must be at least 1")
        numbers = list(range(self._numbers, self._numbers + n))
        self._numbers += n  # 1.1: refused ones too
        most = min(self.max_model_len, self.blocks * self.block_size + 1) - len(prompt)
        limit = max(1, most) if max_tokens is None else max_tokens  # 1.3
        total = len(prompt) + limit
        foreign = [t for t in prompt if not 0 <= t < self.vocab]
        need, waiting = self._blocks_for(total - 1), len(self._waiting())
        checks = (  # 1.2
            ("empty_prompt", not prompt, "prompt is empty, it must hold at least one token"),
            ("token_out_of_range", bool(foreign), f"prompt holds {foreign[:3]}, ids are 0..{self.vocab - 1}"),
            ("max_tokens", limit < 1, f"max_tokens is {limit}, it must be at least 1"),
            ("max_model_len", total > self.max_model_len, f"{total} tokens, at most {self.max_model_len}"),
            ("pool", need > self.blocks, f"{need} blocks needed, the pool has {self.blocks}"),
            ("queue_full", waiting + n > self.max_waiting, f"{waiting} + {n} waiting, at most {self.max_waiting}"),
        )
        for reason, refused, detail in checks:
            if refused:
                raise Refused(reason, detail)
        for i, end, fail in zip(numbers, stop_after or [None] * n, text_fails or [None] * n, strict=True):
            tokens = [*prompt]
            self._live[i] = Request(
                i, priority, len(prompt), limit, stop_ids, min_tokens, tokens, salt, takes_hits, end, fail
            )
        self._live = dict(sorted(self._live.items(), key=lambda item: item[1].rank))  # 2.1: a rank never changes
        return numbers

    def abort(self, request: int) -> None:
        """Have a request aborted at the head of the next iteration; without effect on one that is not live (4.4)."""
        if request in self._live and self._live[request].finished is None:
            self._aborts.add(request)

    # -- the iteration -----------------------------------------------------------------------------------------------

    def step(self, next_token: NextToken, fails: bool = False) -> dict[str, Any]:
        """Make one iteration (3.1) and return what it did; `fails` has execute raise (3.4)."""
        aborted = [r for r in self._ordered() if r.number in self._aborts]  # 4.5
        self._aborts.clear()
        for request in aborted:
            request.finished = "abort"
        content_before = set(self._content)
        reaped = self._reap()
        grown, preempted = self._grow()
        moves = self._compact() if self.persistent_batch else []  # 7.1
        decodes = sorted(self._decoding(), key=lambda r: r.row or 0)  # 9.7
        chunks, admitted = self._admit(self.budget - len(decodes))  # 9.2
        plan = chunks + [(r, len(r.tokens) - 1, 1) for r in decodes]
        error = fails and bool(plan)  # 3.4
        seen: dict[str, Any] = {  # everything up to launch is the plan, so it is read before commit changes the counts
            "iteration": self._iterations,
            "aborted": [r.number for r in aborted],
            "reaped": reaped,
            "grown": grown,
            "preempted": preempted,
            "moves": moves,
            "admitted": admitted,
            "chunks": [(r.number, r.row, at, count, at + count == len(r.tokens)) for r, at, count in chunks],  # 9.5
            "decodes": [(r.number, r.row, len(r.tokens) - 1) for r in decodes],  # 9.6
            "launch": self._launch(decodes),
            "error": error,
        }
        published, seen["sampled"] = ([], []) if error else self._commit(plan, next_token)
        for request, _, _ in plan if error else []:
            request.finished = "error"
        seen["finished"] = [(r.number, r.finished) for r, _, _ in plan if r.finished]  # 3.7
        if self.prefix_cache:  # 11.1
            first = {r.number: at for r, at, _ in chunks}
            seen["hits"] = [(number, first[number] // self.block_size) for number, _, _ in admitted]  # 8.5
            taken = [block for _, block in grown]  # 8.5
            taken += [block for number, _, table in admitted for block in table[first[number] // self.block_size :]]
            seen["evicted"] = [block for block in taken if block in content_before]  # 10.5
            seen["published"] = published
        self._iterations += 1
        return seen

    def _release(self, request: Request) -> None:
        for block in reversed(request.table):  # 4.2, 10.2
            del self._pushed[block]
            self._pushed[block] = None  # now the latest
        request.table.clear()
        request.row = None

    def _take(self, request: Request) -> None:
        request.table.append(self._free()[0])
        self._content.pop(request.table[-1], None)  # 10.5

    def _reap(self) -> list[int]:
        gone = [r for r in self._ordered() if r.finished]
        reaped = [r.number for r in gone if r.row is not None]  # 4.3
        for request in gone:  # 4.1
            self._release(request)
            del self._live[request.number]
        return reaped

    def _grow(self) -> tuple[list[tuple[int, int]], list[int]]:
        grown: list[tuple[int, int]] = []
        preempted: list[int] = []
        for request in self._running():  # 6.1
            if request.row is None or len(request.table) >= self._blocks_for(len(request.tokens)):  # 5.1
                continue
            while request.row is not None and not self._free():
                victim = self._running()[-1]  # 6.2
                self._release(victim)  # 6.3
                victim.computed, victim.decoding = 0, False
                preempted.append(victim.number)
            if request.row is not None:
                self._take(request)
                grown.append((request.number, request.table[-1]))
        return grown, preempted

    def _compact(self) -> list[tuple[int, int]]:
        holder = {r.row: r for r in self._running() if r.row is not None}
        d = len(self._decoding())  # 7.2
        holes = [row for row in range(d) if row not in holder or not holder[row].decoding]
        strays = sorted(row for row, r in holder.items() if r.decoding and row >= d)
        moves = list(zip(strays, holes, strict=True))  # 7.3
        for stray, hole in moves:
            holder[stray].row = hole
            if hole in holder:
                holder[hole].row = stray  # 7.4
        return moves

    def _fits(self, need: int, hits: list[int]) -> bool:
        free = self._free()
        unowned = len(set(hits) & set(free))
        reserve = self.watermark if need <= self.blocks - self.watermark else 0  # 8.3
        return need - len(hits) + unowned <= len(free) - reserve  # 8.2

    def _admit(self, left: int) -> tuple[list[Chunk], list[tuple[int, int, tuple[int, ...]]]]:
        chunks: list[Chunk] = []
        admitted: list[tuple[int, int, tuple[int, ...]]] = []
        for request in [r for r in self._running() if not r.decoding]:  # 9.2
            chunks.append((request, request.computed, min(left, len(request.tokens) - request.computed)))
            left -= chunks[-1][2]
        decodes = [(r, len(r.tokens) - 1, 1) for r in self._decoding()]  # 9.7
        for head in self._waiting():  # 8.1
            if not self._free_rows() or left <= 0:
                break
            hits, missed = self._hits(head)
            if missed in [content for _, content in self._filled(chunks + decodes if missed else ())]:
                break  # 8.7
            need = self._blocks_for(len(head.tokens))
            if not self._fits(need, hits):
                break  # 8.4
            head.table = list(hits)  # 8.5
            while len(head.table) < need:
                self._take(head)
            head.row, head.computed = self._free_rows()[0], len(hits) * self.block_size
            admitted.append((head.number, head.row, tuple(head.table)))
            chunks.append((head, head.computed, min(left, len(head.tokens) - head.computed)))  # 8.6
            left -= chunks[-1][2]
        return chunks, admitted

    def _launch(self, decodes: list[Request]) -> Launch:
        d = len(decodes)
        if d == 0:
            return None  # 12.1
        if [r.row for r in decodes] != list(range(d)):
            return ("eager", "scattered")  # 12.2
        width = max(len(r.table) for r in decodes)
        fits = [graph for graph in sorted(self.captures) if graph[0] >= d and graph[1] >= width]
        return ("replay", *fits[0], fits[0][0] - d) if fits else ("eager", "uncaptured")  # 12.3, 12.4

    def _commit(
        self, plan: list[Chunk], next_token: NextToken
    ) -> tuple[list[tuple[int, Content]], list[tuple[int, int]]]:
        sound: list[Chunk] = []
        sampled: list[tuple[int, int]] = []
        for r, at, count in plan:  # 9.6
            r.computed += count
            samples = r.computed == len(r.tokens)  # 9.5
            token = next_token(r.number, r.generated) if samples else 0  # 14.1
            if token is None:
                r.finished = "error"  # 13.7
                continue
            sound.append((r, at, count))
            if not samples:
                continue
            r.tokens.append(token)
            r.decoding = True
            sampled.append((r.number, token))
            if token in r.stop_ids and r.generated >= r.min_tokens:  # 13.2
                r.finished = "stop"
            elif r.generated == r.text_fails:
                r.finished = "error"  # 13.8
            elif r.generated == r.stop_after:  # 13.5
                r.finished = "stop"
            elif r.generated == r.max_tokens:  # 13.3
                r.finished = "length"
        return self._publish(
            sound
        ), sampled  # what is full by now ends before the token appended, so the order is no matter

    def _publish(self, plan: list[Chunk]) -> list[tuple[int, Content]]:
        published: list[tuple[int, Content]] = []
        for block, content in self._filled(plan):
            if content not in self._content.values():  # 11.4
                self._content[block] = content
                published.append((block, content))
        return published
