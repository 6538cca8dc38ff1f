"""Workloads worth running: one shaping of them for two sources of choices, Hypothesis and a plain generator of numbers.

Shaped, because unshaped workloads are empty: drawn freely, one run in fourteen preempts. So the pool is sized from the
requests, lengths fall at block borders, prompts share named streams, and a swarm of switches is drawn first, each of which
turns a whole kind of event off in one workload so that the others get room. What rarely comes together by chance is brought
together by a shape of its own:

    mixed    anything
    crowd    everybody arrives at once in a pool that holds them only while they are young; then some are aborted
    family   a few prompts, equal or one the beginning of the other, again and again, with the prefix cache on
    churn    long prompts, short answers and a tight budget: rows change hands while prompts are part-prefilled

Order matters for shrinking: every list of alternatives starts with the harmless one, and every switch's first value is
"allowed", so that a shrunk workload keeps only what its failure needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import attrs

from engine.trace import ANSWER, OUTSIDE, Abort, Event, FailStep, Shape, Submit, Workload
from properties.dressing import dress
from properties.rarities import season

T = TypeVar("T")


class Source(Protocol):
    """Where choices come from. The first or lowest choice is the simplest."""

    def pick(self, options: Sequence[T]) -> T: ...

    def number(self, low: int, high: int) -> int: ...

    def many(self, make: Callable[[Source], T], low: int, high: int) -> list[T]: ...


class RandomSource:
    """Plain pseudo-random choices: fast, and the same workload for the same seed."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def many(self, make: Callable[[Source], T], low: int, high: int) -> list[T]:
        return [make(self) for _ in range(self.number(low, high))]


@attrs.frozen
class Swarm:
    """What one workload may contain, and how densely. Lengths are in blocks."""

    block_size: int
    rows: int
    aborts: bool
    failures: bool
    sharing: bool
    stops: bool
    priorities: bool
    choices: bool
    refusals: bool
    pressure: bool  # a pool that holds little more than the largest request
    patience: int  # longest wait between two events
    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    budgets: tuple[int, ...]  # above one token a row
    shape: str = "mixed"


UNLIMITED = 2048
LONGEST_TALK = 30  # tokens of a prompt that holds earlier turns
SHAPES = ("mixed", "mixed", "crowd", "family", "churn", "crowd")


def workload(source: Source, shapes: Sequence[str] = SHAPES) -> Workload:
    swarm = _swarm(source, shapes)
    least = source.pick((1, 4, 8))
    if swarm.shape == "crowd":
        arrivals = source.many(lambda s: _submit(s, swarm, 0), 2, least + 4)
        events = (*arrivals, *source.many(lambda s: _trouble(s, swarm), 1, 6))
    else:
        events = tuple(source.many(lambda s: _event(s, swarm), least, 3 * least + 2))
    if swarm.shape == "family":
        events = tuple(_turns(source, swarm, events))
    return season(source, dress(source, Workload(_shape(source, swarm, events), events)))


def _swarm(source: Source, shapes: Sequence[str]) -> Swarm:
    allowed = (True, True, False)
    swarm = Swarm(
        block_size=source.pick((2, 4, 1, 3)),
        rows=source.pick((2, 3, 4, 1, 5, 6, 3)),
        aborts=source.pick(allowed),
        failures=source.pick((True, False, False)),
        sharing=source.pick(allowed),
        stops=source.pick(allowed),
        priorities=source.pick(allowed),
        choices=source.pick((True, False)),
        refusals=source.pick((True, False, False, False)),
        pressure=source.pick((False, True)),
        patience=source.pick((0, 2, 5)),
        prompts=(1, 1, 2, 3),
        answers=source.pick(((1, 1, 2), (2, 3, 5))),
        budgets=(UNLIMITED, UNLIMITED, 0, 1, 3, 8),
    )
    shape = source.pick(shapes)
    return attrs.evolve(swarm, shape=shape, **_settled(shape, swarm))


def _settled(shape: str, swarm: Swarm) -> dict[str, Any]:
    """What a shape does not leave to chance."""
    busy = max(2, swarm.rows)
    if shape == "crowd":
        calm = {"stops": False, "refusals": False, "aborts": True, "budgets": (UNLIMITED, UNLIMITED, 3)}
        return {"rows": busy, "prompts": (1, 1, 2), "answers": (2, 3, 4), **calm}
    if shape == "family":
        return {"sharing": True, "choices": True, "patience": max(2, swarm.patience), "budgets": (UNLIMITED, 1, 3, 8)}
    if shape == "churn":
        tight = {"budgets": (0, 1, 2), "patience": 2, "aborts": True}
        return {"rows": busy, "prompts": (1, 2, 3, 4), "answers": (1, 1, 2), **tight}
    return {}


def _event(source: Source, swarm: Swarm) -> Event:
    wait = source.pick((0, 0, 1, swarm.patience)) if swarm.patience else 0
    kinds = ["submit"] * (3 if swarm.shape == "churn" else 6) + ["trouble"] * (2 * swarm.aborts + swarm.failures)
    return _submit(source, swarm, wait) if source.pick(kinds) == "submit" else _trouble(source, swarm)


def _trouble(source: Source, swarm: Swarm) -> Event:
    if source.pick(["abort"] * (2 * swarm.aborts) + ["fail"] * swarm.failures or ["abort"]) == "abort":
        return Abort(source.pick((1, 0, 2, 3, 4, 7)), source.pick((0, -1, -1, -2, -3, 1, 2, 3)))
    return FailStep(source.pick((1, 0, 3)), source.pick((1, 2)))


def _submit(source: Source, swarm: Swarm, wait: int) -> Submit:
    prompt = _prompt(source, swarm)
    max_tokens: int | None = _length(source, swarm, swarm.answers)
    if swarm.refusals:
        prompt, max_tokens = source.pick(((prompt, max_tokens), (prompt, max_tokens), *_unusual(prompt, max_tokens)))
    stop_at = source.pick((None, source.number(1, max_tokens or 8) or 1)) if swarm.stops else None
    return Submit(
        wait,
        prompt,
        max_tokens,
        stop_at=stop_at,
        priority=source.pick((0, 0, 1, -1)) if swarm.priorities else 0,
        min_tokens=source.pick((0, 0, 2, 5)) if stop_at is not None else 0,
        n=source.pick((1, 1, 1, 2, 3)) if swarm.choices else 1,
        salt=source.pick(("", "", "", "s1", "s2")) if swarm.sharing else "",
    )


def _unusual(
    prompt: tuple[tuple[str, int], ...], max_tokens: int | None
) -> tuple[tuple[tuple[tuple[str, int], ...], int | None], ...]:
    """What the door must refuse, and the absent max_tokens that it must settle."""
    return (
        ((), max_tokens),
        ((*prompt, (OUTSIDE, 1)), max_tokens),
        (prompt, 0),
        (prompt, 100),
        (prompt, None),
        ((*prompt, ("a", 70)), 1),
        ((("d", 63),), 1),  # fills the context to its last position
    )


def _length(source: Source, swarm: Swarm, blocks: tuple[int, ...]) -> int:
    """At and around block borders, where off-by-one faults live."""
    return max(1, source.pick(blocks) * swarm.block_size + source.pick((0, -1, 1)))


_RUN_TOGETHER = ("a", "b", "paa", "pqn")  # the ids that the last two begin with, 238 8 and 23 88, have the same digits


def _prompt(source: Source, swarm: Swarm) -> tuple[tuple[str, int], ...]:
    if swarm.shape == "family":
        head = ("sys", swarm.block_size * source.pick((1, 2, 3)))
        return source.pick(((head,), (head,), (head, ("a", 1)), (head, ("b", swarm.block_size))))
    own = (
        source.pick(_RUN_TOGETHER if swarm.block_size == 2 and swarm.sharing else "abcd"),
        _length(source, swarm, swarm.prompts),
    )
    if swarm.sharing and source.pick((False, True)):
        return (("sys", swarm.block_size * source.pick((1, 2))), own)
    return (own,)


def _turns(source: Source, swarm: Swarm, events: Sequence[Event]) -> Iterator[Event]:
    """Some submissions go on from an earlier one and its answer, often while that is still being generated."""
    asked: list[tuple[int, Submit]] = []  # each with the id of its first choice
    submitted = 0
    for event in events:
        if isinstance(event, Submit):
            if asked and source.number(0, 1):
                first, before = source.pick(asked[-2:])
                answer = (f"{ANSWER}{first}", swarm.block_size * source.pick((1, 2)))
                prompt = (*before.prompt, answer, ("c", 1))
                if sum(length for _, length in prompt) <= LONGEST_TALK:
                    event = replace(event, wait=source.pick((0, 1, 2, 3)), prompt=prompt, salt=before.salt)
            asked.append((submitted, event))
            submitted += event.n
        yield event


def _shape(source: Source, swarm: Swarm, events: tuple[Event, ...]) -> Shape:
    submits = [event for event in events if isinstance(event, Submit)]
    needs = sorted(_blocks(event, swarm.block_size) for event in submits) or [1]
    blocks = needs[-1] + source.pick(_spare(swarm, submits, needs))
    if swarm.refusals:
        blocks = source.pick((blocks, needs[len(needs) // 2]))
    captured = list(range(1, swarm.rows + 1))
    widest = max(needs)
    return Shape(
        blocks=blocks,
        block_size=swarm.block_size,
        rows=swarm.rows,
        budget=swarm.rows + source.pick(swarm.budgets),
        watermark=0 if swarm.shape == "crowd" else source.pick((0, 0, 0, 1, 2, blocks // 2)) % blocks,
        max_model_len=source.pick((64, 64, 20)) if swarm.refusals else 64,
        capture_rows=tuple(source.pick((captured, captured[-1:], captured[1::2], captured[:1], []))),
        capture_widths=tuple(source.pick(([widest + 1], sorted({max(1, widest // 2), widest}), [max(1, widest - 1)]))),
        persistent_batch=swarm.shape == "churn" or source.pick((True, True, False)),
        prefix_cache=swarm.shape == "family" or source.pick((False, True)),
        max_waiting=source.pick((64, 64, 2, 4)) if swarm.refusals else 64,
    )


def _spare(swarm: Swarm, submits: list[Submit], needs: list[int]) -> tuple[int, ...]:
    """How many blocks the pool may hold beyond those of the largest request."""
    total = sum(needs)
    if swarm.shape == "crowd":  # the prompts of the first ones and little more: they start together, and then grow
        young = [-(-event.prompt_len // swarm.block_size) for event in submits for _ in range(event.n)]
        spare = max(0, sum(young[: swarm.rows]) - needs[-1])
        return (spare, spare, spare + 1, 0)
    if swarm.pressure:
        return (0, 1, 2, 3)
    return (min(total, 24), 0, max(1, total // 5), max(1, total // 4))


def _blocks(event: Submit, block_size: int) -> int:
    return max(1, -(-(event.prompt_len + (event.max_tokens or 1) - 1) // block_size))
