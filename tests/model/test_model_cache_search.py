"""The search, the random workloads and the broken models again with the prefix cache, and more laws."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from model_cache_checks import Kind
from model_world import Scope, search, walk

from model_sim import Model
from model_sim.model import Request

# Sampled tokens are 0, 1, 2, ..., so texts of zeros meet in many ways: by prompt, by what was generated, by both.
GROWING = Scope(
    {"blocks": 4, "block_size": 2, "rows": 3, "budget": 3, "prefix_cache": True},
    (Kind((0,) * 2, 4), Kind((0,) * 3, 3)),
    3,
    1,
)
DENSE = Scope(
    {"blocks": 4, "block_size": 1, "rows": 2, "budget": 4, "prefix_cache": True},
    (Kind((0,), 3), Kind((0,) * 3, 2)),
    5,
    0,
)
RANKED = Scope(
    {"blocks": 5, "block_size": 2, "rows": 3, "budget": 8, "persistent_batch": False, "prefix_cache": True},
    (Kind((0,) * 3, 3), Kind((0,) * 4, 4, -1)),
    4,
    0,
)
MIXED = Scope(
    {"blocks": 6, "block_size": 1, "rows": 3, "budget": 3, "watermark": 1, "prefix_cache": True},
    (Kind((0,) * 3, 3), Kind((0,) * 2, 2, -1, salt="a"), Kind((0,) * 3, 2, takes_hits=False)),
    3,
    1,
)
WHOLE = Scope(
    {"blocks": 5, "block_size": 2, "rows": 3, "budget": 3, "prefix_cache": True, "captures": [(2, 2), (3, 3)]},
    (Kind((0,) * 3, 3), Kind((0,) * 4, 2, takes_hits=False)),
    4,
    1,
)
COMMON = {"preempting", "evicting", "evicting to grow", "sharing", "unowned hit", "duplicate", "orphan", "length"}
AT_ONCE = {"readmitting at once", "evicting and preempting"}
FAULTS = {"failing", "error", "waiting for nothing", "aborting a waiting one", "aborting a running one"}


@pytest.mark.parametrize(
    ("scope", "wanted", "states", "transitions"),
    [
        (
            GROWING,
            COMMON | AT_ONCE | FAULTS | {"chunking", "waiting for a publication", "finding own text again"},
            2460,
            4203,
        ),
        (DENSE, COMMON | AT_ONCE | {"waiting for a publication", "waiting for a decode"}, 2740, 4139),
        (RANKED, COMMON | AT_ONCE | {"waiting for a publication", "finding own text again"}, 3949, 5144),
        (MIXED, COMMON | FAULTS | {"chunking", "waiting for a publication"}, 3211, 5469),
        (WHOLE, COMMON | FAULTS | {"chunking", "waiting for a publication", "moving", "swapping"}, 5364, 9864),
    ],
    ids=["growing", "dense", "ranked", "mixed", "whole"],
)
def test_search_with_the_cache(scope: Scope, wanted: set[str], states: int, transitions: int) -> None:
    searched = search(scope)
    assert searched.missing(wanted) == set(), "not reached"
    assert (searched.states, searched.transitions) == (states, transitions)


def test_what_a_search_with_the_cache_did_not_reach_is_noticed() -> None:
    ample = replace(WHOLE, limits=WHOLE.limits | {"blocks": 40}, submissions=3)
    assert search(ample).missing(COMMON | {"swapping"}) >= {"preempting", "evicting", "evicting to grow"}


def workload(seed: int) -> Counter[str]:
    """One random workload to its end."""
    draw = random.Random(seed)
    block_size, rows = draw.randint(1, 3), draw.randint(1, 4)
    blocks = draw.randint(1, 12)
    room = blocks * block_size + 1
    model = Model(
        blocks=blocks,
        block_size=block_size,
        rows=rows,
        budget=rows + draw.randint(0, 6),
        max_model_len=room,
        vocab=8,
        watermark=draw.choice((0, 0, 1, 3)),
        persistent_batch=draw.random() < 0.7,
        prefix_cache=True,
    )
    reached: Counter[str] = Counter()
    kinds = (
        Kind(
            ((0,) * draw.randint(0, room) + tuple(range(draw.randint(0, 6))) + (draw.randint(0, 1),))[:room],
            draw.randint(1, 8),
            draw.choice((0, 0, 0, 1, -1)),
            frozenset(draw.sample(range(8), draw.choice((0, 0, 1)))),
            draw.choice((None, None, None, "a", "b")),
            draw.random() < 0.85,
        )
        for _ in range(draw.randint(2, 14))
    )
    walk(draw, model, kinds, 0.05, reached)
    return reached


def test_random_workloads_drain_with_the_cache() -> None:
    reached: Counter[str] = Counter()
    for seed in range(300):
        reached += workload(seed)
    wanted = COMMON | AT_ONCE | FAULTS | {"stop", "waiting for a publication", "finding own text again", "swapping"}
    assert {what for what in wanted if not reached[what]} == set()


class EvictsOwnHits(Model):
    """Takes new blocks before it references its hits."""

    def _held(self) -> list[int]:
        return [block for r in self._live.values() if r.row is not None for block in r.table]


class ChargesNoHit(Model):
    """Thinks that a hit without owner leaves as many blocks free as before."""

    def _fits(self, need: int, hits: list[int]) -> bool:
        return need - len(hits) <= len(self._free())

    def _take(self, request: Request) -> None:
        super()._take(request) if self._free() else request.table.append(request.table[0])


class WaivesOnWhatIsLeft(Model):
    """Judges the waiver on what is left after hits."""

    def _fits(self, need: int, hits: list[int]) -> bool:
        unowned = len(set(hits) & set(self._free()))
        reserve = self.watermark if need - len(hits) <= self.blocks - self.watermark else 0
        return need - len(hits) + unowned <= len(self._free()) - reserve


class ComputesNothing(Model):
    """Lets hits cover all tokens."""

    def _hits(self, request: Request) -> Any:
        return super()._hits(replace(request, tokens=[*request.tokens, 0]))


class NeverWaits(Model):
    """Computes a shared prefix twice in one iteration."""

    def _hits(self, request: Request) -> Any:
        return super()._hits(request)[0], None


ANY = ("any", ())


class AlwaysWaits(Model):
    """Waits for a publication whenever one is missed and anything is in the plan."""

    def _hits(self, request: Request) -> Any:
        hits, missed = super()._hits(request)
        return hits, missed and ANY

    def _filled(self, plan: Any) -> Any:
        plan = list(plan)
        real = super()._filled(plan)
        return real if "_publishing" in vars(self) or not plan else [*real, (0, ANY)]

    def _publish(self, plan: Any) -> Any:
        self._publishing = True
        try:
            return super()._publish(plan)
        finally:
            del self._publishing


class PublishesFailures(Model):
    """Publishes also what an execute that raised should have written."""

    def step(self, next_token: Callable[[int, int], int], fails: bool = False) -> Any:
        seen = super().step(next_token, fails)
        if seen["error"]:
            self._publish([(self._live[r], at, count) for r, _, at, count, _ in seen["chunks"]])
        return seen


class PublishesHalves(Model):
    """Publishes a block as soon as it holds anything."""

    def _filled(self, plan: Any) -> Any:
        return super()._filled([(r, at, len(r.table) * self.block_size - at) for r, at, _ in plan])


class IgnoresSalt(Model):
    """Leaves the salt out of the content."""

    def _content_of(self, request: Request, i: int) -> Any:
        return None, super()._content_of(request, i)[1]


class NamesBlocksAlone(Model):
    """Leaves the parent out of the content."""

    def _content_of(self, request: Request, i: int) -> Any:
        salt, tokens = super()._content_of(request, i)
        return salt, tokens[i * self.block_size :]


class EvictsNewest(Model):
    """Evicts the most recently freed block."""

    def _cached(self) -> list[int]:
        return super()._cached()[::-1]


class EvictsBeforeBlank(Model):
    """Takes cached blocks while blank ones are left."""

    def _free(self) -> list[int]:
        return self._cached() + self._blank()


class PreemptsFirst(Model):
    """Preempts while cached blocks are left."""

    def _grow(self) -> Any:
        self._free = self._blank  # type: ignore[method-assign]
        try:
            return super()._grow()
        finally:
            del self._free


class LastWins(Model):
    """Publishes a duplicate in place of the first."""

    def _publish(self, plan: Any) -> Any:
        new = [content for _, content in self._filled(plan)]
        self._content = {block: content for block, content in self._content.items() if content not in new}
        return super()._publish(plan)


class IgnoresTakesHits(Model):
    """Gives hits to a request that takes none."""

    def _hits(self, request: Request) -> Any:
        return super()._hits(replace(request, takes_hits=True))


class Forgets(Model):
    """Drops the content of what is released."""

    def _release(self, request: Request) -> None:
        for block in request.table:
            self._content.pop(block, None)
        super()._release(request)


class WritesIntoAHit(Model):
    """Lets hits cover all tokens and then computes the last one once more."""

    def _hits(self, request: Request) -> Any:
        return super()._hits(replace(request, tokens=[*request.tokens, 0]))

    def _admit(self, left: int) -> Any:
        chunks, admitted = super()._admit(left)
        for request, at, count in chunks:
            request.computed = at - (count == 0)
        return [(r, r.computed, max(count, 1)) for r, _, count in chunks], admitted


@pytest.mark.parametrize(
    ("make", "scope", "law"),
    [
        (EvictsOwnHits, MIXED, "a block twice in a table"),
        (ChargesNoHit, DENSE, "a block twice in a table"),
        (WaivesOnWhatIsLeft, replace(DENSE, limits=DENSE.limits | {"watermark": 2}), "held back without a reason"),
        (ComputesNothing, MIXED, "empty chunk"),
        (NeverWaits, MIXED, "computed twice"),
        (AlwaysWaits, MIXED, "held back without a reason"),
        (PublishesFailures, MIXED, "published what was not computed"),
        (PublishesHalves, GROWING, "published what was not computed"),
        (IgnoresSalt, MIXED, "published wrongly"),
        (NamesBlocksAlone, DENSE, "published wrongly"),
        (EvictsNewest, MIXED, "evicted out of order"),
        (EvictsBeforeBlank, MIXED, "evicted before the last blank block"),
        (PreemptsFirst, GROWING, "preempted before evicting"),
        (LastWins, MIXED, "content lost or changed"),
        (IgnoresTakesHits, MIXED, "other hits than due"),
        (Forgets, MIXED, "content lost or changed"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_cache_is_noticed(make: type[Model], scope: Scope, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        search(scope, make)


@pytest.mark.parametrize(
    ("make", "scope", "law"),
    [
        (WritesIntoAHit, DENSE, "a shared block is written"),
        (PublishesFailures, MIXED, "published what was not computed"),
        (IgnoresSalt, MIXED, "hit of other content"),
        (NamesBlocksAlone, GROWING, "published what was not computed"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_simulated_contents_alone_notice(
    make: type[Model], scope: Scope, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_world.check_cache", lambda *_: None)
    with pytest.raises(AssertionError, match=law):
        search(scope, make)
