"""A failure becomes a file: the workload as it ran, a title that says what broke, where it came from, and the replay command.

The file is the record. Seeds, shards and example databases are provenance; they die with the next edit of a generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.trace import Workload, save
from properties.checks import CLASSES, Divergence, Finding
from properties.lockstep import Run
from properties.report import report


def replay_command(path: Path, found: Finding | None, fault: str | None = None) -> str:
    arm = f" --arm {fault}" if fault else ""
    until = "" if found is None else f" --until {found.iteration}"
    return f"python -m properties replay {path}{arm}{until}"


def keep(
    workload: Workload,
    run: Run,
    found: Finding,
    path: Path,
    *,
    fault: str | None = None,
    by: Mapping[str, str | int] | None = None,
) -> Divergence:
    """Writes the file and returns the exception to raise, its message the whole report."""
    provenance = {**(by or {}), "check": found.check, "iteration": found.iteration}
    titled = workload.titled(title(found), fault=fault, found=provenance)
    save(titled, path)
    return CLASSES[found.check](found, report(titled, run, found, replay_command(path, found, fault)))


def title(found: Finding) -> str:
    return f"{found.check}: {found.headline}"[:100]
