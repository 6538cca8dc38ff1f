"""Foreign schedulers under the harness: the example holds, its faults are found, and each check sees what it is for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.trace import Abort, FailStep, Shape, Submit, Workload, load
from properties import commands, corpus
from properties.__main__ import main
from properties.examples import ours, slots, tidy
from properties.examples.slots import Gaps, Slots
from properties.faults import CATALOGUE, armed
from properties.floors import Floors
from properties.hunt import numbered
from properties.page import page
from properties.subject import Ask, Batch, Compute, Holdings, MakeSubject, Promises, Refused, Told, Work, find
from properties.subject_cache import Alone, Cache
from properties.subject_run import floors_for, run_subject
from properties.trial import Trial
from tests.properties.counted_hunt import counted_hunt

EXAMPLES = Path(slots.__file__).parent
SHAPE = Shape(6, 2, 3, budget=8)
PAIR = Workload(SHAPE, (Submit(0, (("a", 3),), 3), Submit(0, (("b", 2),), 2), Submit(1, (("c", 4),), 3, stop_at=2)))


# The example --------------------------------------------------------------------------------------------------------


def test_the_example_holds_and_reaches_its_floors() -> None:
    floors = Floors()
    for number in range(300):
        outcome = run_subject(numbered(11, number), slots.make)
        assert outcome.first is None, f"workload {number}: {outcome.first}"
        floors.add(outcome.occurred)
    assert floors.missed(floors_for(slots.make, SHAPE)) == []


def test_one_that_moves_requests_holds_and_moves() -> None:
    copied = 0
    for number in range(150):
        outcome = run_subject(numbered(11, number), tidy.make)
        assert outcome.first is None, f"workload {number}: {outcome.first}"
        copied += outcome.occurred["copied"] > 0
    assert copied >= 5


def test_a_scheduler_that_refuses_everything_misses_the_floors() -> None:
    class Closed(Slots):
        def submit(self, ask: Ask) -> None:
            raise Refused("closed")

    floors = Floors()
    for number in range(200):
        outcome = run_subject(numbered(11, number), lambda shape: Closed(shape, Gaps(shape.blocks)))
        assert outcome.first is None
        floors.add(outcome.occurred)
    assert any("computed: 0 of 200" in line for line in floors.missed(floors_for(slots.make, SHAPE)))


@pytest.mark.parametrize(
    ("fault", "check"), [("slots:unjoined", "drain"), ("slots:greedy", "ledger"), ("tidy:backwards", "writes")]
)
def test_the_hunt_finds_the_planted_fault(
    fault: str, check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README tells it: hunted, shrunk to a few events, replayed with exit status 1, and gone without the fault.

    The hunt ends with the find or after so many workloads, and not by the clock."""
    name = f"properties.examples.{fault}"
    monkeypatch.setattr(
        commands, "hunt", lambda *_, **__: counted_hunt(Trial(subject=name), seed=1, workloads=500, check=check)
    )
    hunted = ["hunt", "--minutes", "1", "--seed", "1", "--jobs", "1", "--found", str(tmp_path), "--json"]
    assert main([*hunted, "--subject", name]) == 1
    finds = {found["check"]: found["file"] for found in json.loads(capsys.readouterr().out)["finds"]}
    saved = load(Path(finds[check]))
    assert len(saved.events) <= 4
    assert (saved.found or {})["subject"] == name
    assert main(["replay", finds[check], "--subject", name]) == 1
    said = capsys.readouterr().out
    assert (
        said.rstrip()
        .splitlines()[-1]
        .startswith(f"replay: python -m properties replay {finds[check]} --subject {name}")
    )
    assert main(["replay", finds[check], "--subject", f"{name.partition(':')[0]}:make"]) == 0
    assert main(["shrink", finds[check], "--subject", name, "--found", str(tmp_path)]) == 1


def test_the_readme_of_the_examples_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """The subjects that it names exist, and the report is what the command above it prints."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"properties\.examples\.\w+:\w+", text):
        find(name)
    file = EXAMPLES / "unjoined.json"
    assert main(["replay", str(file), "--subject", "properties.examples.slots:unjoined"]) == 1
    printed = capsys.readouterr().out
    told = text[text.index("drain: nothing moves" if "drain: nothing moves" in text else "drain at iteration") :]
    assert told.partition("```")[0].rstrip() == printed.partition("workload:")[0].rstrip()


def test_its_page_has_one_side() -> None:
    outcome = run_subject(PAIR, slots.make)
    text = page(PAIR, outcome, "")
    assert outcome.first is None
    assert text.count('class="side"') == 1
    assert ">subject</h2>" in text


# Each check can fail ------------------------------------------------------------------------------------------------


class Twisted(Slots):
    """The example with one thing changed on its way out."""

    batch: Callable[[Batch], Batch] = staticmethod(lambda batch: batch)
    told: Callable[[Told], Told] = staticmethod(lambda told: told)
    held: Callable[[Holdings], Holdings] = staticmethod(lambda held: held)
    said: tuple[str, ...] = ()
    twice = False

    def step(self, compute: Compute) -> Told:
        def twisted(batch: Batch) -> Any:
            if self.twice:
                compute(self.batch(batch))
            return compute(self.batch(batch))

        return self.told(super().step(twisted))

    def ledger(self) -> Holdings:
        return self.held(super().ledger())

    def audit(self) -> list[str]:
        return [*super().audit(), *self.said]


def twist(**changed: Any) -> MakeSubject:
    kind = type("Changed", (Twisted,), {n: staticmethod(v) if callable(v) else v for n, v in changed.items()})
    return lambda shape: kind(shape, Gaps(shape.blocks))


def each(change: Callable[[Work], Work]) -> Callable[[Batch], Batch]:
    return lambda batch: Batch(tuple(map(change, batch.work)), batch.copies)


def moved(held: Holdings) -> Holdings:
    return attrs.evolve(held, rows=dict.fromkeys(held.rows, 0))


def twice_held(held: Holdings) -> Holdings:
    """The last block of the pool, if it is free, is held by two instead."""
    if held.free[-1:] != (5,):
        return held
    return attrs.evolve(held, tables={**held.tables, 8: (5,), 9: (5,)}, free=held.free[:-1])


def shifted(work: Work) -> Work:
    """Everybody but r0 is given a table that begins one block too early."""
    return work if work.request == 0 else attrs.evolve(work, table=tuple(block - 1 for block in work.table))


def aborted(told: Told) -> Told:
    return Told(tuple((request, "abort") for request, _ in told.ended))


TWISTS: list[tuple[dict[str, Any], str, str]] = [
    ({"twice": True}, "raises", "compute is called twice"),
    ({"batch": each(lambda w: attrs.evolve(w, row=9))}, "raises", "row 9 stands 2 times in one batch"),
    ({"batch": each(lambda w: attrs.evolve(w, table=()))}, "raises", "its table has 0 blocks"),
    ({"batch": each(lambda w: attrs.evolve(w, table=(77,) * 9))}, "raises", "names block 77, but the pool has 6"),
    (
        {"batch": each(lambda w: attrs.evolve(w, request=77))},
        "raises",
        "request r77 stands 2 times|r77 is computed, but",
    ),
    ({"batch": lambda b: 1 / 0}, "raises", "ZeroDivisionError"),
    ({"said": ("a gap is missing",)}, "audit", "a gap is missing"),
    ({"told": lambda t: attrs.evolve(t, preempted=(0,))}, "decisions", "r0 is set back"),
    ({"held": lambda h: attrs.evolve(h, free=h.free[1:])}, "ledger", "block 5 is held by nobody and not free"),
    ({"held": lambda h: attrs.evolve(h, free=(*h.free, 0))}, "ledger", "block 0 is held by r0 and free"),
    ({"held": lambda h: attrs.evolve(h, free=(*h.free, 9))}, "ledger", "block 9 is beyond the pool of 6"),
    ({"held": twice_held}, "ledger", "block 5 is held by r8 and r9"),
    ({"held": moved}, "rows", "row 0 is held by r0 and r1"),
    ({"held": lambda h: attrs.evolve(h, rows={})}, "rows", "r0 is running without a row"),
    ({"batch": each(shifted)}, "writes", "r1 writes block .*, which r0 holds"),
    ({"batch": lambda b: attrs.evolve(b, copies=((5, 0),))}, "writes", "r0 reads position 0 in block 0 .* nothing"),
    ({"batch": each(lambda w: attrs.evolve(w, tokens=(1,) * len(w.tokens)))}, "tokens", r"r0 computes \(1, 1, 1\)"),
    ({"batch": each(lambda w: attrs.evolve(w, start=w.start + 1))}, "tokens", "from position 1"),
    ({"batch": each(lambda w: attrs.evolve(w, samples=not w.samples))}, "tokens", "does not sample at 3 of 3"),
    ({"told": aborted}, "solo", "r. ends with abort, but nobody aborted it"),
    ({"told": lambda t: Told(t.ended * 2)}, "solo", "r. is told its end 2 times"),
    ({"told": lambda t: Told()}, "solo", "r0 was never told its end"),
    (
        {"told": lambda t: Told(tuple((r, "stop") for r, _ in t.ended))},
        "solo",
        "is told .* and stop, alone .* and length",
    ),
    ({"has_work": True}, "drain", "nothing moves for 5 iterations"),
]


@pytest.mark.parametrize(("changed", "check", "words"), TWISTS, ids=[f"{c}: {w[:30]}" for _, c, w in TWISTS])
def test_what_must_hold_is_seen_when_it_does_not(changed: dict[str, Any], check: str, words: str) -> None:
    assert run_subject(PAIR, slots.make).first is None
    found = run_subject(PAIR, twist(**changed)).first
    assert found is not None
    assert found.check == check, found
    assert re.search(words, found.headline), found


def test_a_promise_is_checked_only_where_it_is_made() -> None:
    """The same two schedulers, with and without the promises that they break."""
    late = Workload(
        SHAPE, (Submit(0, (("a", 9),), 3), Submit(0, (("b", 9),), 3), Submit(0, (("c", 1),), 1, priority=-1))
    )

    class Backwards(Slots):
        def submit(self, ask: Ask) -> None:
            super().submit(ask)
            self._waiting.sort(key=lambda asked: -asked.request)

    def first(kind: type[Slots], **promised: bool) -> str | None:
        class Promising(kind):  # type: ignore[valid-type, misc]
            promises = Promises(**promised)

        found = run_subject(late, lambda shape: Promising(shape, Gaps(shape.blocks))).first
        return None if found is None else f"{found.check}: {found.headline}"

    assert first(Slots) is None
    assert first(Slots, fifo=True) is None
    assert first(Slots, priorities=True) == "decisions: r0 (priority 0) is computed before r2 (priority -1)"
    assert first(Backwards) is None
    assert first(Backwards, fifo=True) == "decisions: r1 is computed before r0, which arrived first"


def test_failing_steps_are_for_those_who_survive_them() -> None:
    failing = Workload(SHAPE, (Submit(0, (("a", 3),), 3), FailStep(1), Submit(0, (("b", 3),), 2)))
    assert "finished: error" in run_subject(failing, slots.make).occurred
    fragile = twist(promises=Promises())
    outcome = run_subject(failing, fragile)
    assert outcome.first is None
    assert "finished: error" not in outcome.occurred
    assert any("(fail 1)" in step.events for step in outcome.steps)


DEAD = Workload(
    SHAPE, (Submit(0, (("a", 3),), 3, n=2, fail_at=2), Submit(0, (("b", 2),), 3), Submit(1, (("c", 4),), 1))
)


def ends(workload: Workload, make: MakeSubject) -> dict[int, tuple[str, int]]:
    """Of each request the reason of its end and in which iteration."""
    outcome = run_subject(workload, make)
    assert outcome.first is None, outcome.first
    return {request: (reason, s.iteration) for s in outcome.steps for request, reason in s.step["finished"]}


@pytest.mark.parametrize("make", [slots.make, tidy.make, ours.make], ids=["slots", "tidy", "ours"])
def test_a_request_without_a_token_ends_alone(make: MakeSubject) -> None:
    """Its first choice, at that token; the others are told what they are told without it."""
    healed = Workload(SHAPE, tuple(replace(e, fail_at=None) for e in DEAD.events if isinstance(e, Submit)))
    told, whole = ends(DEAD, make), ends(healed, make)
    assert (told[0][0], whole[0][0]) == ("error", "length")
    assert told[0][1] < whole[0][1]
    assert {request: end[0] for request, end in told.items() if request} == {1: "length", 2: "length", 3: "length"}
    outcome = run_subject(DEAD, make)
    assert outcome.occurred["row without a token"] == 1
    sampled = [request for step in outcome.steps for request, _ in step.step["sampled"]]
    assert (sampled.count(0), sampled.count(1)) == (1, 3)


def test_rows_that_fail_are_for_those_who_survive_them() -> None:
    for fragile, event in (
        (twist(promises=Promises(survives=True)), DEAD.events[0]),
        (slots.make, Submit(0, (("a", 3),), 3, fail_at=2, fail_by="text")),  # a subject makes no text
    ):
        outcome = run_subject(Workload(SHAPE, (event,)), fragile)
        assert outcome.first is None
        assert "row without a token" not in +outcome.occurred
        assert "finished: error" not in outcome.occurred
        assert any(f"(fails by {event.fail_by})" in told for step in outcome.steps for told in step.events)


def blind(sampled: Mapping[int, int | None]) -> dict[int, int | None]:
    return {request: 0 if token is None else token for request, token in sampled.items()}


class Careless(Slots):
    """Takes what it gets for a token, where there is none."""

    def step(self, compute: Compute) -> Told:
        return super().step(lambda batch: blind(compute(batch)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda shape: Careless(shape, Gaps(shape.blocks)),
            "r0 has no token in this iteration, but is not told its end",
        ),
        (
            twist(told=lambda t: attrs.evolve(t, ended=tuple((r, "length") for r, _ in t.ended))),
            "r0 has no token in this iteration, but ends with length",
        ),
        (
            twist(
                told=lambda t: attrs.evolve(t, ended=(*t.ended, (2, "error")) if (0, "error") in t.ended else t.ended)
            ),
            "r2 ends with error, but nothing raised and it has its token",
        ),
    ],
    ids=["not told", "another end", "a neighbour too"],
)
def test_who_mishandles_a_request_without_a_token_is_found(make: MakeSubject, words: str) -> None:
    found = run_subject(DEAD, make).first
    assert found is not None
    assert (found.check, found.headline) == ("solo", words)


def test_the_budget_is_kept() -> None:
    tight = Workload(Shape(9, 2, 2, budget=2), (Submit(0, (("a", 5),), 1),))
    generous = tight.shape.__class__(9, 2, 2, budget=99)
    found = run_subject(tight, lambda shape: slots.make(generous)).first
    assert found is not None
    assert (found.check, found.headline) == ("decisions", "5 tokens in one iteration, the budget is 2")


def test_an_abort_is_told_once() -> None:
    left = Workload(
        SHAPE, (Submit(0, (("a", 3),), 9), Submit(0, (("b", 9),), 3), Abort(1, 0), Abort(0, 0), Abort(0, 1))
    )
    outcome = run_subject(left, slots.make)
    assert outcome.first is None
    assert outcome.occurred["aborted while running"] == outcome.occurred["aborted while waiting"] == 1


# The played model ---------------------------------------------------------------------------------------------------


def test_copies_move_content_and_nothing_else_does() -> None:
    alone = Alone(Ask(0, (5, 6, 7), 2))
    cache = Cache(2)
    first = Work(0, 0, 0, (5, 6, 7), (0, 1), True)
    cache.write(first, alone)
    assert cache.read(first) == alone.known(4)[3]
    moved_to = Work(0, 0, 3, (alone.known(4)[3],), (2, 3), True)
    cache.copy(Batch((), ((0, 2), (1, 3))))
    cache.write(moved_to, alone)
    assert list(cache.wrong(moved_to, alone)) == []
    assert cache.read(moved_to) == alone.known(5)[4]
    unmoved = attrs.evolve(moved_to, table=(4, 3))
    assert list(cache.wrong(unmoved, alone)) == [
        "r0 reads position 0 in block 4 at offset 0, where nothing was ever written",
        "r0 reads position 1 in block 4 at offset 1, where nothing was ever written",
    ]
    assert cache.read(unmoved) != alone.known(5)[4]


def test_tokens_depend_on_request_salt_and_every_position() -> None:
    base = Ask(0, (5, 6, 7), 8)
    others = [Ask(1, (5, 6, 7), 8), Ask(0, (5, 6, 8), 8), Ask(0, (4, 6, 7), 8), Ask(0, (5, 6, 7), 8, salt="s1")]
    assert len({Alone(ask).outcome() for ask in (base, *others)}) == 5
    assert Alone(base).outcome() == Alone(base).outcome()


# Our own engine, as a subject ---------------------------------------------------------------------------------------


def test_our_engine_keeps_what_it_promises() -> None:
    floors = Floors()
    for workload in (*corpus.workloads().values(), *(numbered(3, number) for number in range(200))):
        outcome = run_subject(workload, ours.make)
        assert outcome.first is None, f"{workload.title}: {outcome.first}"
        if not workload.title:
            floors.add(outcome.occurred)
    assert floors.missed(floors_for(ours.make, SHAPE)) == []


def seen_by_promises(fault: str, workloads: int) -> str | None:
    witnesses = [workload for workload in corpus.workloads().values() if workload.fault == fault]
    for workload in (*witnesses, *(numbered(5, number) for number in range(workloads))):
        with armed(fault):
            found = run_subject(workload, ours.make).first
        if found is not None:
            return found.check
    return None


@pytest.mark.parametrize(("fault", "check"), [("A03", "audit"), ("S11", "solo"), ("P01", None)])
def test_some_faults_need_a_specification(fault: str, check: str | None) -> None:
    """Nobody may lose a block (A03) or forget an abort (S11); whom to preempt (P01) is the scheduler's own affair."""
    assert seen_by_promises(fault, 0) == check


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_the_promises_see_of_the_catalogue() -> None:
    """Of the faults that live in control; a subject has no text and no kernels. The README names the figures."""
    control = [fault for fault, entry in CATALOGUE.items() if entry.rung == "ledger" and fault[0] != "D"]
    seen = {fault: check for fault in control if (check := seen_by_promises(fault, 40))}
    print(f"{len(seen)} of {len(control)}")
    assert len(control) / 2 < len(seen) < len(control)


# Names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slots", "must be MODULE:FUNCTION"),
        ("properties.examples.none:make", "cannot be found: No module named"),
        ("properties.examples.slots:none", "cannot be found: .*has no attribute"),
        ("properties.examples.slots:__doc__", "is no function"),
    ],
)
def test_a_wrong_name_is_a_usage_error(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["hunt", "--subject", name])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error)
