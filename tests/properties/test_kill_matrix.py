"""The checks have teeth: every fault is seen by each check that must see it, and no check is useless."""

from __future__ import annotations

from unittest.mock import patch

import attrs
import pytest

from engine.control.blocks import BlockPool
from properties import corpus, faults
from properties.arming import Faded, Fault, line
from properties.checks import ON_LEDGER, Finding
from properties.faults import CATALOGUE, armed
from properties.lockstep import run
from properties.matrix import Matrix, Row, matrix


def test_the_matrix_holds() -> None:
    """On the corpus alone, which is enough: each fault has a witness. ``python -m properties matrix`` adds generated ones."""
    whole = matrix(CATALOGUE, generated=0)
    assert whole.complaints() == []
    assert {check: bool(whole.proofs(check)) for check in ON_LEDGER} == dict.fromkeys(ON_LEDGER, True)


def test_the_engine_without_a_fault_is_clean_on_generated_workloads_too() -> None:
    assert matrix([], generated=60).rows[0].fired == {}


@pytest.mark.parametrize("path", corpus.files(), ids=lambda path: path.name)
def test_a_saved_workload_holds_today_and_fails_with_its_fault(path: object) -> None:
    workload = corpus.load(path)  # type: ignore[arg-type]
    assert run(workload).first is None
    if workload.fault is None:
        return
    with armed(workload.fault):
        found = run(workload).first
    assert found is not None
    assert found.check in CATALOGUE[workload.fault].expect
    assert workload.found == {"check": found.check, "iteration": found.iteration}
    assert run(workload).first is None  # and nothing of the fault stays behind


def test_the_matrix_can_fail() -> None:
    """Each of its complaints, made to fire."""
    rows = [Row(None)]
    for check in ON_LEDGER:
        rows.append(
            Row(next(fault.id for fault in CATALOGUE.values() if fault.expect == (check,) or check in fault.expect))
        )
        rows[-1].alone[check] = check not in ("rows", "counters")
    rows.append(Row("Z00"))
    rows[-1].alone["counters"] = 1  # the canary proves nothing
    assert Matrix(tuple(rows)).useless() == ["rows", "counters"]
    dirty, unseen, lost = Row(None), Row("A05"), Row("S13", witnesses=1)
    dirty.fired["ledger"] = 3
    lost.fired["raises"] = 1
    assert Matrix((dirty, unseen, lost)).complaints(whole=False) == [
        "without a fault, ledger fires in 3 workloads",
        "A05 is not seen by audit",
        "A05 is not seen by ledger",
        "A05 is not seen by drain",
        "A05 has no witness in properties/regress",
        "S13: its witness holds although the fault is armed",
    ]


def test_a_fault_that_changes_nothing_is_a_complaint() -> None:
    harmless = attrs.evolve(CATALOGUE["A05"], change=lambda: (BlockPool, "release", BlockPool.release))
    with patch.dict(faults.CATALOGUE, {"A05": harmless}):
        said = matrix(["A05"], generated=0).complaints(whole=False)
    assert "A05: its witness holds although the fault is armed" in said


def test_a_fault_whose_line_is_gone_says_so() -> None:
    faded = Fault("X01", "no such line", ("audit",), line(BlockPool, "take", "self._blank.shift()", "pass"))
    message = r"take holds 'self._blank.shift\(\)' 0 times, but a fault needs it exactly once"
    with patch.dict(faults.CATALOGUE, {"X01": faded}), pytest.raises(Faded, match=message), armed("X01"):
        pass


@pytest.mark.parametrize("fault", CATALOGUE)
def test_a_fault_is_gone_when_it_is_disarmed(fault: str) -> None:
    owner, name, _ = CATALOGUE[fault].change()
    before = vars(owner)[name]
    with armed(fault):
        assert vars(owner)[name] is not before
    assert vars(owner)[name] is before


def test_judging_all_goes_on_after_the_first_finding() -> None:
    workload = corpus.workloads()["A05-the-published-leak.json"]
    with armed("A05"):
        every = run(workload, judge_all=True).findings
    with armed("A05"):  # anew, because this fault counts
        only = run(workload, checks=frozenset({"drain"})).findings
    assert [(found.check, found.iteration) for found in every][:2] == [("audit", 9), ("ledger", 9)]
    assert [found.check for found in only] == ["drain"]
    assert isinstance(every[0], Finding)
