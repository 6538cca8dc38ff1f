"""What the engine raises, wherever it is called, and an engine that never comes back become findings, not tracebacks."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

import pytest

from engine.control.record import Ledger
from engine.control.scheduler import Scheduler
from engine.trace import Shape, Submit, Workload
from properties import guard, hunt, lockstep, workers
from properties.checks import Finding
from properties.examples import slots
from properties.guard import Guard, Overtime, overtime
from properties.hunt import batch, numbered
from properties.lockstep import Run, run
from properties.rung_ledger import LedgerRung
from properties.subject import Subject
from properties.subject_run import run_subject
from properties.trial import Trial

ONE = Workload(Shape(blocks=8, block_size=4, rows=2), (Submit(wait=0, prompt=(("a", 6),), max_tokens=3),))


def forever(*_: object, **__: object) -> NoReturn:
    while True:
        pass


def stubborn(*_: object, **__: object) -> None:
    """Catches whatever comes, as engine code may, and goes on for a while."""
    for _turn in range(8):
        with suppress(BaseException):
            forever()


def broken(*_: object, **__: object) -> NoReturn:
    raise AssertionError


def rung_with(**methods: Any) -> Callable[[Shape], Any]:
    return type("BrokenRung", (LedgerRung,), methods)


@pytest.mark.parametrize("name", ["submit", "step", "ledger", "audit", "told", "closing", "close"])
@pytest.mark.parametrize("judge_all", [False, True])
def test_a_call_without_end_is_a_finding(name: str, judge_all: bool) -> None:
    outcome = run(ONE, make_rung=rung_with(**{name: forever}), cpu_seconds=0.1, judge_all=judge_all)
    (found,) = outcome.findings
    assert found.check == "raises"
    assert found.headline.startswith(
        "an iteration took more than 0.1 s of CPU time (it was at tests/properties/test_gu"
    )
    assert overtime(found)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


def test_an_engine_that_swallows_the_exception_is_found_all_the_same() -> None:
    outcome = run(ONE, make_rung=rung_with(step=stubborn), cpu_seconds=0.05)
    assert outcome.first is not None
    assert overtime(outcome.first)


def test_a_loop_inside_the_engine_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "plan", forever)
    found = run(ONE, cpu_seconds=0.1).first
    assert found is not None
    assert (found.check, found.iteration) == ("raises", 1)


@pytest.mark.parametrize("name", ["has_work", "counters"])
def test_so_is_a_property_that_raises(name: str) -> None:
    found = run(ONE, make_rung=rung_with(**{name: property(broken)})).first
    assert found is not None
    assert found.check == "raises"


@pytest.mark.parametrize("name", ["submit", "step", "ledger", "audit", "told", "facts", "closing", "close"])
def test_an_exception_is_told_with_its_place(name: str) -> None:
    line = broken.__code__.co_firstlineno + 1
    outcome = run(ONE, make_rung=rung_with(**{name: broken}))
    assert [f"{f.check} {f.headline}" for f in outcome.findings] == [
        f"raises AssertionError at tests/properties/test_guard.py:{line}"
    ]


def test_so_is_one_while_comparing() -> None:
    def nonsense(self: LedgerRung) -> Ledger:
        return None  # type: ignore[return-value]

    outcome = run(ONE, make_rung=rung_with(ledger=nonsense))
    assert outcome.first is not None
    assert outcome.first.check == "raises"
    assert outcome.first.headline.startswith("AttributeError: 'NoneType' object has no attribute ")
    assert " at properties/diff.py:" in outcome.first.headline or " at properties/cached.py:" in outcome.first.headline


def test_an_engine_that_broke_after_the_finding_hides_nothing() -> None:
    """The state at the end is asked for once more, for the report."""
    asked = iter(range(100))

    def ledger(self: LedgerRung) -> Ledger:
        if next(asked):
            raise RuntimeError("no more")
        return LedgerRung.ledger(self)

    outcome = run(ONE, make_rung=rung_with(ledger=ledger, audit=lambda self: ["first"]))
    assert [found.check for found in outcome.findings] == ["audit", "raises"]
    assert outcome.left is None


def test_time_between_calls_is_nobodys_and_other_threads_are_left_alone() -> None:
    with Guard(0.05) as guarded:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            guarded(int)
        with pytest.raises(Overtime):
            guarded(forever)
    ran: list[int] = []

    def elsewhere() -> None:
        with Guard(0.05) as inside:
            ran.append(inside(lambda: 7))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert ran == [7]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def hasty(workload: Workload, **options: Any) -> Run:
        return run(workload, cpu_seconds=0.1, **options)

    monkeypatch.setattr("properties.trial.run", hasty)
    monkeypatch.setattr(Scheduler, "plan", forever)
    yield
    assert lockstep.run is run
    assert guard.CPU_SECONDS > 1


def shrunk(number: int, found: Finding, end: float) -> hunt.Find:
    finds = [hunt.Find(number, numbered(1, number), found)]
    hunt._shrink_last(finds, Trial(), end)
    return finds[0]


@pytest.mark.usefixtures("impatient")
def test_the_hunter_looks_at_the_clock_after_each_and_saves_it_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    told = batch(1, 0, Trial())
    ((number, found),) = told["failed"]
    assert found.check == "raises"
    assert told["floors"]["runs"] == number + 1 < 10
    monkeypatch.setattr(hunt, "SHRINKING_SLOW", 0.3)
    start = time.monotonic()
    find = shrunk(number, found, math.inf)
    assert (find.number, overtime(find.finding)) == (number, True)
    assert len(find.workload.events) <= len(numbered(1, number).events)
    assert time.monotonic() - start < 20


def test_nothing_new_starts_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a workload of a batch nor a try of the reducer: the find is kept as it is."""
    over = time.monotonic() - 1000
    assert batch(1, 0, Trial(), over)["floors"]["runs"] == 0
    monkeypatch.setattr(Scheduler, "plan", broken)
    ((number, found), *_) = batch(1, 0, Trial())["failed"]
    find = shrunk(number, found, over)
    assert (find.workload, find.finding) == (numbered(1, number), found)
    in_time = shrunk(number, found, time.monotonic())
    assert len(in_time.workload.events) < len(find.workload.events)


@pytest.mark.usefixtures("impatient")
def test_a_hunt_on_an_engine_that_loops_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time asked for, two calls' bounds and what shrinking may take; batches here run in this process."""

    class Inline:
        def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(call(*arguments))
            return future

    monkeypatch.setattr(workers, "pool", lambda jobs: nullcontext(Inline()))
    monkeypatch.setattr(hunt, "SHRINKING_SLOW", 0.3)
    start = time.process_time()
    hunted = hunt.hunt(0.005, seed=1)
    assert [overtime(find.finding) for find in hunted.finds] == [True]
    assert time.process_time() - start < 5


def test_a_subject_that_loops_is_found() -> None:
    def make(shape: Shape) -> Subject:
        subject = slots.make(shape)
        subject.step = forever  # type: ignore[method-assign]
        return subject

    found = run_subject(ONE, make, cpu_seconds=0.1).first
    assert found is not None
    assert (found.check, found.iteration) == ("raises", 1)
    assert overtime(found)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
