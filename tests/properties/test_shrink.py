"""The reducer: smaller, still failing by the same check, the same every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.trace import Abort, Shape, Submit, Workload, dumps
from properties import corpus
from properties.faults import armed
from properties.generate import RandomSource, workload
from properties.lockstep import run
from properties.shrink import shrink


def _fails(fault: str, check: str) -> Callable[[Workload], bool]:
    def fails(candidate: Workload) -> bool:
        with armed(fault):
            found = run(candidate).first
        return found is not None and found.check == check

    return fails


def test_the_published_leak_becomes_two_requests_with_three_releases() -> None:
    """Shorter than one thinks: two requests release three times when one of them is preempted."""
    large = corpus.workloads()["A05-the-published-leak.json"]
    small, tries = shrink(large, _fails("A05", "audit"))
    assert small == Workload(
        Shape(2, 2, 2), (Submit(0, (("a", 1),), 3),) * 2, title=large.title, fault="A05", found=large.found
    )
    assert tries < 500
    assert shrink(large, _fails("A05", "audit"))[0] == small


@pytest.mark.parametrize(("fault", "check"), [("P03", "audit"), ("S10", "decisions"), ("G02", "replay")])
def test_what_shrinks_still_fails_by_the_same_check(fault: str, check: str) -> None:
    fails = _fails(fault, check)
    large = next(
        w for w in (workload(RandomSource(f"shrink {k}")) for k in range(500)) if len(w.events) > 4 and fails(w)
    )
    small, _ = shrink(large, fails)
    assert fails(small)
    assert len(small.events) < len(large.events)
    assert len(dumps(small)) < len(dumps(large))
    assert not any(fails(candidate) for candidate in _without_one(small))  # no event is left that could go


def _without_one(small: Workload) -> list[Workload]:
    return [Workload(small.shape, small.events[:at] + small.events[at + 1 :]) for at in range(len(small.events))]


def test_everything_shrinks_to_the_simplest_when_everything_fails() -> None:
    large = Workload(
        Shape(9, 4, 3, 7, 2, 40, (1, 3), (2, 4), persistent_batch=False, max_waiting=3),
        (
            Submit(4, (("sys", 3), ("d", 7)), 9, stop_at=3, priority=-1, seed=4, salt="t", min_tokens=2, n=3),
            Abort(3, -4),
        ),
    )
    small, _ = shrink(large, lambda candidate: len(candidate.events) == 2)
    assert small == Workload(Shape(1, 1, 1), (Submit(0, (("a", 1),), 1), Abort(0, 0)))


def test_the_budget_of_tries_is_kept() -> None:
    large = corpus.workloads()["A05-the-published-leak.json"]
    small, tries = shrink(large, lambda candidate: True, budget=3)
    assert tries == 3
    assert len(small.events) < len(large.events)
