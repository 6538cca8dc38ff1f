"""The scheduler: one iteration from events to a plan, and from tokens to a record.

The rules are those of model_sim/SPEC.md. An iteration runs (rule 3)

    submit/abort ...  ->  plan():   reap -> grow -> compact -> admit -> decide replay
                      ->  Runner.execute(plan)
                      ->  commit(plan, sampled): count -> publish -> append, stop   or   fail(plan, why)

State: requests and queues here, rows in RowTable, blocks with owners and content in BlockPool. What leaves is frozen.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence

import attrs

from engine.control.blocks import BlockPool
from engine.control.counters import Counters
from engine.control.door import check_door
from engine.control.limits import Limits
from engine.control.plan import Chunk, Decode, Grow, Move, Plan, Replay, Sampled, Seat
from engine.control.prefix import BlockKey, Chain, root
from engine.control.record import Finished, Ledger, StepRecord
from engine.control.replay import decide
from engine.control.request import Refusal, Request, Status, Submission
from engine.control.rows import RowTable

__all__ = ["Refusal", "Scheduler", "Submission"]


@attrs.frozen
class _Open:
    """What ``plan`` did besides the plan, kept for the record of the same iteration."""

    plan: Plan
    aborted: tuple[Finished, ...]
    reaped: tuple[int, ...]
    preempted: tuple[int, ...]


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.rows = RowTable(limits.max_num_seqs)
        self.requests: dict[int, Request] = {}  # waiting and running; reaped ones are forgotten
        self.waiting: list[Request] = []  # rule 2 order
        self.running: list[Request] = []  # rule 2 order
        self.counters = Counters()
        self.iteration = 0
        self._next_id = 0
        self._open: _Open | None = None

    # Events ------------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, n: int = 1) -> tuple[int, ...]:
        """Queues ``n`` choices of one submission and returns their ids. Raises ``Refusal`` (rule 1), for all n or none.

        Ids number every choice ever submitted, refused ones included, so that a caller can count along. Raises ``ValueError``
        for n below 1, which uses up no id (rule 1.1).
        """
        if n < 1:
            raise ValueError(f"n is {n}, but must be at least 1")
        ids = tuple(range(self._next_id, self._next_id + n))
        self._next_id += n
        self.counters.submitted += n
        try:
            max_tokens = check_door(self.limits, submission, n, len(self.waiting))
        except Refusal as refusal:
            self.counters.refused[refusal.reason] += n
            raise
        for choice, request_id in enumerate(ids):
            request = Request(
                id=request_id,
                priority=submission.priority,
                tokens=list(submission.prompt),
                prompt_len=len(submission.prompt),
                max_tokens=max_tokens,
                stop_ids=submission.stop_ids,
                min_tokens=submission.min_tokens,
                text=submission.texts[choice] if submission.texts else None,
                payload=submission.payloads[choice] if submission.payloads else None,
                chain=self._chain(submission),
                takes_hits=submission.takes_hits,
            )
            self.requests[request_id] = request
            self._enqueue(request)
        return ids

    def abort(self, request_id: int) -> None:
        """Marks a request; it is reaped in the next iteration (rule 4). Unknown, finished or repeated: no effect."""
        request = self.requests.get(request_id)
        if request is not None and request.status is not Status.FINISHED:
            request.aborted = True

    @property
    def has_work(self) -> bool:
        """Whether another iteration would change anything; finished requests still have to be reaped (rule 3)."""
        return bool(self.requests)

    # One iteration -----------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decides this iteration. Must be followed by ``commit`` or ``fail`` with the same plan."""
        if self._open is not None:
            raise RuntimeError(f"iteration {self._open.plan.iteration} was planned, but neither committed nor failed")
        aborted, reaped, vacated = self._reap()
        grown, preempted, more_vacated = self._grow()
        moves = self._compact()
        decodes = self._decodes()
        budget = self.limits.max_num_batched_tokens - len(decodes)
        chunks, budget = self._continue_prefills(budget)
        work: list[Chunk | Decode] = [*chunks, *decodes]
        seated = self._admit(budget, work)
        launch = decide([d.row for d in decodes], self._longest_table(), self.limits.captures)
        plan = Plan(
            iteration=self.iteration,
            vacated=(*vacated, *more_vacated),
            grown=tuple(grown),
            moves=tuple(moves),
            seated=tuple(seated),
            chunks=tuple(entry for entry in work if isinstance(entry, Chunk)),
            decodes=decodes,
            launch=launch,
        )
        self._open = _Open(plan, aborted, reaped, preempted)
        return plan

    def commit(self, plan: Plan, sampled: Sequence[Sampled]) -> StepRecord:
        """Counts what was computed and appends what was sampled: one ``Sampled`` for each entry of ``plan.sampling``.

        One without a token ends its own request, and what this iteration computed for it is not published (rule 13.7).
        """
        if len(sampled) != len(plan.sampling):
            raise ValueError(f"{len(sampled)} tokens came back, but {len(plan.sampling)} rows sample in this plan")
        opened = self._close(plan)
        drawn = tuple(zip(plan.sampling, sampled, strict=True))
        for chunk in plan.chunks:
            request = self.requests[chunk.request]
            request.computed += len(chunk.tokens)
            if request.preemptions:
                request.recomputed += len(chunk.tokens)
                self.counters.recomputed_tokens += len(chunk.tokens)
        for decode in plan.decodes:
            request = self.requests[decode.request]
            request.computed += 1
            request.replayed_steps += isinstance(plan.launch, Replay)
        self._publish(plan, {entry.request for entry, got in drawn if got.failure is not None})
        results = tuple([(entry.request, got) for entry, got in drawn if got.failure is None])
        finished = [end for entry, got in drawn if (end := self._append(self.requests[entry.request], got))]
        self._count(plan)
        self.counters.sampled_tokens += len(results)
        return self._record(opened, results, tuple(finished), None)

    def fail(self, plan: Plan, why: str) -> StepRecord:
        """Execute raised: every request of the plan ends with reason ``error``; what it computed counts for nothing."""
        opened = self._close(plan)
        ids = (*(chunk.request for chunk in plan.chunks), *(decode.request for decode in plan.decodes))
        finished = tuple(self._finish(self.requests[request_id], "error", None) for request_id in ids)
        self.counters.iterations += 1
        self.counters.failed_steps += 1
        return self._record(opened, (), finished, why)

    # Phases ------------------------------------------------------------------------------------------------------

    def _reap(self) -> tuple[tuple[Finished, ...], tuple[int, ...], list[int]]:
        """Rule 4. Finished requests of the last iteration and aborts of this one, in order."""
        aborted: list[Finished] = []
        reaped: list[int] = []
        vacated: list[int] = []
        leaving = [r for r in (*self.waiting, *self.running) if r.aborted or r.status is Status.FINISHED]
        leaving.sort(key=lambda r: r.order)
        for request in leaving:
            if request.status is not Status.FINISHED:
                aborted.append(self._end(request, "abort", None))
            if request.row is None:
                self.waiting.remove(request)
            else:
                self.running.remove(request)
                vacated.append(self._give_back(request))
                reaped.append(request.id)
            del self.requests[request.id]
        return tuple(aborted), tuple(reaped), vacated

    def _grow(self) -> tuple[list[Grow], tuple[int, ...], list[int]]:
        """Rule 6. Each running request gets the block that its next token needs, if need be from the last in the order."""
        grown: list[Grow] = []
        preempted: list[int] = []
        vacated: list[int] = []
        for request in tuple(self.running):
            if request.status is Status.WAITING:  # preempted for an earlier one in this same pass
                continue
            while len(request.table) < self.limits.blocks_for(request.num_tokens):
                if self.pool.num_free:
                    request.table.append(self.pool.take())
                    assert request.row is not None
                    grown.append(Grow(request.id, request.row, request.table[-1]))
                    continue
                victim = self.running[-1]
                vacated.append(self._preempt(victim))
                preempted.append(victim.id)
                if victim is request:
                    break
        return grown, tuple(preempted), vacated

    def _preempt(self, victim: Request) -> int:
        """Blocks and row go back, tokens stay, progress is lost, the place in the queue is kept (rule 6)."""
        self.running.remove(victim)
        row = self._give_back(victim)
        victim.computed = 0
        victim.preemptions += 1
        victim.status = Status.WAITING
        self._enqueue(victim)
        self.counters.preemptions += 1
        return row

    def _compact(self) -> list[Move]:
        """Rule 7. Brings the decoding requests to rows 0..d-1."""
        if not self.limits.persistent_batch:
            return []
        decoding = {r.row: r for r in self.running if r.status is Status.DECODING and r.row is not None}
        moves: list[Move] = []
        for src, dst in self.rows.misplaced(decoding):
            displaced = self.rows.owner[dst]
            self.rows.move(src, dst)
            decoding[src].row = dst
            if displaced is not None:
                self.requests[displaced].row = src
            moves.append(Move(decoding[src].id, src, dst, swap=displaced is not None))
        return moves

    def _decodes(self) -> tuple[Decode, ...]:
        decoding = [r for r in self.running if r.status is Status.DECODING and r.row is not None]
        decodes = (Decode(r.id, r.row, r.num_tokens - 1, r.tokens[-1]) for r in decoding if r.row is not None)
        return tuple(sorted(decodes, key=lambda decode: decode.row))

    def _longest_table(self) -> int:
        return max([len(r.table) for r in self.running if r.status is Status.DECODING], default=0)

    def _continue_prefills(self, budget: int) -> tuple[list[Chunk], int]:
        """Rule 9. Running prefilling requests come before admissions."""
        chunks: list[Chunk] = []
        for request in self.running:
            if request.status is Status.PREFILLING and budget > 0:
                chunks.append(self._chunk(request, budget))
                budget -= len(chunks[-1].tokens)
        return chunks, budget

    def _admit(self, budget: int, work: list[Chunk | Decode]) -> list[Seat]:
        """Rule 8. The head of the queue or nobody; nobody overtakes. A failed attempt changes nothing.

        ``work`` is what this iteration computes so far; the first chunks of the admitted are appended to it.
        """
        seated: list[Seat] = []
        coming = self._to_be_published(work) if self.waiting else set()
        while self.waiting and self.rows.num_free and budget > 0:
            request = self.waiting[0]
            hits = self._hits(request)
            if not self._fits(request, hits) or self._first_miss(request, len(hits)) in coming:
                break
            self.waiting.remove(request)
            seated.append(self._seat(request, hits))
            chunk = self._chunk(request, budget)
            work.append(chunk)
            coming |= self._to_be_published([chunk])
            budget -= len(chunk.tokens)
        return seated

    def _seat(self, request: Request, hits: list[int]) -> Seat:
        """Hits are referenced before new blocks are taken, so that a request cannot evict what it is about to use."""
        for block in hits:
            self.pool.share(block)
        missing = self.limits.blocks_for(request.num_tokens) - len(hits)
        request.table = [*hits, *(self.pool.take() for _ in range(missing))]
        request.published = len(hits)
        request.computed = len(hits) * self.limits.block_size
        row = request.row = self.rows.take(request.id)
        request.status = Status.PREFILLING
        if request.first_iteration is None:
            request.first_iteration = self.iteration
            request.cached = request.computed
        self.counters.prefix_hit_tokens += request.computed
        insort(self.running, request, key=lambda r: r.order)
        return Seat(request.id, row, tuple(request.tokens), request.prompt_len, tuple(request.table), request.payload)

    def _fits(self, request: Request, hits: list[int]) -> bool:
        """The watermark is a reserve that may delay a request but never exclude it (rule 8).

        A hit that nobody owns is still one of the free blocks until it is taken, hence it is charged like a new one.
        """
        need = self.limits.blocks_for(request.num_tokens)
        reserve = self.limits.watermark
        if need > self.limits.num_blocks - reserve:
            reserve = 0
        unowned = sum(self.pool.references[block] == 0 for block in hits)
        return need - len(hits) + unowned <= self.pool.num_free - reserve

    # Prefix cache (rule 11) --------------------------------------------------------------------------------------

    def _chain(self, submission: Submission) -> Chain | None:
        return Chain(self.limits.block_size, root(submission.salt)) if self.limits.prefix_cache else None

    def _eligible(self, request: Request) -> list[BlockKey]:
        """Keys of the blocks that may be hits: full ones, and at least one token is left to compute."""
        if request.chain is None or not request.takes_hits:
            return []
        return request.chain.upto(request.tokens, (request.num_tokens - 1) // self.limits.block_size)

    def _hits(self, request: Request) -> list[int]:
        """The longest published prefix, as blocks. Changes nothing, LRU order included."""
        hits: list[int] = []
        for key in self._eligible(request):
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def _first_miss(self, request: Request, num_hits: int) -> BlockKey | None:
        eligible = self._eligible(request)
        return eligible[num_hits] if num_hits < len(eligible) else None

    def _to_be_published(self, work: Sequence[Chunk | Decode]) -> set[BlockKey | None]:
        """Keys of the blocks that will be full once ``work`` is computed and that are not published yet."""
        keys: set[BlockKey | None] = set()
        if self.limits.prefix_cache:
            for entry in work:
                request = self.requests[entry.request]
                count = len(entry.tokens) if isinstance(entry, Chunk) else 1
                keys.update(self._full_keys(request, request.computed + count)[request.published :])
        return keys

    def _full_keys(self, request: Request, computed: int) -> list[BlockKey]:
        assert request.chain is not None
        return request.chain.upto(request.tokens, computed // self.limits.block_size)

    def _publish(self, plan: Plan, doubtful: Collection[int] = ()) -> None:
        """After the forward that wrote them, in order, full blocks up to the computed count become hits for others, but for
        those of ``doubtful`` requests (rule 13.7)."""
        if not self.limits.prefix_cache:
            return
        ids = (*(chunk.request for chunk in plan.chunks), *(decode.request for decode in plan.decodes))
        for request in sorted([self.requests[i] for i in ids if i not in doubtful], key=lambda r: r.order):
            keys = self._full_keys(request, request.computed)
            for index in range(request.published, len(keys)):
                self.pool.publish(request.table[index], keys[index])
            request.published = len(keys)

    def _chunk(self, request: Request, budget: int) -> Chunk:
        count = min(budget, request.missing)
        assert request.row is not None
        tokens = tuple(request.tokens[request.computed : request.computed + count])
        return Chunk(request.id, request.row, request.computed, tokens, samples=count == request.missing)

    # Ends --------------------------------------------------------------------------------------------------------

    def _append(self, request: Request, got: Sampled) -> Finished | None:
        """Rule 13. Stop ids, then stop strings, then length; the first two not before ``min_tokens``. A row without a token and
        a text that raises end their own request, and no other (rules 13.7 and 13.8)."""
        if got.failure is not None:
            return self._finish(request, "error", None, got.failure)
        token = got.token
        request.status = Status.DECODING
        request.tokens.append(token)
        may_stop = request.generated >= request.min_tokens
        last = request.generated >= request.max_tokens
        if may_stop and token in request.stop_ids:
            return self._finish(request, "stop", token)
        if request.text is not None:
            try:
                if request.text.push(token, may_stop, last):
                    return self._finish(request, "stop", request.text.matched)
            except Exception as error:  # noqa: BLE001 - text is the caller's code: it may end its own request, never the loop
                why = f"the text of output token {request.generated} failed"
                return self._finish(request, "error", None, why, f"{type(error).__name__}: {error}")
        if last:
            return self._finish(request, "length", None)
        return None

    def _finish(self, request: Request, reason: str, stop: int | str | None, *why: str) -> Finished:
        request.status = Status.FINISHED
        return self._end(request, reason, stop, *why)

    def _end(self, request: Request, reason: str, stop: int | str | None, *why: str) -> Finished:
        self.counters.finished[reason] += 1
        return Finished(request.id, reason, stop, request.facts(self.iteration), *why)

    # Helpers -----------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.order)

    def _give_back(self, request: Request) -> int:
        """Blocks tail first, then the row (rule 4); returns the row."""
        self.pool.release(request.table)
        request.table = []
        row, request.row = request.row, None
        assert row is not None
        self.rows.release(row)
        return row

    def _close(self, plan: Plan) -> _Open:
        opened, self._open = self._open, None
        if opened is None or opened.plan is not plan:
            raise RuntimeError(f"the plan of iteration {plan.iteration} is not the one that is open")
        return opened

    def _record(
        self, opened: _Open, sampled: tuple[tuple[int, Sampled], ...], finished: tuple[Finished, ...], error: str | None
    ) -> StepRecord:
        record = StepRecord(
            self.iteration, opened.plan, opened.aborted, opened.reaped, opened.preempted, sampled, finished, error
        )
        self.iteration += 1
        return record

    def _count(self, plan: Plan) -> None:
        counters, num_tokens = self.counters, plan.num_tokens
        counters.iterations += 1
        counters.forward_iterations += plan.forwards
        counters.forward_tokens += num_tokens
        counters.prefill_tokens += num_tokens - len(plan.decodes)
        counters.row_moves += len(plan.moves)
        if plan.decodes:
            counters.decode_rows[len(plan.decodes)] += 1
        if isinstance(plan.launch, Replay):
            counters.replays[plan.launch.rows, plan.launch.width] += 1
            counters.padded_rows += plan.launch.padding
        elif plan.launch is not None:
            counters.eager[plan.launch.reason] += 1

    def ledger(self) -> Ledger:
        """The whole state as plain values, for audits and lockstep. O(everything): not for the hot path."""
        live = (*self.waiting, *self.running)
        return Ledger(
            waiting=tuple([r.id for r in self.waiting]),
            running=tuple([r.id for r in self.running]),
            tables={r.id: tuple(r.table) for r in live},
            rows={r.id: r.row for r in live if r.row is not None},
            computed={r.id: r.computed for r in live},
            num_tokens={r.id: len(r.tokens) for r in live},
            status={r.id: str(r.status) for r in live},
            blank=self.pool.blank(),
            references=tuple(self.pool.references),
            cached=self.pool.cached(),
            published=self.pool.published(),
        )
