"""The report and the timeline, letter for letter: people read them, so a change of them is a change of the product."""

from __future__ import annotations

import re
from pathlib import Path

from engine.trace import Abort, FailStep, Shape, Submit, Workload, load
from properties.checks import CLASSES, ORDER, Divergence, Finding, LedgerDiffers, differing
from properties.conftest import divergences
from properties.faults import armed
from properties.finds import keep
from properties.history import holds
from properties.lockstep import Step, run
from properties.report import LEGEND, WINDOW, timeline
from properties.trial import Trial

LEAK = Workload(
    Shape(2, 2, 1, capture_rows=(1,), capture_widths=(2,)),
    (Submit(0, (("a", 2),), 2), Submit(1, (("b", 1),), 1, n=2), Abort(0, 7)),
)
REPORT = """\
it  events            queue  running  rows  free  graph  r0      r1     r2       what happened
 1  +r0               -      r0       r0       1  -      1 of 2                  admit r0@0 on b0
 2  +r1..r2 abort r1  r2     r0       r0       0  1x2    length  abort  waiting  abort r1; grow r0+b1; end r0 length
 3  -                 -      r2       r2       1  -      .       .      length   reap r0; admit r2@0 on b0; end r2 length

ledger at 3         engine                                specification
  running           r2                                    r2
  blank             -                                     b1                                    <-- block 1 has no owner and is not free
  references        b1 x1                                 -                                     <--
  r2                finished 1/2 @0 b0                    finished 1/2 @0 b0

last to hold block 1: r0, taken at 2, released at 3 (release #1)

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
it  events              queue  running  rows  free  graph  r0      r1       r2       what happened
 1  (abort nobody) +r0  -      r0       r0       2  -      1 of 3                    admit r0@0 on b0
 2  +r1..r2             r1 r2  r0       r0       1  1x2    2 of 3  waiting  waiting  grow r0+b1
 3  -                   r1 r2  r0       r0       1  1x2    length  waiting  waiting  end r0 length
 4  -                   r2     r1       r1       1  -      .       1 of 2   waiting  reap r0; admit r1@0 on b0,b1
 5  -                   r2     r1       r1       1  1x2    .       length   waiting  end r1 length
 6  fail 1 (+r3 empty~  -      r2       r2       1  -      .       .        error    reap r1; admit r2@0 on b0,b1; execute raised; end r2 error
 7  -                   -      -        -        3  -      .       .        .        reap r2
 -  (abort r1)          -      -        -        -  -                                nothing left to do"""  # noqa: E501
CACHED = Workload(
    Shape(3, 2, 2, budget=3, prefix_cache=True),
    (Submit(0, (("a", 4),), 1), Submit(2, (("a", 4),), 2), Submit(1, (("b", 5),), 1)),
)
CACHED_TIMELINE = """\
it  events  queue  running  rows  free  cached  graph       r0      r1      r2       what happened
 1  +r0     -      r0       r0       1       0  -           3/4                      admit r0@0 on b0,b1; chunk r0 0..2; publish b0
 2  -       -      r0       r0       1       0  -           length                   chunk r0 3..3; publish b1; end r0 length
 3  +r1     -      r1       r1       0       1  -           .       1 of 2           reap r0; admit r1@0 on b0,b2 (1 hit); chunk r1 2..3
 4  +r2     r2     r1       r1       0       0  uncaptured  .       length  waiting  grow r1+b1; evict b1; end r1 length
 5  -       -      r2       r2       0       0  -           .       .       3/5      reap r1; admit r2@0 on b2,b1,b0; evict b0; chunk r2 0..2; publish b2
 6  -       -      r2       r2       0       0  -           .       .       length   chunk r2 3..4; publish b1; end r2 length
 7  -       -      -        -        1       2  -           .       .       .        reap r2"""  # noqa: E501


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


def test_with_the_prefix_cache_the_timeline_tells_hits_and_evictions() -> None:
    assert "\n".join(timeline(run(CACHED))) == CACHED_TIMELINE


def test_a_wrong_reference_stands_in_a_line_of_its_own(tmp_path: Path) -> None:
    with armed("C06"):
        outcome = run(CACHED)
    assert outcome.first is not None
    text = str(keep(CACHED, outcome, outcome.first, tmp_path / "c06.json", fault="C06"))
    assert re.search(r"^  references +b0 x0 +- +<--$", text, re.MULTILINE)
    assert re.search(r"^  b0 holds +(ends at 2 \[\d+ \d+\]) +\1$", text, re.MULTILINE)


def test_a_long_value_gets_a_line_for_each_side(tmp_path: Path) -> None:
    many = Workload(Shape(40, 2, 1), tuple(Submit(0, (("a", 2),), 3) for _ in range(4)))
    with armed("A03"):
        outcome = run(many)
    assert outcome.first is not None
    lines = str(keep(many, outcome, outcome.first, tmp_path / "a03.json", fault="A03")).splitlines()
    (engine,) = (line for line in lines if line.startswith("  blank"))
    assert engine.split()[1] == "engine:"
    assert "<-- block 1 has no owner and is not free" in engine
    assert lines[lines.index(engine) + 1].split()[0] == "specification:"


def test_a_block_taken_back_within_one_iteration_was_held_twice() -> None:
    state = {"tables": {0: (0,)}}
    steps = [Step(1, (), {}, state), Step(2, (), {"preempted": [0]}, state), Step(3, (), {}, {"tables": {}})]
    assert [str(hold) for hold in holds(steps)[0]] == [
        "r0, taken at 1, released at 2 (release #1)",
        "r0, taken at 2, released at 3 (release #2)",
    ]


def test_what_does_not_fit_a_column_is_cut_and_marked() -> None:
    many = Workload(Shape(99, 2, 1), tuple(Submit(0, (("a", 2),), 3) for _ in range(40)))
    lines = list(timeline(run(many, make_rung=None)))
    assert "+r0 +r1 +r2 +r3 +~" in lines[1]
    assert lines[-1] == f"(no column for {' '.join(f'r{request}' for request in range(8, 40))})"
    assert {line.index("  r0") for line in lines[:1]} == {lines[0].index("  r0")}
    assert len({len(line[: lines[0].index("what happened")]) for line in lines[:-1]}) == 1


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


def test_the_replay_command_says_how_it_was_run() -> None:
    found = Finding("solo", 4, "r0 tokens differ")
    start, end = "python -m properties replay f.json", "--until 4"
    assert Trial().command(Path("f.json"), found) == f"{start} {end}"
    assert Trial("rows", "A03").command(Path("f.json"), found) == f"{start} --rung rows --arm A03 {end}"
    assert Trial("rows", "A03", "my.own:make").command(Path("f.json"), found) == f"{start} --subject my.own:make {end}"
    assert Trial(fault="A03").command(Path("f.json"), None) == f"{start} --arm A03"
