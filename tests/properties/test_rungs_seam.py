"""The seam between driver and rung: lazy imports, and an oracle that is asked first and never told what the engine did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import properties
from engine.control.limits import Limits
from engine.trace import Shape, Submit, Workload
from properties.arming import arm, disarmed, line
from properties.lockstep import run
from properties.rung_ledger import LedgerRung
from properties.rungs import RUNGS

LEAK = Path(properties.__file__).parent / "regress" / "A05-the-published-leak.json"
TWO = Workload(
    Shape(blocks=8, block_size=2, rows=2, max_model_len=16),
    (Submit(0, (("a", 3),), 4, stop_at=3), Submit(0, (("b", 2),), 5)),
)


def test_replay_on_the_ledger_rung_leaves_torch_alone() -> None:
    code = (
        "import sys; from properties.__main__ import main; "
        f"status = main(['replay', {str(LEAK)!r}]); assert 'torch' not in sys.modules, 'torch was imported'; "
        "assert 'numpy' not in sys.modules, 'numpy was imported'; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=LEAK.parents[2]
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_rungs_are_imported_when_they_are_asked_for() -> None:
    assert RUNGS["ledger"] is LedgerRung
    with pytest.raises(KeyError):
        RUNGS["none"]


class Lying:
    """The oracle of the ledger rung, with one token of one request changed."""

    def __init__(self, inner: LedgerRung) -> None:
        self._inner = inner.oracle

    def stop_ids(self, first_id: int, event: Submit) -> frozenset[int]:
        return self._inner.stop_ids(first_id, event)

    def token(self, request: int, k: int) -> int:
        return self._inner.token(request, k) ^ (request == 1 and k == 2)


def test_the_rung_s_oracle_feeds_the_specification_and_judges_the_callers() -> None:
    def lying(shape: Shape) -> LedgerRung:
        rung = LedgerRung(shape)
        rung.oracle = Lying(rung)
        return rung

    assert run(TWO).first is None
    for check in ("tokens", "solo"):
        found = run(TWO, make_rung=lying, checks=frozenset({check})).first
        assert found is not None
        assert found.check == check
    assert run(TWO, make_rung=lying, checks=frozenset({"tokens"})).first.iteration == 3  # type: ignore[union-attr]


def test_an_oracle_can_run_the_engine_as_it_is_while_a_fault_is_armed() -> None:
    owed = Limits.blocks_for
    wrong = line(
        "engine.control.limits:Limits", "blocks_for", "-(-tokens // self.block_size)", "tokens // self.block_size"
    )
    with arm(wrong()), arm((Limits, "blocks_for", "twice")):
        assert Limits.blocks_for == "twice"
        with disarmed():
            assert Limits.blocks_for is owed
        assert Limits.blocks_for == "twice"
    assert Limits.blocks_for is owed
    with disarmed():
        assert Limits.blocks_for is owed
