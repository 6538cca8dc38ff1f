"""The laws' part of the kill matrix: every law is needed, judged from the stored cells, and the judgement can fail."""

from __future__ import annotations

import os
import random

import attrs
import pytest

from properties import law_cells, law_matrix
from properties.__main__ import main
from properties.arming import line
from properties.faults import CATALOGUE
from properties.law_cells import law_row
from properties.law_faults import LAW_FAULTS, armed_for_laws
from properties.law_matrix import LawRow, complaints
from properties.laws import LAWS, check_laws
from properties.matrix import stored

pytestmark = pytest.mark.timeout(900)  # seconds of work on an idle core, minutes on a busy one
SAMPLED = 2  # faults whose stored cells are computed again


def test_the_stored_cells_hold() -> None:
    rows = stored().laws
    assert complaints(rows) == []
    assert rows[0].fault is None
    assert {row.fault for row in rows} == {None, *LAW_FAULTS}
    assert stored().requests == law_matrix.digest()


@pytest.mark.parametrize("law", LAWS)
def test_without_any_one_law_the_matrix_fails(law: str) -> None:
    """Computed from the stored cells: nothing is run, one column is taken away. Some fault is then seen by nobody."""
    said = stored().without_law(law).complaints()
    assert f"the law {law} is useless: no fault is seen by it alone" in said
    lost = [row.fault for row in stored().laws if row.fault in LAW_FAULTS and row.alone == law]
    assert lost
    assert {f"{fault} is not seen by the law {law}" for fault in lost} <= set(said)


def test_in_the_list_every_law_has_something_to_change() -> None:
    report = check_laws(law_cells.engines(), [law_matrix.requests()])
    assert report.findings == ()
    assert report.missed == ()


@pytest.mark.parametrize(
    "fault", random.Random(os.environ.get("LOCKSTEP_SAMPLE", "1")).sample(sorted(LAW_FAULTS), SAMPLED)
)
def test_stored_law_cells_are_what_a_run_gives(fault: str) -> None:
    assert law_row(fault) in stored().laws


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_law_cells_are_what_a_run_gives() -> None:
    rows = tuple(law_cells.law_rows([None, *LAW_FAULTS], jobs=len(os.sched_getaffinity(0))))
    assert complaints(rows) == []
    assert sorted(rows, key=repr) == sorted(stored().laws, key=repr)


def test_the_judgement_can_fail() -> None:
    """Each of its complaints, made to fire."""
    fault = "W05"
    rows = [
        LawRow(None, {"rows": 3}, "it raises"),
        LawRow(fault, {"budget": 2}, "it raises"),
        LawRow("C01"),
        LawRow("Q99"),
    ]
    assert complaints(rows, whole=False) == [
        "without a fault, the law rows is broken at iteration 3",
        "without a fault, the laws' unchanged run raises: it raises",
        f"{fault} lets the laws' unchanged run raise: it raises",
        f"{fault} is not seen by the law block size",
        "the laws: Q99 is in no catalogue",
    ]
    whole = complaints([LawRow(fault, {"block size": 2, "rows": 1}, elsewhere={"tokens": 1})])
    assert "the laws: W01 has no row" in whole
    assert "the laws were not held without a fault" in whole
    assert "the law block size is useless: no fault is seen by it alone" in whole
    assert "the family laws is useless: no fault is seen by it alone" in whole


def test_a_fault_that_changes_nothing_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = attrs.evolve(
        LAW_FAULTS["W05"], change=line("engine.control.scheduler:Scheduler", "_chunk", "min(", "min(")
    )
    monkeypatch.setitem(LAW_FAULTS, "W05", harmless)
    assert complaints([law_row("W05")], whole=False) == ["W05 is not seen by the law block size"]


def test_an_unchanged_run_that_raises_is_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    raising = attrs.evolve(
        LAW_FAULTS["W05"], change=line("engine.control.scheduler:Scheduler", "_chunk", "min(", "min(None, ")
    )
    monkeypatch.setitem(LAW_FAULTS, "W05", raising)
    monkeypatch.setattr(law_cells, "ELSEWHERE", 0)
    row = law_row("W05")
    assert row.seen == {}
    assert "TypeError" in row.base


@pytest.mark.parametrize("fault", LAW_FAULTS)
def test_law_faults_patch_the_engine_and_are_gone_again(fault: str) -> None:
    owner, name, _ = LAW_FAULTS[fault].change()
    module = getattr(owner, "__module__", None) or owner.__name__  # type: ignore[attr-defined]
    assert module.split(".")[0] == "engine"
    before = vars(owner)[name]
    with armed_for_laws(fault):
        assert vars(owner)[name] is not before
    assert vars(owner)[name] is before


def test_ids_and_laws_are_nobody_elses() -> None:
    assert set(LAW_FAULTS) & set(CATALOGUE) == set()
    assert all(set(fault.expect) <= set(LAWS) for fault in LAW_FAULTS.values())


def test_the_command_tells_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--only", "W05", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "without a fault: every law holds" in out
    assert "W05  offsets in a block are cut to three bits" in out
    assert "block size 1*" in out
