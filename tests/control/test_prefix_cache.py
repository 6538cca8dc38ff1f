"""The prefix cache of control (rule 11), over a memory that shows what every position really holds.

The lockstep harness compares every decision with the specification; here the content itself is judged: a request reads back
exactly its own tokens, whoever computed them, and nobody writes a block that another table names.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest

from engine.control import prefix
from engine.control.audit import audit
from engine.control.blocks import BlockPool
from engine.control.limits import Limits
from engine.control.plan import Chunk, Plan, Sampled
from engine.control.scheduler import Refusal, Scheduler, Submission


def limits(**changes: object) -> Limits:
    sizes: dict[str, object] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "vocab_size": 100,
        "prefix_cache": True,
    }
    return Limits(**{**sizes, **changes})  # type: ignore[arg-type]


def answer(history: Sequence[int]) -> int:
    """The next token depends on every token before it, as a model's does."""
    return hash(tuple(history)) % 7


@attrs.define
class Memory:
    """What each position of each block holds: (token, position)."""

    scheduler: Scheduler
    cells: dict[tuple[int, int], tuple[int, int]] = attrs.field(factory=dict)

    def execute(self, plan: Plan) -> list[Sampled]:
        size = self.scheduler.limits.block_size
        tables = {request.id: request.table for request in self.scheduler.running}
        for entry in (*plan.chunks, *plan.decodes):
            start, tokens = (
                (entry.start, entry.tokens) if isinstance(entry, Chunk) else (entry.position, (entry.token,))
            )
            for position, token in enumerate(tokens, start):
                block = tables[entry.request][position // size]
                assert self.scheduler.pool.references[block] == 1, f"block {block} is shared and written"
                self.cells[block, position % size] = (token, position)
        return [Sampled(self._next(entry, tables[entry.request], size)) for entry in plan.sampling]

    def _next(self, entry: object, table: list[int], size: int) -> int:
        end = entry.start + len(entry.tokens) if isinstance(entry, Chunk) else entry.position + 1  # type: ignore[attr-defined]
        held = [self.cells[table[position // size], position % size] for position in range(end)]
        assert [position for _, position in held] == list(range(end))
        return answer([token for token, _ in held])


def step(scheduler: Scheduler, memory: Memory) -> dict[int, int]:
    plan = scheduler.plan()
    record = scheduler.commit(plan, memory.execute(plan))
    assert audit(scheduler) == []
    return {request: sampled.token for request, sampled in record.sampled}


def starts(plan: Plan) -> dict[int, int]:
    return {chunk.request: chunk.start for chunk in plan.chunks}


@pytest.mark.parametrize("seed", range(150))
def test_answers_come_from_one_own_tokens_whoever_computed_them(seed: int) -> None:
    """B003, B009: churn with shared prefixes, evictions and aborts; index and blocks agree after every step (audit)."""
    source = random.Random(seed)
    scheduler = Scheduler(
        limits(
            num_blocks=source.randint(3, 14),
            block_size=source.choice((1, 2, 3, 4)),
            max_num_batched_tokens=source.randint(4, 12),
            watermark=source.choice((0, 0, 1)),
        )
    )
    memory = Memory(scheduler)
    streams = [[source.randrange(3) for _ in range(12)] for _ in range(3)]
    asked: dict[int, tuple[list[int], int]] = {}
    told: dict[int, list[int]] = {}
    aborted: set[int] = set()
    for _ in range(120):
        if source.random() < 0.4:
            prompt, most = source.choice(streams)[: source.randint(1, 12)], source.randint(1, 8)
            try:
                (request,) = scheduler.submit(Submission(tuple(prompt), most))
                asked[request], told[request] = (prompt, most), []
            except Refusal:
                pass
        if asked and source.random() < 0.05:
            aborted.add(request := source.choice(list(asked)))
            scheduler.abort(request)
        for request, token in step(scheduler, memory).items():
            told[request].append(token)
    while scheduler.has_work:
        for request, token in step(scheduler, memory).items():
            told[request].append(token)
    for request, (prompt, most) in asked.items():
        history = list(prompt)
        for _ in range(most):
            history.append(answer(history))
        expected = history[len(prompt) :]
        assert told[request] == (expected[: len(told[request])] if request in aborted else expected)
    assert scheduler.pool.num_free == scheduler.limits.num_blocks


@pytest.mark.parametrize("length", range(1, 21))
def test_b063_hits_are_all_full_blocks_but_one_token(length: int) -> None:
    scheduler = Scheduler(limits())
    memory = Memory(scheduler)
    for expected in (0, (length - 1) // 4 * 4):
        scheduler.submit(Submission(tuple(range(length)), 1))
        plan = scheduler.plan()
        assert list(starts(plan).values()) == [expected]
        scheduler.commit(plan, memory.execute(plan))
        step(scheduler, memory)


def test_b010_without_the_cache_no_block_ever_carries_a_hash() -> None:
    scheduler = Scheduler(limits(prefix_cache=False))
    memory = Memory(scheduler)
    for _ in range(300):
        scheduler.submit(Submission(tuple(range(9)), 2))
        while scheduler.has_work:
            step(scheduler, memory)
            assert scheduler.pool.published() == {}
    assert scheduler.counters.prefix_hit_tokens == 0


def test_b012_a_refused_admission_changes_nothing_eviction_order_included() -> None:
    """The head's hits are found and the rest does not fit: one block too few."""
    scheduler = Scheduler(limits(num_blocks=6))
    memory = Memory(scheduler)
    for stream in (0, 50):  # two prefixes of one block each stay behind, the first freed first
        scheduler.submit(Submission(tuple(range(stream, stream + 5)), 1))
        step(scheduler, memory)
        step(scheduler, memory)
    scheduler.submit(Submission(tuple(range(20, 32)), 4))  # holds 3 blocks, later 4
    step(scheduler, memory)
    (head,) = scheduler.submit(Submission((*range(5), *range(60, 72)), 1))  # 5 blocks, 1 hit
    before = scheduler.ledger()
    step(scheduler, memory)
    after = scheduler.ledger()
    assert after.waiting == (head,)
    assert after.published.keys() >= before.published.keys() - set(after.tables[min(after.tables)])
    assert [b for b in before.cached if b in after.cached] == list(after.cached)


def test_b022_a_resumed_request_finds_its_own_blocks() -> None:
    """What is left to compute is counted after the hits, at least one token."""
    scheduler = Scheduler(limits(num_blocks=9, max_num_seqs=2))
    memory = Memory(scheduler)
    scheduler.submit(Submission(tuple(range(10, 19)), 14))
    (victim,) = scheduler.submit(Submission(tuple(range(30, 39)), 12))
    resumed: list[int] = []
    while scheduler.has_work:
        plan = scheduler.plan()
        if victim in starts(plan) and scheduler.requests[victim].preemptions:
            resumed.append(starts(plan)[victim])
            assert all(chunk.tokens for chunk in plan.chunks)
        scheduler.commit(plan, memory.execute(plan))
        assert audit(scheduler) == []
    assert resumed
    assert resumed[0] >= 4


def test_b054_equal_prompts_in_one_step_compute_the_prefix_once() -> None:
    """Blocks in flight are no hits; the others wait for them and then hit."""
    scheduler = Scheduler(limits(num_blocks=16))
    memory = Memory(scheduler)
    for _ in range(4):
        scheduler.submit(Submission(tuple(range(9)), 3))
    plan = scheduler.plan()
    assert starts(plan) == {0: 0}
    scheduler.commit(plan, memory.execute(plan))
    plan = scheduler.plan()
    assert starts(plan) == {1: 8, 2: 8, 3: 8}
    scheduler.commit(plan, memory.execute(plan))


@pytest.mark.parametrize(("salts", "hit"), [(("a", "a"), 8), (("a", "b"), 0), (("a", None), 0), ((None, None), 8)])
def test_b058_salts_do_not_share(salts: tuple[str | None, str | None], hit: int) -> None:
    scheduler = Scheduler(limits())
    memory = Memory(scheduler)
    for salt in salts:
        scheduler.submit(Submission(tuple(range(9)), 1, salt=salt))
        plan = scheduler.plan()
        scheduler.commit(plan, memory.execute(plan))
        step(scheduler, memory)
    assert list(starts(plan).values()) == [hit]


def test_b055_a_collision_costs_a_miss_and_never_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prefix.block_key
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: attrs.evolve(made(parent, tokens), digest=b"same"))
    test_answers_come_from_one_own_tokens_whoever_computed_them(3)


def test_a_collision_that_is_believed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prefix.block_key
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: attrs.evolve(made(parent, tokens), digest=b"same"))
    monkeypatch.setattr(prefix.BlockKey, "same_content", lambda self, other: True)

    def twenty() -> None:
        for seed in range(20):
            test_answers_come_from_one_own_tokens_whoever_computed_them(seed)

    with pytest.raises(AssertionError):
        twenty()


def test_b064_a_tail_without_its_head_is_no_hit() -> None:
    pool = BlockPool(3)
    first = prefix.block_key(prefix.root(None), (1, 2))
    second = prefix.block_key(first.digest, (3, 4))
    table = [pool.take(), pool.take()]
    pool.publish(table[0], first)
    pool.publish(table[1], second)
    pool.release(table)
    assert pool.cached() == (1, 0)  # the tail goes first
    pool.share(1)  # keeps the tail
    for _ in range(2):
        pool.take()
    assert pool.find(first) is None
    assert pool.find(second) == 1  # legal, and unreachable through a chain that must begin with `first`
