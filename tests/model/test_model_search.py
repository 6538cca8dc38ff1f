"""Breadth-first search through every interleaving of small scopes, and random small workloads that must drain."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from model_checks import check_conservation, check_order, check_plan, self_preemptions, swaps

from model_sim import Model, Refused

Kind = tuple[int, int, int, frozenset[int]]  # prompt length, max_tokens, priority, stop ids


@dataclass(frozen=True)
class Scope:
    """A finite world: limits, kinds of request, and how many submissions and faults (abort, error) it allows."""

    limits: dict[str, Any]
    kinds: tuple[Kind, ...]
    submissions: int
    faults: int


@dataclass(frozen=True)
class World:
    """One state of a search: the model, the kinds submitted so far in order, and the faults left."""

    model: Model
    kinds: tuple[Kind, ...]
    faults: int

    def key(self) -> str:
        """All that the future depends on; the iteration number is not part of it."""
        state = self.model.state()
        return repr(
            (state, [self.kinds[r] for r in state["status"]], sorted(self.model._aborts), len(self.kinds), self.faults)
        )

    def rank(self, request: int) -> tuple[int, int]:
        return self.kinds[request][2], request


NEVER: frozenset[int] = frozenset()
TIGHT = Scope(
    {"blocks": 4, "block_size": 2, "rows": 3, "budget": 3, "max_waiting": 3, "captures": [(2, 2), (3, 4)]},
    ((2, 4, 0, NEVER), (3, 3, 0, NEVER)),
    4,
    1,
)
PRIORITY = Scope(
    {"blocks": 4, "block_size": 1, "rows": 2, "budget": 2, "watermark": 1, "captures": [(1, 4), (2, 4)]},
    ((1, 3, 1, NEVER), (3, 2, 0, frozenset({1}))),
    4,
    1,
)
UNMOVED = Scope(
    {"blocks": 5, "block_size": 2, "rows": 3, "budget": 4, "persistent_batch": False, "captures": [(3, 3)]},
    ((1, 2, 0, NEVER), (3, 4, 0, NEVER)),
    4,
    0,
)


def token(request: int, k: int) -> int:
    return k


def clone(model: Model) -> Model:
    """A copy that shares nothing mutable; cheaper than deepcopy."""
    other = copy.copy(model)
    other._live = {i: replace(r, tokens=list(r.tokens), table=list(r.table)) for i, r in model._live.items()}
    other._aborts = set(model._aborts)
    other._pushed_at = dict(model._pushed_at)
    return other


def step(world: World, fails: bool, reached: Counter[str]) -> World:
    """One iteration on a copy, all laws checked, what it showed counted."""
    model, before = clone(world.model), world.model.state()
    seen = model.step(token, fails)
    state = model.state()
    check_conservation(model, state)
    check_order(world.rank, seen, state)
    check_plan(model, seen, state)
    reached["preempting"] += len(seen["preempted"])
    reached["self-preempting"] += self_preemptions(before, seen)
    reached["readmitting"] += sum(1 for r, _, _ in seen["admitted"] if world.model._live[r].generated)
    reached["moving"] += len(seen["moves"])
    reached["swapping"] += swaps(before, seen)
    reached["chunking"] += sum(1 for *_, samples in seen["chunks"] if not samples)
    reached["failing"] += seen["error"]
    reached["aborting a waiting one"] += sum(1 for r in seen["aborted"] if r in before["waiting"])
    reached["aborting a running one"] += sum(1 for r in seen["aborted"] if r in before["running"])
    reached[str(seen["launch"])] += 1
    reached["scattering"] += seen["launch"] == ("eager", "scattered")
    reached["a blocked head"] += bool(state["waiting"]) and len(state["rows"]) < model.rows
    reached.update(reason for _, reason in seen["finished"])
    return replace(world, model=model, faults=world.faults - fails)


def neighbours(world: World, scope: Scope, reached: Counter[str]) -> Iterator[World]:
    """Every state that one event leads to."""
    for kind in scope.kinds if len(world.kinds) < scope.submissions else ():
        model = clone(world.model)
        prompt, max_tokens, priority, stop_ids = kind
        try:
            model.submit((0,) * prompt, max_tokens, priority=priority, stop_ids=stop_ids)
        except Refused as refusal:
            reached[refusal.reason] += 1
        yield World(model, (*world.kinds, kind), world.faults)
    if world.faults:
        for request, status in world.model.state()["status"].items():
            if status != "finished":
                model = clone(world.model)
                model.abort(request)
                yield World(model, world.kinds, world.faults - 1)
        if world.model.has_work:
            yield step(world, True, reached)


def search(scope: Scope, make: Callable[..., Model] = Model) -> tuple[Counter[str], int]:
    """Visit every state of a scope; returns what was reached and the number of states."""
    reached: Counter[str] = Counter()
    start = World(make(**{"max_model_len": 64, "vocab": 8} | scope.limits), (), scope.faults)
    stepped: dict[str, str] = {}
    todo, known = deque([(start.key(), start)]), {start.key()}
    while todo:
        here, world = todo.popleft()
        following = [(other.key(), other) for other in neighbours(world, scope, reached)]
        if world.model.has_work:
            after = step(world, False, reached)
            stepped[here] = after.key()
            following.append((stepped[here], after))
        for key, other in following:
            if key not in known:
                known.add(key)
                todo.append((key, other))
    check_drains(stepped)
    return reached, len(known)


def check_drains(stepped: dict[str, str]) -> None:
    """From every state, steps alone end: no path of steps comes back to itself."""
    drained: set[str] = set()
    for start in stepped:
        path: dict[str, None] = {}
        at: str | None = start
        while at is not None and at not in drained:
            assert at not in path, "livelock: steps alone come back to a state"
            path[at] = None
            at = stepped.get(at)
        drained.update(path)


COMMON = {"preempting", "self-preempting", "readmitting", "chunking", "a blocked head", "length"}
FAULTS = {"failing", "error", "aborting a waiting one", "aborting a running one"}


@pytest.mark.parametrize(
    ("scope", "wanted"),
    [
        (TIGHT, COMMON | FAULTS | {"moving", "swapping", "queue_full"}),
        (PRIORITY, COMMON | FAULTS | {"moving", "stop"}),
        (UNMOVED, COMMON | {"scattering"}),
    ],
    ids=["tight", "priority", "unmoved"],
)
def test_search(scope: Scope, wanted: set[str]) -> None:
    reached, states = search(scope)
    assert states > 1500
    assert {what for what in wanted if not reached[what]} == set(), "not reached"
    assert search(replace(scope, submissions=2)) == search(replace(scope, submissions=2)), "not deterministic"


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
    world, reached = World(model, (), 0), Counter[str]()
    for _ in range(draw.randint(1, 12)):
        prompt = draw.randint(1, room)
        kind = (
            prompt,
            draw.randint(1, 8),
            draw.choice((0, 0, 0, 1, -1)),
            frozenset(draw.sample(range(8), draw.choice((0, 0, 1)))),
        )
        try:
            world.model.submit((0,) * prompt, kind[1], priority=kind[2], stop_ids=kind[3])
            reached["accepted"] += 1
        except Refused as refusal:
            reached[refusal.reason] += 1
        world = replace(world, kinds=(*world.kinds, kind))
        if draw.random() < 0.1:
            world.model.abort(draw.randrange(len(world.kinds)))
        for _ in range(draw.choice((0, 0, 1, 3))):
            world = step(world, draw.random() < 0.03, reached)
    tokens = sum(kind[0] + kind[1] for kind in world.kinds)
    iterations = 0
    while world.model.has_work:
        world = step(world, False, reached)
        iterations += 1
        assert iterations <= 10 + tokens * len(world.kinds), f"seed {seed} does not drain"
    assert len(world.model.state()["blank"]) == blocks
    ended = sum(reached[x] for x in ("length", "stop", "error", "aborting a waiting one", "aborting a running one"))
    assert ended == reached["accepted"], "every accepted request ends once"
    return iterations, reached


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
