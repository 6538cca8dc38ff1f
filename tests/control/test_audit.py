"""Every sentence of the audit, said on a scheduler that was broken by hand in just that way.

A healthy engine gives the audit nothing to say, so nothing but a broken one shows that it still looks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.control.audit import audit
from engine.control.limits import Limits
from engine.control.plan import Sampled
from engine.control.prefix import block_key, root
from engine.control.request import Status
from engine.control.scheduler import Scheduler, Submission

Break = Callable[[Scheduler], None]
PROMPT = (1, 2, 3, 4, 5)


def healthy(*, prefix_cache: bool = True) -> Scheduler:
    """Two requests decode on blocks of 2, sharing two published ones; a third waits for a row, a cached block for a taker."""
    limits = Limits(
        num_blocks=9,
        block_size=2,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=16,
        vocab_size=100,
        prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(limits)
    scheduler.submit(Submission((9, 9, 9), 1))
    step(scheduler)
    scheduler.submit(Submission(PROMPT, 8), n=2)
    scheduler.submit(Submission((7,), 8))
    step(scheduler)
    step(scheduler)
    assert [r.id for r in scheduler.running] == [1, 2]
    assert [r.id for r in scheduler.waiting] == [3]
    assert audit(scheduler) == []
    return scheduler


def step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    scheduler.commit(plan, [Sampled(50)] * len(plan.sampling))


def act(*acts: str) -> Break:
    """What is done to the books, as statements about the scheduler ``s`` and its two running requests ``a`` and ``b``."""

    def broken(s: Scheduler) -> None:
        names = {"s": s, "a": s.running[0], "b": s.running[1], "w": s.waiting[0], "Status": Status, "key": alien}
        for statement in acts:
            exec(statement, {}, names)

    return broken


alien = block_key(root(None), (66, 67))


# What is done, and what the audit then says among other things. Request 1 (a) holds blocks 1 2 3 for 7 tokens and has computed
# 6, request 2 (b) holds 1 2 4 for 6 and has computed 5; block 0 is cached, 5 to 8 are blank.
CASES = [
    (act("a.table.append(1)"), "block 1 stands 2 times in the table of request 1"),
    (act("s.pool._blank.append(8)"), "block 8 stands 2 times among the free ones"),
    (act("s.pool._blank.append(3)"), "block 3 is free, but request 1 holds it"),
    (act("s.pool._blank.remove(8)"), "block 8 is allocated but no request holds it"),
    (act("s.pool.references[3] = 2"), "block 3 counts 2 references, but stands in 1 tables (requests [1])"),
    (act("s.pool.references[2] = 1"), "block 2 counts 1 references, but stands in 2 tables (requests [1, 2])"),
    (act("s.pool.references[8] = 1"), "block 8 counts 1 references, but stands in 0 tables (requests [])"),
    (act("del s.pool._published[1]"), "block 1 is held by requests [1, 2], but its content is not published"),
    (act("b.computed = 3"), "block 2 is shared by requests [1, 2], but request 2 has yet to write it"),
    (act("s.pool._cached[8] = None"), "block 8 waits among the cached ones, but its content is not published"),
    (act("s.pool._published[8] = key"), "block 8 is blank, but still carries a hash"),
    (act("s.pool._published[8] = key"), "block 8 carries a hash that leads to block None"),
    (act("a.tokens[0] = 8"), "block 1 is published with tokens (1, 2), but request 1 holds it for (8, 2)"),
    (act("a.computed = 5"), "block 3 is published, but request 1 has computed only 5 positions"),
    (act("a.row = None"), "request 1 is decoding, but has no row"),
    (act("b.row = a.row"), "row 0 is held by requests 1 and 2"),
    (act("s.rows.owner[1] = 3"), "row 1 is marked as request 3's, but no running request holds it as that"),
    (act("s.rows.owner[1] = None"), "row 1 is marked free, but request 2 holds it"),
    (act("s.rows.num_free = 1"), "0 rows are free, but the count says 1"),
    (act("s.running.reverse()"), "the running queue has request 2 before request 1: orders (0, 2), (0, 1)"),
    (act("s.waiting.append(w)"), "the waiting queue has request 3 before request 3: orders (0, 3), (0, 3)"),
    (act("w.status = Status.DECODING"), "request 3 stands in the waiting queue, but is decoding"),
    (act("w.table = [8]"), "request 3 is waiting, but holds blocks [8], row None, computed 0"),
    (act("w.row = 1"), "request 3 is waiting, but holds blocks [], row 1, computed 0"),
    (act("w.computed = 1"), "request 3 is waiting, but holds blocks [], row None, computed 1"),
    (act("a.status = Status.WAITING"), "request 1 stands among the running ones, but is waiting"),
    (act("s.waiting.clear()"), "request 3 is known, but stands in no queue"),
    (act("s.waiting.append(w)"), "request 3 stands 2 times in the queues and is known"),
    (act("del s.requests[3]"), "request 3 stands 1 times in the queues and is unknown"),
    (act("a.status = b.status = Status.PREFILLING"), "requests [1, 2] are part-prefilled, but at most one may be"),
    (act("a.computed = 7"), "request 1 has 7 computed positions, but its 3 blocks hold 6"),
    (act("b.table.append(8)"), "request 2 holds 4 blocks for 6 tokens of block size 2"),
    (act("b.table.pop()"), "request 2 holds 2 blocks for 6 tokens of block size 2"),
    (act("b.computed = 4"), "request 2 is decoding with 4 of 6 tokens computed, but only the last may be missing"),
    (act("b.status = Status.PREFILLING", "b.computed = 6"), "request 2 is prefilling, but has all 6 tokens computed"),
    (act("a.max_tokens = 1"), "request 1 generated 2 tokens, but max_tokens is 1"),
]


@pytest.mark.parametrize(("broken", "said"), CASES, ids=[said for _, said in CASES])
def test_what_the_audit_says(broken: Break, said: str) -> None:
    scheduler = healthy()
    broken(scheduler)
    assert said in audit(scheduler)


@pytest.mark.parametrize(
    "harmless",
    [
        act("b.status = Status.PREFILLING"),  # one may be part-prefilled
        act("a.max_tokens = 2"),
        act("a.status = Status.FINISHED"),
        act("b.status = Status.PREFILLING", "b.computed = 4"),  # all that it shares is written
        act(
            "b.table.append(8)",
            "b.tokens += [1, 1]",
            "b.computed += 2",
            "s.pool._blank.remove(8)",
            "s.pool.references[8] = 1",
        ),
    ],
)
def test_what_the_audit_lets_pass(harmless: Break) -> None:
    scheduler = healthy()
    harmless(scheduler)
    assert audit(scheduler) == []


def test_without_the_cache_a_hash_is_told() -> None:
    scheduler = healthy(prefix_cache=False)
    scheduler.pool._published[8] = alien
    assert "block 8 carries a hash, but the prefix cache is off" in audit(scheduler)


def test_books_that_add_up_except_for_a_free_block() -> None:
    """Nothing is shared here, so every block stands in one place and a look at the totals nearly suffices."""
    scheduler = healthy(prefix_cache=False)
    scheduler.pool.references[8] = 1
    assert audit(scheduler) == ["block 8 counts 1 references, but stands in 0 tables (requests [])"]


def test_one_lost_request_blames_nobody_else() -> None:
    scheduler = healthy()
    del scheduler.requests[3]
    assert audit(scheduler) == ["request 3 stands 1 times in the queues and is unknown"]
