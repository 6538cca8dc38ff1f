"""The checks have teeth: every fault is seen by each check that must see it, no check is useless, and the matrix can fail."""

from __future__ import annotations

import os
import random
from unittest.mock import patch

import attrs
import pytest

from engine.control.blocks import BlockPool
from engine.trace import load
from properties import corpus, faults, matrix_page, matrix_run
from properties.checks import ORDER, Finding
from properties.faults import CANARY, CATALOGUE, armed
from properties.lockstep import run
from properties.matrix import FAMILIES, STORED, Matrix, Row, stored
from properties.matrix_run import make_row

SAMPLED = 6  # faults whose stored cells are computed again; the seed is the day's, so that a week sees many


def test_the_stored_matrix_holds() -> None:
    cells = stored()
    assert cells.complaints() == []
    assert {row.fault for row in cells.armed} == set(CATALOGUE)


@pytest.mark.parametrize("check", ORDER)
def test_without_any_one_check_the_matrix_fails(check: str) -> None:
    """Computed from the stored cells: nothing is run, one column is taken away."""
    said = stored().without(check).complaints()
    assert any(f"is not seen by {check}" in complaint for complaint in said)
    assert any(complaint.startswith(f"{check} is useless") for complaint in said)


def test_the_page_is_that_of_the_stored_cells() -> None:
    page = STORED.with_suffix(".md")
    assert page.read_text(encoding="utf-8") == matrix_page.page(stored())


def sampled() -> list[str]:
    return random.Random(os.environ.get("LOCKSTEP_SAMPLE", "1")).sample(sorted(CATALOGUE), SAMPLED)


@pytest.mark.parametrize("fault", sampled())
def test_stored_cells_are_what_a_run_gives(fault: str) -> None:
    """Exactly, while the generator makes the workloads that the stored cells were computed from; else in substance."""
    cells = stored()
    kept = cells.row(fault)
    made = make_row(fault, CATALOGUE[fault].rung, seeds=0)
    assert Matrix((made,)).complaints(whole=False) == []
    if matrix_run.digest() == cells.sample and made.workloads == kept.workloads:
        assert attrs.evolve(made, kills=kept.kills) == kept


def test_a_check_that_a_sibling_always_forestalls_is_useless() -> None:
    """Proofs are counted within families: a check of another family takes nothing away."""
    early, late, other = (Finding(check, at, "") for check, at in (("audit", 1), ("raises", 2), ("solo", 1)))
    counts: dict[str, dict[str, int]] = {}
    for name, findings in {"both": [early, late], "with another family": [early, other], "alone": [late]}.items():
        row = _row_of(findings)
        counts[name] = row.proof
    assert counts == {"both": {"audit": 1}, "with another family": {"audit": 1, "solo": 1}, "alone": {"raises": 1}}
    assert _row_of([early, other]).family == {}
    assert _row_of([early, late]).family == {"audit": 1}


def _row_of(findings: list[Finding]) -> Row:
    ran = attrs.evolve(run(next(iter(corpus.workloads().values()))), findings=tuple(findings))
    with (
        patch.object(matrix_run, "outcome", lambda *_, **__: ran),
        patch.object(corpus, "workloads", lambda: {"one": load(corpus.files()[0])}),
    ):
        return make_row(None, "ledger", 0)


def test_the_matrix_can_fail() -> None:
    """Each of its complaints, made to fire."""
    dirty, lost = Row(None, "ledger", fired={"ledger": 3}), Row("S13", "ledger", fired={"raises": 1}, witnesses=1)
    unseen, unreached = Row("A05", "ledger", reached=7), Row("P06", "ledger")
    said = Matrix((dirty, unseen, attrs.evolve(lost, blind=["S13-a.json"], kills=[None]), unreached)).complaints(
        whole=False
    )
    assert said == [
        "without a fault, ledger fires in 3 workloads on ledger",
        "A05 was reached in 7 workloads and seen by nobody (it needs: row reused)",
        "A05 is not seen by audit",
        "A05 is not seen by ledger",
        "A05 is not seen by drain",
        "A05 has no witness in properties/regress",
        "S13: S13-a.json holds although the fault is armed",
        "S13 is found by no generated workload",
        "P06 was never reached (it needs: readmitted at once)",
        "P06 is not seen by decisions",
        "P06 has no witness in properties/regress",
    ]
    whole = Matrix((Row(CANARY, "ledger", proof={"audit": 5}, family={"audit": 5}),)).complaints()
    assert (
        "audit is useless: no fault is seen by it alone or first in the family audit" in whole
    )  # the canary proves nothing
    assert "the family model diff is useless: no fault is seen by it alone or first" in whole
    assert "A05 has no row" in whole


def test_every_check_is_in_one_family() -> None:
    assert sorted(check for members in FAMILIES.values() for check in members) == sorted(ORDER)


def test_a_fault_that_changes_nothing_is_a_complaint() -> None:
    harmless = attrs.evolve(CATALOGUE["A05"], change=lambda: (BlockPool, "release", BlockPool.release))
    with patch.dict(faults.CATALOGUE, {"A05": harmless}):
        said = Matrix((make_row("A05", "ledger", 0, 0),)).complaints(whole=False)
    assert any(complaint.endswith("holds although the fault is armed") for complaint in said)


def test_a_matrix_survives_its_file() -> None:
    made = Matrix((Row("A05", "ledger", workloads=3, fired={"audit": 2}, kills=[4, None]), Row(None, "rows")), "abc")
    assert Matrix.loads(made.dumps()) == made


def test_judging_all_goes_on_after_the_first_finding() -> None:
    workload = corpus.workloads()["A05-the-published-leak.json"]
    with armed("A05"):
        every = run(workload, judge_all=True).findings
    with armed("A05"):  # anew, because this fault counts
        only = run(workload, checks=frozenset({"drain"})).findings
    assert [(found.check, found.iteration) for found in every][:2] == [("audit", 9), ("ledger", 9)]
    assert [found.check for found in only] == ["drain"]
    assert isinstance(every[0], Finding)


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_the_whole_matrix_holds_when_it_is_computed_again() -> None:
    kept = stored()
    made = matrix_run.matrix(CATALOGUE, jobs=len(os.sched_getaffinity(0)))
    made = attrs.evolve(made, laws=kept.laws, requests=kept.requests)  # test_law_matrix.py computes these again
    assert made.complaints() == []
    assert made == kept
