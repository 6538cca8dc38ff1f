"""A model with its history: what a search walks through, with every law checked on every iteration."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from model_cache_checks import Kind, Memory, check_cache, check_content, count_cache
from model_checks import check_conservation, check_order, check_plan, self_preemptions, swaps

from model_sim import Model, Refused


@dataclass(frozen=True)
class Scope:
    """A finite world: limits, kinds of request, and how many submissions and faults (abort, error) it allows."""

    limits: dict[str, Any]
    kinds: tuple[Kind, ...]
    submissions: int
    faults: int


@dataclass(frozen=True)
class World:
    """One state of a search: the model, the kinds submitted so far in order, the faults left, what the blocks hold."""

    model: Model
    kinds: tuple[Kind, ...]
    faults: int
    memory: Memory = field(default_factory=dict)

    def key(self) -> str:
        """All that the future depends on. Neither the iteration number is part of it, nor the memory: what a block
        holds where nobody may read it differs between the ways to a state, of which one is followed."""
        state = self.model.state()
        return repr(
            (state, [self.kinds[r] for r in state["status"]], sorted(self.model._aborts), len(self.kinds), self.faults)
        )

    def rank(self, request: int) -> tuple[int, int]:
        return self.kinds[request].priority, request

    def text(self, request: int, length: int) -> tuple[int, ...]:
        """The first tokens of a request, from its prompt and its samplings, not from the model."""
        prompt = self.kinds[request].prompt
        return (*prompt, *(token(request, k) for k in range(length - len(prompt))))[:length]


def token(request: int, k: int) -> int:
    return k


def clone(model: Model) -> Model:
    """A copy that shares nothing mutable; cheaper than deepcopy."""
    other = copy.copy(model)
    other._live = {i: replace(r, tokens=list(r.tokens), table=list(r.table)) for i, r in model._live.items()}
    other._aborts = set(model._aborts)
    other._pushed = dict(model._pushed)
    other._content = dict(model._content)
    return other


def submit(world: World, kind: Kind) -> None:
    world.model.submit(
        kind.prompt,
        kind.max_tokens,
        priority=kind.priority,
        stop_ids=kind.stop_ids,
        salt=kind.salt,
        takes_hits=kind.takes_hits,
    )


def step(world: World, fails: bool, reached: Counter[str]) -> World:
    """One iteration on a copy, all laws checked, what it showed counted."""
    model, before = clone(world.model), world.model.state()
    seen = model.step(token, fails)
    state = model.state()
    check_conservation(model, state)
    check_order(world.rank, before, seen, state)
    check_plan(model, seen, state)
    memory = world.memory
    if model.prefix_cache:
        memory = check_content(model, world, before, seen, state)
        check_cache(model, world, before, seen, state)
        count_cache(model, world, before, seen, state, reached)
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
    return replace(world, model=model, faults=world.faults - fails, memory=memory)


def neighbours(world: World, scope: Scope, reached: Counter[str]) -> Iterator[World]:
    """Every state that one event leads to."""
    for kind in scope.kinds if len(world.kinds) < scope.submissions else ():
        other = replace(world, model=clone(world.model), kinds=(*world.kinds, kind))
        try:
            submit(other, kind)
        except Refused as refusal:
            reached[refusal.reason] += 1
        yield other
    if world.faults:
        for request, status in world.model.state()["status"].items():
            if status != "finished":
                model = clone(world.model)
                model.abort(request)
                yield replace(world, model=model, faults=world.faults - 1)
        if world.model.has_work:
            yield step(world, True, reached)


@dataclass(frozen=True)
class Searched:
    """What a search saw: how often each thing happened in a transition, and how many states and transitions there are."""

    reached: Counter[str]
    states: int
    transitions: int

    def missing(self, wanted: set[str]) -> set[str]:
        """What did not happen once: a search that never saw it says nothing about it."""
        return {what for what in wanted if not self.reached[what]}


def search(scope: Scope, make: Callable[..., Model] = Model) -> Searched:
    """Visits every state of a scope by every event that it allows, breadth first."""
    reached: Counter[str] = Counter()
    transitions = 0
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
        transitions += len(following)
        for key, other in following:
            if key not in known:
                known.add(key)
                todo.append((key, other))
    check_drains(stepped)
    return Searched(reached, len(known), transitions)


def walk(
    draw: random.Random, model: Model, kinds: Iterable[Kind], fails: float, reached: Counter[str]
) -> tuple[World, int]:
    """One random way: every kind submitted in turn, some aborted, up to three iterations after each, a share of ``fails``
    failing; then steps alone until nothing is left. Returns where it ends and how many iterations that took.

    ``kinds`` may draw from the same generator: each is taken when its turn has come.
    """
    world = World(model, (), 0)
    for kind in kinds:
        try:
            submit(world, kind)
            reached["accepted"] += 1
        except Refused as refusal:
            reached[refusal.reason] += 1
        world = replace(world, kinds=(*world.kinds, kind))
        if draw.random() < 0.1:
            world.model.abort(draw.randrange(len(world.kinds)))
        for _ in range(draw.choice((0, 0, 1, 3))):
            world = step(world, draw.random() < fails, reached)
    tokens = sum(len(kind.prompt) + kind.max_tokens for kind in world.kinds)
    iterations = 0
    while world.model.has_work:
        world = step(world, False, reached)
        iterations += 1
        assert iterations <= 10 + tokens * len(world.kinds), "a random workload does not drain"
    state = world.model.state()
    assert len(state["blank"]) + len(state.get("cached", ())) == model.blocks
    ended = sum(reached[x] for x in ("length", "stop", "error", "aborting a waiting one", "aborting a running one"))
    assert ended == reached["accepted"], "every accepted request ends once"
    return world, iterations


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
