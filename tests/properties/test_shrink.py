"""The reducer: smaller, still failing by the same check, the same every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.trace import Abort, Event, Shape, Submit, Workload, dumps
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


def test_the_published_leak_becomes_one_event_with_three_releases() -> None:
    """Shorter than one thinks: two choices of one request release three times when one of them is preempted."""
    large = corpus.workloads()["A05-the-published-leak.json"]
    small, tries = shrink(large, _fails("A05", "audit"))
    assert small == Workload(
        Shape(2, 2, 2), (Submit(0, (("a", 1),), 3, n=2),), title=large.title, fault="A05", found=large.found
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


def _shrunk(events: tuple[Event, ...], fails: Callable[[tuple[Event, ...]], bool]) -> tuple[Event, ...]:
    small, _ = shrink(Workload(Shape(4, 2, 2), events), lambda candidate: fails(candidate.events))
    return small.events


def _prompts(events: tuple[Event, ...]) -> list[tuple[tuple[str, int], ...]]:
    return [event.prompt for event in events if isinstance(event, Submit)]


def test_a_prompt_of_several_pieces_becomes_one_of_the_same_length() -> None:
    """Where the length counts and no piece can go."""
    large = (Submit(0, (("sys", 3), ("answer/0", 2), ("!", 2)), 1),)
    small = _shrunk(large, lambda events: [sum(n for _, n in prompt) for prompt in _prompts(events)] == [7])
    assert _prompts(small) == [(("a", 7),)]


def test_streams_are_renamed_together_where_sharing_counts() -> None:
    """Two that share a prefix and one that does not: no single rename keeps that."""

    def shares(events: tuple[Event, ...]) -> bool:
        names = [prompt[0][0] for prompt in _prompts(events)]
        return len(names) == 3 and names[0] == names[1] != names[2]

    large = (Submit(0, (("tenant", 2),), 1), Submit(0, (("tenant", 2),), 1), Submit(0, (("other", 2),), 1))
    assert _prompts(_shrunk(large, shares)) == [(("a", 1),), (("a", 1),), (("b", 1),)]


def test_predecessors_go_though_requests_are_named_by_number() -> None:
    """What asks again with an answer, and what aborts it, follow whom they mean."""

    def continues(events: tuple[Event, ...]) -> bool:
        numbered = list(enumerate(event for event in events if isinstance(event, Submit)))
        aborted = [event.target(len(numbered)) for event in events if isinstance(event, Abort)]
        return any(
            stream == f"answer/{asked}" and event.max_tokens == 2 and aborted == [number]
            for number, event in numbered
            for asked, earlier in numbered[:number]
            for stream, _ in event.prompt
            if earlier.max_tokens == 3
        )

    before = tuple(Submit(1, (("p", 1),), 1, n=2) for _ in range(3))
    large: tuple[Event, ...] = (
        *before,
        Submit(2, (("q", 2),), 3),
        Submit(1, (("q", 2), ("answer/6", 3)), 2),
        Abort(0, -1),
    )
    assert continues((Submit(0, (("a", 1),), 3), Submit(0, (("answer/0", 1),), 2), Abort(0, 1)))
    small = _shrunk(large, continues)
    assert small == (Submit(0, (("a", 1),), 3), Submit(0, (("answer/0", 1),), 2), Abort(0, 1))


def test_the_waits_of_what_is_dropped_are_kept_where_they_count() -> None:
    """Whoever arrives in iteration 5 still does, without whoever came before."""

    def late(events: tuple[Event, ...]) -> bool:
        return sum(event.wait for event in events) == 5 and any(prompt == (("a", 4),) for prompt in _prompts(events))

    assert _shrunk((Submit(2, (("a", 1),), 1), Submit(3, (("a", 4),), 1)), late) == (Submit(5, (("a", 4),), 1),)
