"""The regression corpus: every workload that once failed, each named after the catalogue fault that brings its bug back.

A file passes on today's engine and fails with its fault armed. A file without a fault records a difference between engine
and specification that was settled; ci/disagreements.md says how.
"""

from __future__ import annotations

from pathlib import Path

from engine.trace import Workload, load

REGRESS = Path(__file__).parent / "regress"


def files(folder: Path = REGRESS) -> list[Path]:
    return sorted(folder.glob("*.json"))


def workloads(folder: Path = REGRESS) -> dict[str, Workload]:
    """By file name, in the order of names."""
    return {path.name: load(path) for path in files(folder)}
