"""The catalogue itself: enough faults, from enough places, every rule broken by some, every one armed and gone again."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.control.blocks import BlockPool
from properties import faults
from properties.arming import AREAS, OUTSIDER, OWN, Faded, Fault, line
from properties.checks import ORDER
from properties.faults import CANARY, CATALOGUE, armed, outsider
from properties.floors import FLOORS
from properties.rungs import RUNGS

ROOT = Path(__file__).parents[2]
FAULTS = [fault for fault in CATALOGUE.values() if fault.id != CANARY]
PUBLIC = re.compile(r"[\w.-]+/[\w.-]+( PR)?#\d+")

# Clauses of SPEC.md that no fault of the catalogue can break, and why.
NO_FAULT = {
    "1.7": "outside the model: the server runs max_tokens 0 as 1",
    "3.6": "about the driver: an idle server makes no iterations",
    "5.2": "a consequence of 8.2 and 9.3",
    "11.7": "no workload asks for prompt logprobs; tests/control and tests/engine do",
    "11.8": "a consequence of 11.4, 11.6 and 8.5",
}


def clauses() -> list[str]:
    return re.findall(r"^- (\d+\.\d+) ", (ROOT / "model_sim" / "SPEC.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_enough_faults_of_every_kind() -> None:
    assert len(FAULTS) >= 80
    areas = Counter(fault.area for fault in FAULTS)
    assert set(areas) == set(AREAS)
    assert {area: count for area, count in areas.items() if count < 6} == {}
    assert sum(fault.public for fault in FAULTS) >= 30
    assert sum(fault.source == OUTSIDER for fault in FAULTS) + len(outsider.BEYOND) == 10


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_an_entry_is_complete(fault: Fault) -> None:
    assert fault.expect
    assert set(fault.expect) <= set(ORDER)
    assert fault.rung in RUNGS
    assert fault.needs in ("", *FLOORS)
    assert fault.source in (OWN, OUTSIDER) or PUBLIC.fullmatch(fault.source)
    assert set(fault.rules) <= set(clauses())


def test_every_clause_of_the_specification_is_broken_by_some_fault() -> None:
    """A rule without a fault is a finding."""
    broken = {clause: [fault.id for fault in FAULTS if clause in fault.rules] for clause in clauses()}
    assert len(broken) > 70
    assert [clause for clause, by in broken.items() if not by and clause not in NO_FAULT] == []
    assert [clause for clause in NO_FAULT if broken.get(clause, ["gone"])] == []


def test_every_fault_from_a_public_report_is_told_in_the_table() -> None:
    told = (ROOT / "ci" / "public_faults.md").read_text(encoding="utf-8")
    lines = [line for line in told.splitlines() if line.startswith("|")]
    untold = [f for f in FAULTS if f.public and not any(f.source in line and f" {f.id} " in line for line in lines)]
    assert [fault.id for fault in untold] == []


def test_faults_patch_the_product_and_nothing_else() -> None:
    for fault in CATALOGUE.values():
        owner, name, _ = fault.change()
        module = getattr(owner, "__module__", None) or owner.__name__  # type: ignore[attr-defined]
        assert module.split(".")[0] in ("engine", "server"), (fault.id, module, name)


@pytest.mark.parametrize("fault", CATALOGUE)
def test_a_fault_is_gone_when_it_is_disarmed(fault: str) -> None:
    owner, name, _ = CATALOGUE[fault].change()
    before = vars(owner)[name]
    with armed(fault):
        assert vars(owner)[name] is not before
    assert vars(owner)[name] is before


def test_a_fault_whose_line_is_gone_says_so() -> None:
    faded = Fault("X01", "no such line", ("audit",), line(BlockPool, "take", "self._blank.shift()", "pass"))
    message = r"take holds 'self._blank.shift\(\)' 0 times, but a fault needs it exactly once"
    with patch.dict(faults.CATALOGUE, {"X01": faded}), pytest.raises(Faded, match=message), armed("X01"):
        pass


def test_the_catalogue_loads_without_torch_and_without_a_server() -> None:
    """A replay on the ledger rung is a second's work; loading torch alone takes longer."""
    code = "import sys; import properties.faults; print([m for m in ('torch', 'numpy', 'fastapi', 'server') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]"
