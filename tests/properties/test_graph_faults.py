"""The table of faults of recorded graphs: a sample of it hunted again, all of it in the slow run, and how it can fail."""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import attrs
import pytest

from engine.control import scheduler
from engine.control.replay import decide
from properties import faults, graph_faults
from properties.__main__ import main
from properties.faults import CATALOGUE
from properties.graph_faults import BEYOND, REPORTED, RUNGS, STORED, Hunted, chosen, complaints, hunt, hunts, page

SAMPLE = ("G02", "N01")
pytestmark = pytest.mark.timeout(900)  # a busy machine takes minutes to import torch


def test_the_table_holds_every_fault_of_graphs_and_those_of_reports_about_them() -> None:
    shared = {fault.id for fault in CATALOGUE.values() if fault.area == "graph replay" and fault.rung != "native"}
    assert shared | set(REPORTED) == set(chosen())
    for fault, rung in BEYOND:
        assert fault in chosen()
        assert rung in RUNGS
        assert CATALOGUE[fault].rung != rung  # where it is at home it must be found
    assert complaints([Hunted("N42", "rows", 9, None), Hunted("N42", "tiny", 1, "writes", 2)]) == []
    assert complaints([Hunted("N42", "tiny", 9, None)]) != []


def test_the_stored_table_has_a_line_for_each_and_none_lives() -> None:
    text = STORED.read_text(encoding="utf-8")
    assert [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| ")][1:] == chosen()
    assert "**lives**" not in text


@pytest.mark.parametrize("fault", SAMPLE)
def test_a_sample_is_killed_on_both_rungs_as_stored(fault: str) -> None:
    listed = list(hunts([fault]))
    assert complaints(listed) == []
    assert [line.rung for line in listed] == list(RUNGS)
    assert page(listed).splitlines()[-1] in STORED.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_table_is_what_a_run_gives() -> None:
    listed = list(hunts(chosen()))
    assert complaints(listed) == []
    assert page(listed) == STORED.read_text(encoding="utf-8")


def test_a_fault_that_does_nothing_lives() -> None:
    harmless = attrs.evolve(CATALOGUE["G02"], change=lambda: (scheduler, "decide", decide))
    with patch.dict(faults.CATALOGUE, {"G02": harmless}):
        line = hunt("G02", "rows", bound=3)
    assert line == Hunted("G02", "rows", 3, None)
    assert complaints([line]) == ["G02 is not killed on rows in 3 workloads", "G02 is killed on no rung"]
    assert "**lives**" in page([line, *(Hunted("G02", rung, 1, "replay", 2) for rung in RUNGS[1:])])


def test_the_command_prints_the_table_and_its_complaints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, lives = Hunted("G02", "rows", 4, "replay", 2), Hunted("G02", "tiny", 9, None)
    monkeypatch.setattr(graph_faults, "hunts", lambda *_: iter([attrs.evolve(killed, rung=rung) for rung in RUNGS]))
    assert main(["graph-faults", "--only", "G02"]) == 0
    said = capsys.readouterr().out
    assert "| G02 |  | scattered rows are replayed | replay, 4 | replay, 4 | replay, 4 |" in said
    assert said.startswith(
        f"# Faults of recorded graphs, padding and rows: 1 of {len(chosen())}\n\nPart of the table that "
    )
    monkeypatch.setattr(graph_faults, "hunts", lambda *_: iter([killed, lives]))
    assert main(["graph-faults", "--only", "G02", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["complaints"] == ["G02 is not killed on tiny in 9 workloads"]
    with pytest.raises(SystemExit):
        main(["graph-faults", "--only", "A05"])
    assert "A05 is no fault of graphs, padding or rows" in capsys.readouterr().err


def test_progress_is_told_before_each_hunt_and_to_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_faults, "hunt", lambda fault, rung: Hunted(fault, rung, 4, "replay", 2))
    command = ["graph-faults", "--only", "G02", "N42"]
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(command) == 0
    said = capsys.readouterr().err.replace("\x1b[K", "").replace("\r", "\n").split("\n")
    assert said[1:-1] == [
        "1 of 4: G02 on rows",
        "2 of 4: G02 on tiny",
        "3 of 4: G02 on staged",
        "4 of 4: N42 on tiny",
    ]
