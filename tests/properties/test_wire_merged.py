"""What several steps made crosses to the clients in one flush: it happens, is counted, holds, and a mistake in it is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.trace import Shape, Submit, Workload
from properties import wire
from properties.floors import ENOUGH, ON_RUNG, Floors
from properties.generate import RandomSource, workload
from properties.lockstep import run
from properties.wire import BUSY, WireRung
from server.bridge import Bridge

SHAPE = Shape(blocks=24, block_size=4, rows=4)
Calls = list[Callable[[], None]]
MISTAKES: dict[
    str, Callable[[Calls, Calls], Calls]
] = {  # of what waits and what comes, where there is something of both
    "lost": lambda before, now: now,
    "doubled": lambda before, now: [*before, *before, *now],
    "the newest first": lambda before, now: [*now, *before],
    "the last is dropped": lambda before, now: [*before[:-1], *now],
}


def _mistaken(bridge: Bridge, mix: Callable[[Calls, Calls], Calls]) -> Callable[..., None]:
    honest = bridge._deliver

    def deliver(*calls: Callable[[], None]) -> None:
        if bridge._scheduled and bridge._outbox:
            bridge._outbox = mix(bridge._outbox, list(calls))
        else:
            honest(*calls)

    return deliver


def _drawn(count: int) -> Iterator[Workload]:
    return (workload(RandomSource(f"merged {number}")) for number in range(count))


def test_steps_are_merged_often_enough_and_hold() -> None:
    floors = Floors("wire")
    for number, given in enumerate(_drawn(60)):
        ran = run(given, make_rung=WireRung)
        assert ran.first is None, number
        floors.add(ran.occurred)
    assert {name: floors.hits[name] / floors.runs > share for name, share in ON_RUNG["wire"].items()} == dict.fromkeys(
        ON_RUNG["wire"], True
    )


def test_two_and_three_steps_are_read_at_once() -> None:
    sizes: Counter[int] = Counter()

    class Seen(WireRung):
        def submit(self, *arguments: Any) -> tuple[int, ...]:
            requests = super().submit(*arguments)
            client, read = self._clients[-1], self._clients[-1]._read

            def seen(event: Any) -> None:
                sizes.update(len(choice["token_ids"]) for choice in event.get("choices", ()))
                read(event)

            client._read = seen  # type: ignore[method-assign]
            return requests

    ran = run(Workload(SHAPE, (Submit(0, (("a", 2),), 14),)), make_rung=Seen)
    assert ran.first is None
    assert (sizes[2], sizes[3]) == (2, 2)  # iterations 3 and 4, 5 to 7, 10 and 11, 12 to 14
    assert ran.occurred["deliveries merged"] == 4


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_mistake_in_merging_is_seen_and_only_where_steps_are_merged(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mistaken(WireRung):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            monkeypatch.setattr(self._bridge, "_deliver", _mistaken(self._bridge, MISTAKES[mistake]))

    found = [run(given, make_rung=Mistaken).first for given in _drawn(25)]
    assert {finding.check for finding in found if finding is not None} >= {"stream"}
    monkeypatch.setattr(wire, "BUSY", (False,) * len(BUSY))
    assert [run(given, make_rung=Mistaken).first for given in _drawn(25)] == [None] * 25


def test_a_rung_that_never_merges_misses_its_floor() -> None:
    floors = Floors("wire")
    floors.merge({"runs": ENOUGH, "hits": {}})
    assert any("deliveries merged:" in line for line in floors.missed())
    floors.rung = "ledger"
    assert not any("deliveries" in line for line in floors.missed())
