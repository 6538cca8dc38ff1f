"""The regression corpus: every workload that once failed, each named after the catalogue fault that brings its bug back.

A file passes on today's engine and fails with its fault armed, on the rung of that fault. A file without a fault records a
difference between engine and specification that was settled; ci/disagreements.md says how.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.trace import Workload, load
from properties.faults import CATALOGUE

REGRESS = Path(__file__).parent / "regress"


def files(folder: Path = REGRESS) -> list[Path]:
    return sorted(folder.glob("*.json"))


def workloads(folder: Path = REGRESS) -> dict[str, Workload]:
    """By file name, in the order of names."""
    return {path.name: load(path) for path in files(folder)}


def rung_of(workload: Workload) -> str:
    """Where a saved workload fails with its fault armed; without a fault, where all of control is real."""
    return CATALOGUE[workload.fault].rung if workload.fault in CATALOGUE else "ledger"


def witness_path(fault: str, folder: Path = REGRESS) -> Path:
    """The file name of a fault's witness: its id and the beginning of its title."""
    words = re.sub(r"[^a-z0-9]+", "-", CATALOGUE[fault].title.lower().replace("'", ""))
    return folder / f"{fault}-{words[:48].strip('-')}.json"
