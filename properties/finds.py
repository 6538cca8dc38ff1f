"""A failure becomes a file: the workload as it ran, a title that says what broke, where it came from, and the replay command.

The file is the record. Seeds, shards and example databases are provenance; they die with the next edit of a generator.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from engine.trace import Workload, save
from properties.checks import CLASSES, Divergence, Finding
from properties.lockstep import Run
from properties.report import report
from properties.trial import Trial


def replay_command(path: Path, found: Finding | None, fault: str | None = None) -> str:
    return Trial(fault=fault).command(path, found)


def check_folder(folder: Path) -> None:
    """Raises ``OSError`` now if nothing could be written there later. Makes nothing: most hunts find nothing."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def keep(
    workload: Workload,
    run: Run,
    found: Finding,
    path: Path,
    *,
    fault: str | None = None,
    by: Mapping[str, str | int] | None = None,
    trial: Trial | None = None,
) -> Divergence:
    """Writes the file and returns the exception to raise, its message the whole report. ``trial`` says how it was run, if
    not on the ledger rung."""
    how = trial or Trial(fault=fault)
    provenance = {**(by or {}), "check": found.check, "iteration": found.iteration}
    if how.subject is not None:
        provenance = {"subject": how.subject, **provenance}
    titled = workload.titled(title(found), fault=how.fault, found=provenance)
    save(titled, path)
    return CLASSES[found.check](found, report(titled, run, found, how.command(path, found)))


def title(found: Finding) -> str:
    return f"{found.check}: {found.headline}"[:100]
