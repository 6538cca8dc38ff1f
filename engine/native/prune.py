"""Keeps a cache folder small: what was used lately stays, the rest goes, and nothing that is not ours is touched.

A file's time of change is when it was last used: whoever uses one says so by ``used``. Two processes that prune at once
remove the same files, and the slower one finds them gone. On Linux a file that is mapped or loaded stays whole for whoever
has it when its name is removed; the next start makes it anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

BUSY_SECONDS = 600  # for so long after its last use a file stays, whatever there is: somebody may be about to open it
_DAY = 86400
_log = logging.getLogger(__name__)


@attrs.frozen
class Limits:
    """What stays of the files whose whole name matches ``names``: the ``files`` used last, as long as all of them together
    have at most ``nbytes``, and of these what was used in the last ``days``."""

    names: re.Pattern[str]
    files: int
    nbytes: int
    days: float


@attrs.frozen
class _Found:
    used: float
    path: Path
    size: int


def used(path: Path) -> None:
    """Notes the use of a file; where that is not permitted it is as old as it was."""
    with contextlib.suppress(OSError):
        os.utime(path)


def prune(folder: Path, limits: Limits, keep: Path | None = None) -> list[Path]:
    """Removes what is beyond ``limits``, but never ``keep``, and says so in the log; what was removed. Raises nothing: what
    cannot be removed stays."""
    now, removed, freed, total = time.time(), [], 0, 0
    for rank, found in enumerate(sorted(_ours(folder, limits.names), key=lambda found: -found.used)):
        total += found.size
        beyond = rank >= limits.files or total > limits.nbytes or now - found.used > limits.days * _DAY
        if beyond and found.path != keep and now - found.used > BUSY_SECONDS and _remove(found):
            removed.append(found.path)
            freed += found.size
    if removed:
        _log.info("removed %d files (%.0f MiB) not used lately from %s", len(removed), freed / 2**20, folder)
    return removed


def _ours(folder: Path, names: re.Pattern[str]) -> Iterator[_Found]:
    """Regular files of this user with such a name."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # another process was quicker
                status = path.lstat()
                if names.fullmatch(path.name) and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    yield _Found(status.st_mtime, path, status.st_size)


def _remove(found: _Found) -> bool:
    """Unless somebody used it since it was found, or it is gone."""
    with contextlib.suppress(OSError):
        if found.path.lstat().st_mtime == found.used:
            found.path.unlink()
            return True
    return False
