"""Small boxes of workloads, each enumerated to its last member: what a search by chance may miss, a box cannot.

The odometer remembers every choice of the run before and how many alternatives it had, and bumps the last one that can grow.
So the code that makes a workload reads like a generator's, and needs no list of all combinations. Workloads come from small
to large: fewer requests first, and the simplest value of everything first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import attrs

from engine.trace import Abort, Event, FailStep, Shape, Submit, Workload

T = TypeVar("T")
LOOSE = 64  # a budget that no iteration of a box exhausts


class Odometer:
    """``while odometer.turn(): ...`` runs the body once for every combination of what it picks."""

    def __init__(self) -> None:
        self._digits: list[tuple[int, int]] = []  # choice, alternatives; the last one turns fastest
        self._at = 0
        self._started = False

    def turn(self) -> bool:
        """Moves to the next combination. False when there is none."""
        self._at = 0
        if not self._started:
            self._started = True
            return True
        while self._digits and self._digits[-1][0] + 1 == self._digits[-1][1]:
            self._digits.pop()
        if not self._digits:
            return False
        choice, alternatives = self._digits[-1]
        self._digits[-1] = choice + 1, alternatives
        return True

    def pick(self, options: Sequence[T]) -> T:
        if self._at == len(self._digits):
            self._digits.append((0, len(options)))
        choice, alternatives = self._digits[self._at]
        if alternatives != len(options):
            raise ValueError(f"choice {self._at} has {len(options)} alternatives, but had {alternatives} before")
        self._at += 1
        return options[choice]


@attrs.frozen
class Box:
    """Every workload of up to ``requests`` submissions and one event of ``trouble`` at most, on every shape of the box.

    ``budgets`` are above one token a row. Graphs are recorded for the odd row counts and one block less than the pool, so that
    exact, padded and uncaptured launches all occur. The first submission has stream a, no wait and no priority. ``ends`` are
    fields of a submission by name, instead of those above or beside them: how it stops, whom it shares with, how it fails.
    ``context`` is the longest request, ``queues`` how many may wait.
    """

    blocks: tuple[int, ...]
    block_sizes: tuple[int, ...]
    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    waits: tuple[int, ...]
    budgets: tuple[int, ...] = (LOOSE,)
    watermarks: tuple[int, ...] = (0,)
    persistent: tuple[bool, ...] = (True,)
    cache: tuple[bool, ...] = (False,)
    requests: int = 3
    choices: tuple[int, ...] = (1,)
    priorities: tuple[int, ...] = (0,)
    streams: tuple[str, ...] = ("a",)
    trouble: tuple[Event, ...] = ()
    ends: tuple[Mapping[str, Any], ...] = (MappingProxyType({}),)
    fallback: tuple[bool, ...] = (False,)
    context: tuple[int, ...] = (64,)
    queues: tuple[int, ...] = (64,)

    def shapes(self) -> Iterator[Shape]:
        odometer = Odometer()
        while odometer.turn():
            rows = odometer.pick(self.rows)
            blocks = odometer.pick(self.blocks)
            yield Shape(
                blocks=blocks,
                block_size=odometer.pick(self.block_sizes),
                rows=rows,
                budget=rows + odometer.pick(self.budgets),
                watermark=odometer.pick([reserve for reserve in self.watermarks if reserve < blocks]),
                capture_rows=tuple(range(1, rows + 1, 2)),
                capture_widths=(max(1, blocks - 1),),
                persistent_batch=odometer.pick(self.persistent if rows > 1 else (True,)),  # one row never moves
                prefix_cache=odometer.pick(self.cache),
                byte_fallback=odometer.pick(self.fallback),
                max_model_len=odometer.pick(self.context),
                max_waiting=odometer.pick(self.queues),
            )

    def workloads(self, shape: Shape) -> Iterator[Workload]:
        for requests in range(1, self.requests + 1):
            odometer = Odometer()
            while odometer.turn():
                events: list[Event] = [self._submit(odometer, first=not number) for number in range(requests)]
                trouble = odometer.pick((None, *self.trouble))
                yield Workload(shape, tuple(events if trouble is None else [*events, trouble]))

    def _submit(self, odometer: Odometer, *, first: bool) -> Submit:
        plain: dict[str, Any] = {
            "wait": 0 if first else odometer.pick(self.waits),
            "prompt": (("a" if first else odometer.pick(self.streams), odometer.pick(self.prompts)),),
            "max_tokens": odometer.pick(self.answers),
            "priority": 0 if first else odometer.pick(self.priorities),
            "n": odometer.pick(self.choices),
        }
        return Submit(**{**plain, **odometer.pick(self.ends)})

    def lines(self) -> Iterator[str]:
        """The box in words, one dimension a line."""
        for item in attrs.fields(Box):
            value = getattr(self, item.name)
            if value != item.default:
                listed = value if isinstance(value, tuple) else (value,)
                yield f"{item.name:12} {', '.join(_word(entry) for entry in listed)}"


def _word(value: object) -> str:
    match value:
        case Abort():
            return f"abort r{value.of} after {value.wait}"
        case FailStep():
            return f"fail {value.count} after {value.wait}"
        case Mapping():
            return " ".join(f"{key}={entry}" for key, entry in value.items()) or "plain"
        case bool():
            return "on" if value else "off"
        case _:
            return str(value)


_ABORTS = tuple(Abort(wait, of) for wait in (1, 2, 3) for of in (0, 1, 2))
_ENDS: tuple[Mapping[str, Any], ...] = (
    {},
    {"stop_at": 2},
    {"stop_at": 4, "min_tokens": 2},
    {"stop_at": 2, "min_tokens": 3},
    {"stop_at": 5},
    {"stop_text": 2},
    {"stop_text": 3, "include_stop": True},
    {"stop_text": 2, "min_tokens": 3},
    {"stop_text": 3, "stop_at": 2},
    {"stop_text": 8, "max_tokens": 9},
    {"max_tokens": 14},
    {"max_tokens": None},
    {"min_tokens": 6},
    {"prompt": ()},
    {"salt": "s", "n": 2},
    {"takes_hits": False},
    {"fail_at": 2, "fail_by": "sampling", "n": 2},
    {"fail_at": 2, "fail_by": "text"},
)
BOXES: Mapping[str, Box] = {
    "small": Box(
        blocks=(4,),
        block_sizes=(1, 2),
        rows=(3,),
        prompts=(1, 3),
        answers=(1, 3),
        waits=(0, 1),
        budgets=(LOOSE, 0),
        cache=(False, True),
    ),
    "arrivals": Box(
        blocks=(4, 3, 2),
        block_sizes=(1, 2),
        rows=(3, 2, 1),
        prompts=(1, 2, 3),
        answers=(1, 2, 4),
        waits=(0, 1),
        budgets=(LOOSE, 0),
        persistent=(True, False),
    ),
    "prefixes": Box(
        blocks=(3, 4, 5),
        block_sizes=(1, 2),
        rows=(2, 3),
        prompts=(1, 2, 4),
        answers=(1, 3),
        waits=(0, 1, 2),
        budgets=(LOOSE, 0),
        cache=(True,),
        streams=("a", "b"),
    ),
    "trouble": Box(
        blocks=(2, 3, 4),
        block_sizes=(1, 2),
        rows=(2, 3),
        prompts=(1, 3),
        answers=(2, 3),
        waits=(0, 1, 2),
        budgets=(LOOSE, 0),
        cache=(False, True),
        priorities=(0, -1),
        choices=(1, 2),
        requests=2,
        trouble=(*_ABORTS, FailStep(0, 1), FailStep(1, 1), FailStep(2, 2)),
    ),
    "ends": Box(
        blocks=(8,),
        block_sizes=(2,),
        rows=(2,),
        prompts=(2, 3),
        answers=(5,),
        waits=(0, 1),
        watermarks=(0, 4),
        cache=(False, True),
        requests=2,
        ends=_ENDS,
        fallback=(False, True),
        context=(64, 9),
        queues=(64, 1),
    ),
}
