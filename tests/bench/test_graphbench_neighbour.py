"""The planted bug that graphbench is the acceptance test of, found by the specification as well, and shrunk to two requests.

G02: rule 12 forgets to ask whether the rows are 0..d-1; nothing else is changed, and without the persistent batch nothing
moves rows back. A request alone sits in row 0 and never notices. Two are enough: the first goes, the second stays in row 1,
and a recorded step reads the block table of row 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.trace import Submit, Workload, load
from properties.checks import Finding
from properties.faults import armed
from properties.killing import numbered
from properties.lockstep import run
from properties.rungs import RUNGS
from properties.shrink import shrink

ROOT = Path(__file__).parents[2]
FAULT = "G02"
PROPERTY = {
    "ledger": "test_the_engine_follows_the_specification",
    "rows": "test_rows_are_read_and_written_where_they_must",
    "tiny": "test_tokens_are_those_of_the_request_alone",
    "native": "test_tokens_are_those_of_the_request_alone_on_native_kernels",
}
TOLD = frozenset({"solo"})  # judged by what callers were told, and by nothing else
BOUND = 300  # workloads


def requests(workload: Workload) -> list[Submit]:
    return [event for event in workload.events if isinstance(event, Submit)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rung", ["ledger", *(pytest.param(rung, marks=pytest.mark.slow) for rung in ("rows", "tiny", "native"))]
)
def test_pytest_properties_finds_it_and_shrinks_it_to_two_requests(rung: str, tmp_path: Path) -> None:
    node = f"properties/test_{rung}.py::{PROPERTY[rung]}[0]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node, "--arm", FAULT]
    environment = {**os.environ, "LOCKSTEP_PROFILE": "gate", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--found", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    # One file for each check that saw it first. With real logits that is often the reader of a cell that nobody owns, which holds
    # NaN there: it has no token and ends, and that is told before the launch.
    found = min((load(path) for path in tmp_path.glob(f"{rung}-0-*.json")), key=lambda one: len(requests(one)))
    assert found.fault == FAULT
    assert not found.shape.persistent_batch
    assert len(requests(found)) == 2
    assert all(request.n == 1 for request in requests(found))
    assert run(found, make_rung=RUNGS[rung]).first is None  # the engine as it is
    with armed(FAULT):
        again = run(found, make_rung=RUNGS[rung]).first
    assert again is not None
    assert again.check == "replay" or (again.check == "decisions" and rung in ("tiny", "native"))


def told_something_else(workload: Workload, rung: str) -> Finding | None:
    with armed(FAULT):
        return run(workload, checks=TOLD, make_rung=RUNGS[rung]).first


@pytest.mark.parametrize("rung", ["rows", pytest.param("tiny", marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_the_answers_alone_give_it_away_too(rung: str) -> None:
    """Nobody looks at decisions, rows or launches: a caller is told what the same request alone is never told."""
    candidates = (numbered(rung, 1, number) for number in range(BOUND))
    found = next(workload for workload in candidates if told_something_else(workload, rung) is not None)
    small, _ = shrink(found, lambda candidate: told_something_else(candidate, rung) is not None, budget=1500)
    assert len(requests(small)) == 2
    assert told_something_else(small, rung) is not None
    for alone in requests(small):
        solo = Workload(small.shape, (alone,))
        assert told_something_else(solo, rung) is None, "a request alone sits in row 0 and cannot see it"
