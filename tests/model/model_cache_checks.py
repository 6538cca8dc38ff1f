"""Laws of the prefix cache, and a simulation of what is really computed into each block.

Nothing here asks the model what a request's tokens are, which blocks it would hit or what it means to publish: tokens
come from the workload, tables and counts from what was observed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from model_sim import Model

State = dict[str, Any]
Seen = dict[str, Any]
Content = tuple[str | None, tuple[int, ...]]
# What each position of a block was computed from: the tokens up to it. None: never, or by an execute that raised.
Memory = dict[int, tuple[tuple[int, ...] | None, ...]]
NEVER: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Kind:
    """What a request asks for."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    stop_ids: frozenset[int] = NEVER
    salt: str | None = None
    takes_hits: bool = True


class History(Protocol):
    """What the laws ask of the world that an iteration was made in."""

    @property
    def kinds(self) -> tuple[Kind, ...]: ...
    @property
    def memory(self) -> Memory: ...
    def rank(self, request: int) -> tuple[int, int]: ...
    def text(self, request: int, length: int) -> tuple[int, ...]: ...


def content(world: History, request: int, length: int) -> Content:
    return world.kinds[request].salt, world.text(request, length)


def at_execute(before: State, seen: Seen) -> dict[int, Content]:
    """What was published while the forward ran (10.5)."""
    return {block: held for block, held in before["published"].items() if block not in seen["evicted"]}


def computed(seen: Seen) -> list[tuple[int, int, int]]:
    """The plan: request, first position, count."""
    return [(r, at, count) for r, _, at, count, _ in seen["chunks"]] + [(r, at, 1) for r, _, at in seen["decodes"]]


def filled(model: Model, world: History, seen: Seen, state: State) -> list[tuple[int, int, Content]]:
    """The blocks that the iteration makes full: request, block, content, in the order of 11.3."""
    size = model.block_size
    return [
        (r, state["tables"][r][i], content(world, r, (i + 1) * size))
        for r, at, count in sorted(computed(seen), key=lambda work: world.rank(work[0]))
        for i in range(len(state["tables"][r]))
        if at < (i + 1) * size <= at + count
    ]


def wanted_hits(model: Model, world: History, held: dict[int, Content], request: int, length: int) -> list[int]:
    """The hits of a request of this many tokens (11.6, 11.7)."""
    blocks = {what: block for block, what in held.items()}
    bound = (length - 1) // model.block_size if world.kinds[request].takes_hits else 0
    found = (blocks.get(content(world, request, (i + 1) * model.block_size)) for i in range(bound))
    return [block for block in takewhile(lambda block: block is not None, found) if block is not None]


def next_content(model: Model, world: History, request: int, length: int, hits: int) -> Content | None:
    """The content that a head with these hits would wait for (8.7)."""
    bound = (length - 1) // model.block_size if world.kinds[request].takes_hits else 0
    return content(world, request, (hits + 1) * model.block_size) if hits < bound else None


def check_cache(model: Model, world: History, before: State, seen: Seen, state: State) -> None:
    """Everything about the cache that does not need the contents of memory."""
    held = at_execute(before, seen)
    new = dict(seen["published"])
    assert state["published"] == held | new, "content lost or changed"  # 10.5
    assert not new.keys() & held.keys(), "published again"
    expected: dict[Content, int] = {}
    for _, block, what in filled(model, world, seen, state) if not seen["error"] else ():
        if what not in held.values():
            expected.setdefault(what, block)
    assert seen["published"] == [(block, what) for what, block in expected.items()], "published wrongly"  # 11.3 11.4
    assert len(set(state["published"].values())) == len(state["published"]), "content twice"  # 11.4
    assert all(state["references"][b] == 1 or b in state["published"] for b in state["references"]), (
        "shared unpublished"
    )
    check_eviction(before, seen, state)
    check_admission(model, world, before, seen, state)


def check_eviction(before: State, seen: Seen, state: State) -> None:
    """Blank first, then the least recently freed, never an owned one, and before anybody falls (6.2, 10.4)."""
    gone = [*seen["reaped"], *seen["preempted"]]
    owned = {block for r, table in before["tables"].items() if r not in gone for block in table}
    assert not owned & set(seen["evicted"]), "an owned block was evicted"
    order = list(before["cached"])
    for request in gone:
        for block in reversed(before["tables"][request]):
            order = [*(b for b in order if b != block), block]
    at = [order.index(block) for block in seen["evicted"]]
    assert at == sorted(at), "evicted out of order"
    passed = set(order[: at[-1]] if at else ()) - set(seen["evicted"])
    assert not passed & set(state["cached"]), "evicted out of order"
    assert not seen["preempted"] or set(before["cached"]) <= set(seen["evicted"]), "preempted before evicting"
    if seen["evicted"]:
        left = state["blank"] if not seen["preempted"] else set(before["blank"]) & set(state["blank"])
        assert not left, "evicted before the last blank block"


def check_admission(model: Model, world: History, before: State, seen: Seen, state: State) -> None:
    """Who gets which hits, who waits and who does not (6.5, 8.2-8.7, 11.6)."""
    held, size = at_execute(before, seen), model.block_size
    lengths = {r: n - (r in dict(seen["sampled"])) for r, n in state["num_tokens"].items()}
    coming: dict[Content | None, int] = {what: r for r, _, what in reversed(filled(model, world, seen, state))}
    assert [r for r, _ in seen["hits"]] == [r for r, _, _ in seen["admitted"]], "hits without an admission"
    first = {r: at for r, at, _ in computed(seen)}
    for (request, hits), (_, _, table) in zip(seen["hits"], seen["admitted"], strict=True):
        assert list(table[:hits]) == wanted_hits(model, world, held, request, lengths[request]), "other hits than due"
        assert first[request] == hits * size, "computed again what was hit"
        missed = next_content(model, world, request, lengths[request], hits)
        assert coming.get(missed, request) == request, "computed twice in one iteration"  # 8.7
    free = len(state["blank"]) + len(state["cached"])
    if seen["admitted"]:
        last = seen["admitted"][-1][2]
        assert free >= model.watermark or len(last) > model.blocks - model.watermark, "into the reserve"
    used = sum(count for _, _, count in computed(seen))
    if state["waiting"] and len(state["rows"]) < model.rows and used < model.budget:
        head = state["waiting"][0]
        hits = wanted_hits(model, world, held, head, lengths[head])
        need = -(-lengths[head] // size)
        reserve = model.watermark if need <= model.blocks - model.watermark else 0
        fits = need - sum(1 for block in hits if state["references"].get(block)) <= free - reserve
        waits = next_content(model, world, head, lengths[head], len(hits)) in coming
        assert waits or not fits, "held back without a reason"
    for request, hits in seen["hits"]:
        if request in seen["preempted"][-1:]:
            table = state["tables"][request][:hits]
            assert set(table) - set(before["tables"][request]), "readmitted without a foreign block"  # 6.5


def check_content(model: Model, world: History, before: State, seen: Seen, state: State) -> Memory:
    """Play the writes of an iteration: what is read and what is published was computed from the tokens claimed."""
    memory, size, held = dict(world.memory), model.block_size, at_execute(before, seen)
    unwritten: tuple[tuple[int, ...] | None, ...] = (None,) * size
    for request, at, count in computed(seen):
        table, text = state["tables"][request], world.text(request, at + count)
        for p in range(at):
            found = memory.get(table[p // size], unwritten)[p % size]
            assert found == text[: p + 1], "reads what was computed from other tokens"
        for block in {table[p // size] for p in range(at, at + count)}:
            assert state["references"][block] == 1, "a shared block is written"
            assert block not in held, "a published block is written"
    for request, at, count in computed(seen):
        table, text = state["tables"][request], world.text(request, at + count)
        for p in range(at, at + count):
            cells = list(memory.get(table[p // size], unwritten))
            cells[p % size] = None if seen["error"] else text[: p + 1]
            memory[table[p // size]] = tuple(cells)
    for block, (_, tokens) in state["published"].items():
        claimed = tuple(tokens[: p + 1] for p in range(len(tokens) - size, len(tokens)))
        assert memory.get(block) == claimed, "published what was not computed"
    for request, hits in seen["hits"]:
        for i, block in enumerate(state["tables"][request][:hits]):
            assert held[block] == content(world, request, (i + 1) * size), "hit of other content"
    return memory


def count_cache(model: Model, world: History, before: State, seen: Seen, state: State, reached: Counter[str]) -> None:
    """What an iteration showed of the cache."""
    reached["evicting"] += len(seen["evicted"])
    reached["evicting to grow"] += len(set(seen["evicted"]) & {block for _, block in seen["grown"]})
    reached["evicting and preempting"] += bool(seen["evicted"] and seen["preempted"])
    reached["sharing"] += sum(1 for times in state["references"].values() if times > 1)
    hit = [(r, state["tables"][r][i]) for r, hits in seen["hits"] for i in range(hits)]
    reached["unowned hit"] += sum(1 for _, block in hit if state["references"][block] == 1)
    made = filled(model, world, seen, state)
    reached["duplicate"] += 0 if seen["error"] else len(made) - len(seen["published"])
    reached["readmitting at once"] += len(set(seen["preempted"]) & {r for r, _, _ in seen["admitted"]})
    generated = {r for r in before["waiting"] if before["num_tokens"][r] > len(world.kinds[r].prompt)}
    reached["finding own text again"] += sum(
        1 for r, hits in seen["hits"] if r in generated and hits * model.block_size > len(world.kinds[r].prompt)
    )
    if state["waiting"] and len(state["rows"]) < model.rows:
        head, held = state["waiting"][0], at_execute(before, seen)
        length = state["num_tokens"][head]
        hits = wanted_hits(model, world, held, head, length)
        missed = next_content(model, world, head, length, len(hits))
        by: dict[Content | None, int] = {what: r for r, _, what in reversed(made)}
        reached["waiting for a publication"] += missed in by
        reached["waiting for a decode"] += by.get(missed) in [r for r, _, _ in seen["decodes"]]
        reached["waiting for nothing"] += missed in by and seen["error"]
    known = set(state["published"].values())
    size = model.block_size
    reached["orphan"] += sum(1 for salt, text in known if len(text) > size and (salt, text[:-size]) not in known)
