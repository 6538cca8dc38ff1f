"""Seeds, repeats and speed over time: groups (f) and (l) of the public bug reports, where no other test tries them."""

from __future__ import annotations

import time

from engine.control.blocks import BlockPool
from engine.control.prefix import Chain, root
from engine.request import SamplingParams
from tests.cases.oracle import engine, text
from tests.server.stub import stub_engine

UNSEEDED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)


def answers(rows: int, count: int) -> list[tuple[tuple[int, str | None], ...]]:
    """Tokens and digests of the raw logits of ``count`` requests at once, in their order."""
    made = engine(max_num_seqs=rows)
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=5, ignore_eos=True, logits_digest=True)
    ids = [made.submit(text(index % 5, 4 + index % 7), params).requests[0] for index in range(count)]
    told: dict[int, list[tuple[int, str | None]]] = {request: [] for request in ids}
    while made.has_work:
        for request, sampled in made.step().sampled:
            told[request].append((sampled.token, sampled.digest))
    return [tuple(told[request]) for request in ids]


def test_b066_requests_without_a_seed_do_not_repeat() -> None:
    """Within one engine, and in the first request of two that were started alike."""
    seeds = []
    for _ in range(2):
        made = stub_engine(max_waiting=64)
        seeds += [made.submit((5, 6), UNSEEDED).seeds[0] for _ in range(20)]
    assert len(set(seeds)) == 40


def test_b070_a_crowd_that_is_asked_again_gives_the_same_bytes() -> None:
    first = answers(4, 24)
    assert [answers(rows, 24) for rows in (4, 4, 8)] == [first] * 3


def test_b151_allocation_from_a_large_pool_of_cached_blocks_is_quick() -> None:
    """A hundred thousand blocks that nobody owns and that all still hold a prefix: a thousand are taken, and given back."""
    pool = BlockPool(100_000)
    table = [pool.take() for _ in range(100_000)]
    keys = Chain(1, root(None)).upto([at % 512 for at in range(100_000)], 100_000)
    for block, key in zip(table, keys, strict=True):
        pool.publish(block, key)
    pool.release(table)
    assert pool.num_cached == 100_000
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        taken = [pool.take() for _ in range(1000)]
        best = min(best, time.process_time() - began)
        pool.release(taken)
    assert best < 0.05


def test_b153_later_requests_cost_what_the_first_did() -> None:
    made = stub_engine()

    def several() -> float:
        began = time.process_time()
        for index in range(25):
            made.submit((5, index + 3), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
            while made.has_work:
                made.step()
        return time.process_time() - began

    several()
    early = min(several() for _ in range(5))
    for _ in range(20):
        several()
    assert min(several() for _ in range(5)) < 1.5 * early
