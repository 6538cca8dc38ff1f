"""Requests without prefix hits (rule 11.7) are drawn by the gate, and an engine that gives them hits all the same is seen."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from engine.control.request import Request
from engine.control.scheduler import Scheduler
from engine.trace import Submit, Workload
from properties.lockstep import run
from properties.strategies import workloads

PLAYS = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def _without(workload: Workload) -> bool:
    return any(isinstance(event, Submit) and not event.takes_hits for event in workload.events)


def _played() -> list[tuple[bool, bool]]:
    """(asked for no hits, held) of each workload of the gate's own strategy."""
    seen: list[tuple[bool, bool]] = []

    @PLAYS
    @given(w=workloads())
    def play(w: Workload) -> None:
        seen.append((_without(w), run(w).first is None))

    play()
    return seen


def test_they_are_drawn_and_hold() -> None:
    played = _played()
    assert sum(asked for asked, _ in played) >= 5
    assert all(held for _, held in played)


def test_hits_for_all_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Scheduler._eligible

    def generous(scheduler: Scheduler, request: Request) -> object:
        request.takes_hits = True
        return honest(scheduler, request)

    monkeypatch.setattr(Scheduler, "_eligible", generous)
    assert any(asked and not held for asked, held in _played())
