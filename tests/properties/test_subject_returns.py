"""A foreign scheduler that raises, or returns something else, is a finding with a sentence and never a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.trace import Shape, Submit, Workload, save
from properties import commands
from properties.__main__ import main
from properties.examples import slots
from properties.examples.slots import Gaps, Slots
from properties.subject import Compute, Holdings, MakeSubject, NoSubject, Told, find, judge
from properties.subject_run import FLOORS, floors_for, run_subject
from properties.trial import Trial
from tests.properties.counted_hunt import counted_hunt

PAIR = Workload(Shape(6, 2, 3, budget=8), (Submit(0, (("a", 3),), 3), Submit(0, (("b", 2),), 2)))


def roomy(shape: Shape) -> Slots:
    """Has a minimum size."""
    if shape.blocks < 4:
        raise ValueError("at least 4 blocks")
    return slots.make(shape)


def lost(shape: Shape) -> Slots:
    raise KeyError("no such key")


def nothing(shape: Shape) -> None:
    """Forgets to return it."""


def twisted(
    told: Callable[[Told], Any] = lambda told: told,
    held: Callable[[Holdings], Any] = lambda held: held,
    audit: Callable[[], Any] = list,
) -> MakeSubject:
    class Twisted(Slots):
        def step(self, compute: Compute) -> Told:
            return told(super().step(compute))  # type: ignore[no-any-return]

        def ledger(self) -> Holdings:
            return held(super().ledger())  # type: ignore[no-any-return]

        def audit(self) -> list[str]:
            return audit()  # type: ignore[no-any-return]

    return lambda shape: Twisted(shape, Gaps(shape.blocks))


def changed(**what: Any) -> Callable[[Holdings], Holdings]:
    return lambda held: attrs.evolve(held, **what)


def missing(held: Holdings) -> Holdings:
    raise KeyError("rows")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lost, "KeyError: 'no such key'"),
        (twisted(held=missing), "KeyError: 'rows'"),
        (twisted(told=lambda told: None), "step returns None, but must return a Told"),
        (twisted(told=lambda told: Told(ended=None)), "step returns ended None, but must tell pairs"),  # type: ignore[arg-type]
        (twisted(told=lambda told: Told(ended=(3,))), r"step returns ended \(3,\), but must tell pairs"),  # type: ignore[arg-type]
        (twisted(told=lambda told: Told(preempted=("r1",))), "step returns preempted .'r1',., but must"),  # type: ignore[arg-type]
        (twisted(held=lambda held: {}), "ledger returns {}, but must return Holdings"),
        (twisted(held=changed(free=None)), "ledger returns free None, but must list numbers"),
        (twisted(held=changed(tables=[])), r"ledger returns tables \[\], but must map"),
        (twisted(held=changed(rows={"r0": 0})), "ledger returns rows .*, but must map"),
        (twisted(audit=lambda: None), "audit returns None, but must return a list of sentences"),
        (twisted(audit=lambda: "fine"), "audit returns 'fine', but must return a list of sentences"),
    ],
)
def test_what_a_scheduler_returns_is_judged(make: MakeSubject, words: str) -> None:
    assert run_subject(PAIR, slots.make).first is None
    found = run_subject(PAIR, make).first
    assert found is not None
    assert (found.check, found.iteration) == ("raises", 1)
    assert re.match(words, found.headline), found


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "make returns None, which is no subject: its promises are no Promises"),
        ("text", "make returns a str"),
        (
            type("Half", (), {"promises": Slots.promises, "step": None})(),
            "it has no has_work, submit, abort, ledger, audit",
        ),
    ],
)
def test_what_is_no_scheduler_is_no_finding(made: object, words: str) -> None:
    with pytest.raises(NoSubject, match=words):
        judge(made)


def test_the_floors_are_of_a_shape_that_was_run() -> None:
    assert floors_for(roomy, PAIR.shape) == floors_for(slots.make, PAIR.shape)
    assert floors_for(roomy, Shape(1, 1, 1)) == FLOORS  # found already, as ``raises``


def test_a_module_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_scheduler.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NoSubject, match="raises ZeroDivisionError: division by zero"):
        find("broken_scheduler:make")


def test_replay_and_hunt_tell_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pair.json"
    save(PAIR, file)
    name = f"{__name__}:"
    assert main(["replay", str(file), "--subject", name + "lost", "--html", str(tmp_path / "page.html")]) == 1
    assert "raises at iteration 1: KeyError: 'no such key'" in capsys.readouterr().out
    assert main(["replay", str(file), "--subject", name + "nothing"]) == 2
    assert capsys.readouterr().err == (
        "properties: make returns None, which is no subject: its promises are no Promises\n"
    )
    trial = Trial(subject=name + "roomy")
    monkeypatch.setattr(commands, "hunt", lambda *_, **__: counted_hunt(trial, seed=1, workloads=500))
    hunted = ["hunt", "--minutes", "1", "--seed", "1", "--jobs", "1", "--found", str(tmp_path / "found")]
    assert main([*hunted, "--subject", name + "roomy"]) == 1
    assert "raises at iteration 1: ValueError: at least 4 blocks" in capsys.readouterr().out
