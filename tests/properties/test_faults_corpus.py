"""The corpus: every saved workload holds today, and fails, by the check that its file names, when its fault is armed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.trace import load
from properties import corpus
from properties.faults import CATALOGUE
from properties.killing import outcome


@pytest.mark.parametrize("path", corpus.files(), ids=lambda path: path.name)
def test_a_saved_workload_holds_today_and_fails_with_its_fault(path: Path) -> None:
    workload = load(path)
    rung = corpus.rung_of(workload)
    assert outcome(workload, None, rung=rung).first is None
    if workload.fault is None:
        return
    found = outcome(workload, workload.fault).first
    assert found is not None
    assert found.check in CATALOGUE[workload.fault].expect
    assert workload.found is not None
    assert (workload.found["check"], workload.found["iteration"]) == (found.check, found.iteration)
    assert outcome(workload, None, rung=rung).first is None  # and nothing of the fault stays behind


def test_every_fault_has_a_small_witness() -> None:
    witnesses = [workload for workload in corpus.workloads().values() if workload.fault is not None]
    assert {workload.fault for workload in witnesses} == set(CATALOGUE)
    assert max(len(workload.events) for workload in witnesses) <= 12  # the published leak has twelve requests


def test_no_run_is_saved_twice_for_the_same_fault() -> None:
    digests = [(workload.fault, workload.digest()) for workload in corpus.workloads().values()]
    assert len(digests) == len(set(digests))
