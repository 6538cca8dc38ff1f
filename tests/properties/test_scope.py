"""The exhaustive box: it misses no member, counts what happened and what was the same, and says so when a fault is in reach."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.trace import Abort, Shape, Submit, Workload, load
from properties import scope_command
from properties.__main__ import main
from properties.boxes import BOXES, Box, Odometer
from properties.faults import CATALOGUE
from properties.lockstep import run
from properties.scope import CROWDED, MUST, Scope, demand, first_kill, in_order, notable, one_shape, trace
from properties.scope_command import LARGE

TINY = Box(blocks=(2, 3), block_sizes=(1,), rows=(1, 2), prompts=(1, 2), answers=(1,), waits=(0, 1), requests=2)


def test_the_odometer_makes_every_combination_once_and_in_order() -> None:
    odometer, seen = Odometer(), []
    while odometer.turn():
        seen.append((odometer.pick("ab"), odometer.pick((1, 2, 3)), odometer.pick((False, True))))
    assert seen == list(product("ab", (1, 2, 3), (False, True)))
    assert not odometer.turn()


def test_how_much_there_is_to_choose_may_depend_on_what_was_chosen() -> None:
    odometer, seen = Odometer(), []
    while odometer.turn():
        seen.append(tuple(odometer.pick("xy") for _ in range(odometer.pick((0, 1, 2)))))
    assert seen == [(), *product("xy"), *product("xy", repeat=2)]


def test_a_choice_that_is_not_the_same_every_time_is_noticed() -> None:
    odometer = Odometer()
    assert odometer.turn()
    odometer.pick((1, 2))
    assert odometer.turn()
    with pytest.raises(ValueError, match="choice 0 has 3 alternatives, but had 2 before"):
        odometer.pick((1, 2, 3))


def test_a_box_holds_all_its_members_once_small_ones_first() -> None:
    listed = list(in_order([TINY]))
    assert len(listed) == len(set(listed)) == 4 * (2 + 2 * (2 * 2))
    assert [len(w.events) for w in listed] == sorted(len(w.events) for w in listed)
    shapes = [w.shape for w in listed[:4]]
    assert len(set(shapes)) == 4, "the shapes take turns"
    troubled = attrs.evolve(TINY, trouble=(Abort(1, 0),))
    assert len(list(in_order([troubled]))) == 2 * len(listed)


def test_the_large_boxes_hold_enough() -> None:
    members = 0
    for name in scope_command.LARGE:
        shapes = list(BOXES[name].shapes())
        members += len(shapes) * sum(1 for _ in BOXES[name].workloads(shapes[0]))
    assert members > 400_000


def test_equal_runs_have_equal_traces() -> None:
    one = Workload(Shape(3, 2, 2), (Submit(0, (("a", 2),), 1),))
    same = replace(one, shape=replace(one.shape, watermark=1, budget=7))
    other = replace(one, events=(Submit(0, (("a", 3),), 1),))
    later = replace(one, events=(*one.events, Submit(1, (("a", 2),), 1)))
    assert trace(run(one)) == trace(run(same))
    assert len({trace(run(w)) for w in (one, other, later)}) == 3


def test_what_a_workload_shows_is_noted() -> None:
    two = Submit(0, (("a", 1),), 2, n=2)
    crowd = Workload(Shape(3, 1, 3), (replace(two, n=3),))
    roomy = Workload(Shape(9, 1, 3), (replace(two, n=3),))
    assert demand(crowd) == 6
    assert set(notable(crowd, run(crowd))) == {"preempt", CROWDED}
    assert set(notable(roomy, run(roomy))) == set()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    totals = Scope()
    for number in range(len(list(BOXES["small"].shapes()))):
        workloads, iterations, traces, happened, first = one_shape("small", number)
        assert first is None
        totals.workloads += workloads
        totals.iterations += iterations
        totals.traces.update(traces)
        totals.happened.update(happened)
    return attrs.asdict(totals) | {"missing": totals.missing(), "duplicates": totals.duplicates}


def test_the_small_box_holds(small: dict[str, Any]) -> None:
    assert small["missing"] == []
    assert small["workloads"] == 2336
    assert 1000 < len(small["traces"]) < small["workloads"]
    assert small["duplicates"] == small["workloads"] - len(small["traces"])
    assert set(small["happened"]) == set(MUST)


def test_a_box_in_which_something_never_happens_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dull = Scope(1, 1, {1}, Counter(dict.fromkeys(MUST, 1) | {"evict": 0}))
    monkeypatch.setattr(scope_command, "scope", lambda *_: dull)
    assert main(["scope", "--box", "small"]) == 1
    assert "SCOPE: nothing in the box does this: evict" in capsys.readouterr().out
    assert main(["scope", "--box", "small", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == ["evict"]


def test_a_fault_in_reach_leaves_files_that_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scope", "--box", "small", "--arm", "P01", "--jobs", "1", "--found", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["holds"]
    path = Path(told["found"][0])
    assert load(path).fault == "P01"
    assert main(["replay", str(path), "--arm", "P01"]) == 1
    assert main(["replay", str(path)]) == 0


@pytest.mark.parametrize(("fault", "most"), [("Z00", 1), ("P01", 3000), ("A05", 3000), ("C08", 3000)])
def test_the_box_alone_kills(fault: str, most: int) -> None:
    kill = first_kill(fault, ["small"], most)
    assert kill.check is not None
    assert kill.workloads <= most


def test_a_fault_out_of_reach_survives() -> None:
    assert first_kill("D04", ["small"], 30).check is None, "no workload of the box has a stop string"


def test_the_boxes_take_turns() -> None:
    """Else a bound on the workloads would leave whole boxes out, and with them every fault that only they reach."""
    first = list(islice(in_order([BOXES["arrivals"], BOXES["trouble"]]), 4))
    assert [first[0], first[2]] == list(islice(in_order([BOXES["arrivals"]]), 2))
    assert [first[1], first[3]] == list(islice(in_order([BOXES["trouble"]]), 2))


def test_the_command_tells_each_fault_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = {name: fault for name, fault in CATALOGUE.items() if name in {"A01", "D04", "P01"}}
    monkeypatch.setattr(scope_command, "CATALOGUE", some)
    command = ["scope", "--faults", "--box", "small", "--workloads", "2", "--jobs", "1"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "A01   killed by ledger at workload 1 " in told
    assert "of 3 faults of the ledger rung are killed by small alone" in told
    assert "not within 2 workloads: D04" in told
    assert main([*command, "--json"]) == 0
    assert [kill["fault"] for kill in json.loads(capsys.readouterr().out)["kills"]] == ["A01", "D04", "P01"]


@pytest.mark.parametrize("fault", ["D05", "D08", "C25", "S14", "S21"])
def test_the_box_of_ends_reaches_what_no_plain_answer_does(fault: str) -> None:
    assert first_kill(fault, ["ends"], 500).check is not None


def stored_kills() -> dict[str, tuple[str, int]]:
    table = (Path(__file__).parents[2] / "ci" / "scope.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| .* \| (\S+) \| (\S+) \|$", table, re.MULTILINE)
    return {fault: (check, 0 if at == "-" else int(at)) for fault, check, at in rows}


def test_the_stored_kills_cover_the_ledger_and_are_what_a_run_gives() -> None:
    stored = stored_kills()
    assert set(stored) == {fault.id for fault in CATALOGUE.values() if fault.rung == "ledger"}
    near = [fault for fault, (_, at) in stored.items() if 0 < at <= 500]
    for fault in near[::8]:
        kill = first_kill(fault, LARGE, 500)
        assert (kill.check, kill.workloads) == stored[fault], f"{fault}: write ci/scope.md anew"
