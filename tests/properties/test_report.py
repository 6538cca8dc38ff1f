"""The report and the timeline, letter for letter: people read them, so a change of them is a change of the product."""

from __future__ import annotations

from pathlib import Path

from engine.trace import Abort, FailStep, Shape, Submit, Workload, load
from properties.checks import CLASSES, ORDER, Divergence, LedgerDiffers, differing
from properties.conftest import divergences
from properties.faults import armed
from properties.finds import keep
from properties.lockstep import run
from properties.report import LEGEND, WINDOW, timeline

LEAK = Workload(
    Shape(2, 2, 1, capture_rows=(1,), capture_widths=(2,)),
    (Submit(0, (("a", 2),), 2), Submit(1, (("b", 1),), 1, n=2), Abort(0, 7)),
)
REPORT = """\
  it  events              waiting         running                         free  launch        what happened
   1  +r0                 -               r0@0                               1  -             admit r0@0 on b0
   2  +r1..r2 abort r1    r2              r0@0!                              0  1x2           abort r1; grow r0+b1; end r0 length
   3  -                   -               r2@0!                              1  -             reap r0; admit r2@0 on b0; end r2 length

ledger at 3                  engine                                       specification
  blank                      ()                                           (1,)
  references                 (1, 1)                                       (1, 0)

block 1 is held, says the specification, by r0 in 2..2

workload:
{"format": "workload/1", "title": "ledger: blank, references differ", "fault": "A03", "found": {"by": "test", "check": "ledger", "iteration": 3},
 "shape": {"blocks": 2, "block_size": 2, "rows": 1, "budget": 2048, "watermark": 0, "max_model_len": 64,
           "capture_rows": [1], "capture_widths": [2], "persistent_batch": true, "prefix_cache": false, "max_waiting": 64},
 "events": [
  {"wait": 0, "submit": {"prompt": [["a", 2]], "max_tokens": 2}},
  {"wait": 1, "submit": {"prompt": [["b", 1]], "max_tokens": 1, "n": 2}},
  {"wait": 0, "abort": 7}]}
"""  # noqa: E501
BUSY = Workload(
    Shape(3, 2, 2, budget=3, capture_rows=(1, 2), capture_widths=(2,)),
    (
        Abort(0, 0),
        Submit(0, (("a", 2),), 3),
        Submit(1, (("b", 3),), 2, n=2),
        FailStep(4),
        Submit(0, (), 1),
        Abort(9, 1),
    ),
)
TIMELINE = """\
  it  events              waiting         running                         free  launch        what happened
   1  (abort nobody) +r0  -               r0@0                               2  -             admit r0@0 on b0
   2  +r1..r2             r1 r2           r0@0                               1  1x2           grow r0+b1
   3  -                   r1 r2           r0@0!                              1  1x2           end r0 length
   4  -                   r2              r1@0                               1  -             reap r0; admit r1@0 on b0,b1
   5  -                   r2              r1@0!                              1  1x2           end r1 length
   6  fail 1 (+r3 empty~  -               r2@0!                              1  -             reap r1; admit r2@0 on b0,b1; execute raised; end r2 error
   7  -                   -               -                                  3  -             reap r2
   -  (abort r1)          -               -                                  -  -             nothing left to do"""  # noqa: E501


def _diverged(path: Path) -> Divergence:
    with armed("A03"):
        outcome = run(LEAK, checks=frozenset({"ledger"}))
    assert outcome.first is not None
    return keep(LEAK, outcome, outcome.first, path, fault="A03", by={"by": "test"})


def test_the_report_letter_for_letter(tmp_path: Path) -> None:
    path = tmp_path / "leak.json"
    divergence = _diverged(path)
    first, blank, *rest = str(divergence).splitlines()
    assert (first, blank) == ("ledger at iteration 3: blank, references differ", "")
    assert rest[-2:] == ["", f"replay: python -m properties replay {path} --arm A03 --until 3"]
    assert "\n".join(rest[:-2]) + "\n" == REPORT
    assert isinstance(divergence, LedgerDiffers)


def test_the_saved_file_is_the_workload_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "leak.json"
    _diverged(path)
    saved = load(path)
    assert saved.digest() == LEAK.digest()
    assert saved.fault == "A03"
    assert saved.found == {"by": "test", "check": "ledger", "iteration": 3}


def test_the_timeline_letter_for_letter() -> None:
    assert "\n".join(timeline(run(BUSY, make_rung=None))) == TIMELINE
    assert "\n".join(timeline(run(BUSY))) == TIMELINE  # the engine beside it changes nothing


def test_what_does_not_fit_a_column_is_cut_and_marked() -> None:
    many = Workload(Shape(99, 2, 1), tuple(Submit(0, (("a", 2),), 3) for _ in range(40)))
    lines = list(timeline(run(many, make_rung=None)))
    assert "+r0 +r1 +r2 +r3 +~" in lines[1]
    assert all(line[67:69] == "  " for line in lines)


def test_a_long_run_shows_its_last_iterations(tmp_path: Path) -> None:
    long = Workload(Shape(99, 2, 1), tuple(Submit(0, (("a", 2),), 3) for _ in range(40)))
    with armed("K03"):
        outcome = run(long)
    assert outcome.first is not None
    text = str(keep(long, outcome, outcome.first, tmp_path / "k03.json", fault="K03"))
    assert f"({outcome.first.iteration - WINDOW} earlier iterations)" in text
    assert "drain at " in text


def test_mappings_are_reduced_to_what_differs() -> None:
    (fact,) = differing([("tables", {1: (0,), 2: (1,)}, {1: (0,), 3: (1,)})])
    assert (fact.engine, fact.specification) == ("2: (1,), 3: -", "2: -, 3: (1,)")


def test_every_check_has_a_class_of_its_own() -> None:
    assert len(set(CLASSES.values())) == len(ORDER)
    assert [kind.check for kind in CLASSES.values()] == list(ORDER)
    assert "Iterations count from 1" in LEGEND


def test_several_divergences_of_one_hunt_are_all_told(tmp_path: Path) -> None:
    one, other = _diverged(tmp_path / "one.json"), _diverged(tmp_path / "other.json")
    assert divergences(one) == str(one)
    assert divergences(ExceptionGroup("two", [one, other])) == f"{one}\n\n{other}"
    assert divergences(ExceptionGroup("mixed", [one, KeyError("x")])) is None
    assert divergences(KeyError("x")) is None
