"""Small boxes of workloads, each enumerated to its last member: what a search by chance may miss, a box cannot.

The odometer remembers every choice of the run before and how many alternatives it had, and bumps the last one that can grow.
So the code that makes a workload reads like a generator's, and needs no list of all combinations. Workloads come from small
to large: fewer requests first, and the simplest value of everything first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

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
    exact, padded and uncaptured launches all occur. The first submission has stream a, no wait and no priority.
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
            )

    def workloads(self, shape: Shape) -> Iterator[Workload]:
        for requests in range(1, self.requests + 1):
            odometer = Odometer()
            while odometer.turn():
                events: list[Event] = [self._submit(odometer, first=not number) for number in range(requests)]
                trouble = odometer.pick((None, *self.trouble))
                yield Workload(shape, tuple(events if trouble is None else [*events, trouble]))

    def _submit(self, odometer: Odometer, *, first: bool) -> Submit:
        return Submit(
            wait=0 if first else odometer.pick(self.waits),
            prompt=(("a" if first else odometer.pick(self.streams), odometer.pick(self.prompts)),),
            max_tokens=odometer.pick(self.answers),
            priority=0 if first else odometer.pick(self.priorities),
            n=odometer.pick(self.choices),
        )

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
        case bool():
            return "on" if value else "off"
        case _:
            return str(value)


_ABORTS = tuple(Abort(wait, of) for wait in (1, 2, 3) for of in (0, 1, 2))
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
}
