"""Breadth-first search through every interleaving of small scopes, and random small workloads that must drain."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from model_cache_checks import Kind
from model_world import Scope, search, walk

from model_sim import Model

TIGHT = Scope(
    {"blocks": 4, "block_size": 2, "rows": 3, "budget": 3, "max_waiting": 3, "captures": [(2, 2), (3, 4)]},
    (Kind((0,) * 2, 4), Kind((0,) * 3, 3)),
    4,
    1,
)
PRIORITY = Scope(
    {"blocks": 4, "block_size": 1, "rows": 2, "budget": 2, "watermark": 1, "captures": [(1, 4), (2, 4)]},
    (Kind((0,), 3, 1), Kind((0,) * 3, 2, 0, frozenset({1}))),
    4,
    1,
)
UNMOVED = Scope(
    {"blocks": 5, "block_size": 2, "rows": 3, "budget": 4, "persistent_batch": False, "captures": [(3, 3)]},
    (Kind((0,), 2), Kind((0,) * 3, 4)),
    4,
    0,
)


COMMON = {"preempting", "self-preempting", "readmitting", "chunking", "a blocked head", "length"}
FAULTS = {"failing", "error", "aborting a waiting one", "aborting a running one"}


# The numbers of states and transitions are part of what is shown: another number is another specification, or another scope.
@pytest.mark.parametrize(
    ("scope", "wanted", "states", "transitions"),
    [
        (TIGHT, COMMON | FAULTS | {"moving", "swapping", "queue_full"}, 6818, 13293),
        (PRIORITY, COMMON | FAULTS | {"moving", "stop"}, 3311, 6915),
        (UNMOVED, COMMON | {"scattering"}, 1926, 2669),
    ],
    ids=["tight", "priority", "unmoved"],
)
def test_search(scope: Scope, wanted: set[str], states: int, transitions: int) -> None:
    searched = search(scope)
    assert searched.missing(wanted) == set(), "not reached"
    assert (searched.states, searched.transitions) == (states, transitions)
    assert search(replace(scope, submissions=2)) == search(replace(scope, submissions=2)), "not deterministic"


def test_what_a_search_did_not_reach_is_noticed() -> None:
    ample = replace(TIGHT, limits=TIGHT.limits | {"blocks": 40, "rows": 3, "budget": 40}, submissions=3)
    assert search(ample).missing(COMMON) == COMMON - {"length"}


def workload(seed: int) -> tuple[int, Counter[str]]:
    """One random workload to its end; returns its iterations and what it reached."""
    draw = random.Random(seed)
    block_size, rows = draw.randint(1, 4), draw.randint(1, 4)
    blocks = draw.randint(1, 12)
    room = blocks * block_size + 1
    model = Model(
        blocks=blocks,
        block_size=block_size,
        rows=rows,
        budget=rows + draw.randint(0, 6),
        max_model_len=room + draw.randint(-1, 2) if room > 2 else room,
        vocab=8,
        watermark=draw.choice((0, 0, 1, 3)),
        persistent_batch=draw.random() < 0.7,
        captures=[(rows, blocks)],
    )
    reached: Counter[str] = Counter()
    kinds = (
        Kind(
            (0,) * draw.randint(1, room),
            draw.randint(1, 8),
            draw.choice((0, 0, 0, 1, -1)),
            frozenset(draw.sample(range(8), draw.choice((0, 0, 1)))),
        )
        for _ in range(draw.randint(1, 12))
    )
    return walk(draw, model, kinds, 0.03, reached)[1], reached


def test_random_workloads_drain() -> None:
    reached: Counter[str] = Counter()
    for seed in range(300):
        reached += workload(seed)[1]
    wanted = COMMON | FAULTS | {"moving", "swapping", "scattering", "stop", "pool", "max_model_len"}
    assert {what for what in wanted if not reached[what]} == set()


class GivesTwice(Model):
    """Counts a table of a single block as blank: the block is handed out twice."""

    def _blank(self) -> list[int]:
        held = {block for r in self._live.values() if len(r.table) > 1 for block in r.table}
        return [block for block in range(self.blocks) if block not in held]


class Overtakes(Model):
    """Admits a request that fits before a head that does not."""

    def _admit(self, left: int) -> Any:
        fits = [r for r in self._waiting() if self._blocks_for(len(r.tokens)) <= len(self._blank())]
        self._waiting = lambda: [r for r in fits if r.row is None]  # type: ignore[method-assign]
        try:
            return super()._admit(left)
        finally:
            del self._waiting


class Starves(Model):
    """Admits nobody."""

    def _admit(self, left: int) -> Any:
        self._waiting = list  # type: ignore[method-assign]
        try:
            return super()._admit(left)
        finally:
            del self._waiting


class Restarts(Model):
    """Throws back every prompt that is part-prefilled."""

    def _grow(self) -> Any:
        for request in [r for r in self._running() if not r.decoding]:
            self._release(request)
            request.computed = 0
        return super()._grow()


class Hoards(Model):
    """Takes a block for a maybe."""

    def _blocks_for(self, tokens: int) -> int:
        return super()._blocks_for(tokens + 1)


class WrongVictim(Model):
    """Preempts the first running request."""

    def _grow(self) -> Any:
        running = Model._running
        self._running = lambda: running(self)[::-1]  # type: ignore[method-assign]
        try:
            return super()._grow()
        finally:
            del self._running


class Scatters(Model):
    """Leaves decoding requests where they are."""

    def _compact(self) -> list[tuple[int, int]]:
        return []


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (GivesTwice, "conservation of blocks"),
        (Overtakes, "overtaken"),
        (Starves, "no progress"),
        (Restarts, "livelock"),
        (Hoards, "more or less"),
        (WrongVictim, "victim"),
        (Scatters, "out of place"),
    ],
)
def test_a_broken_model_is_noticed(make: type[Model], law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        search(replace(TIGHT, submissions=3), make)
