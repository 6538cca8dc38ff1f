"""What the machine grants this process: which cores by affinity, how much time of them by the control group's quota.

A container that may use 1.5 of 64 cores sees all 64; as many threads would be stopped for most of every period, all of them
at once, and a step waits for the last.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import attrs

_PROC, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@attrs.frozen
class Granted:
    """``cpus``: numbers of the cores that may be used; ``quota``: cores' worth of time, ``None`` without a limit."""

    cpus: tuple[int, ...]
    quota: float | None = None

    @property
    def cores(self) -> int:
        """Threads that can run at the same time."""
        return len(self.cpus) if self.quota is None else max(1, min(len(self.cpus), math.ceil(self.quota)))

    def shortage(self, threads: int) -> str | None:
        """Why ``threads`` are more than run at the same time."""
        if threads <= self.cores:
            return None
        limited = self.quota is not None and self.quota < len(self.cpus)
        why = (
            f"the control group grants the time of {self.quota:g}" if limited else f"its affinity has {len(self.cpus)}"
        )
        return f"{threads} threads were asked for, but this process may use {self.cores} cores ({why})"

    def pins(self, threads: int) -> tuple[int, ...] | None:
        """A core for each thread, or ``None``: where threads and cores are not equally many the system does better.

        With fewer threads than cores, two engines would sit on the same ones; under a quota the cores belong to others too.
        """
        limited = self.quota is not None and self.quota < len(self.cpus)
        return None if limited or threads != len(self.cpus) or threads < 2 else self.cpus


def granted(proc: Path = _PROC, groups: Path = _GROUPS) -> Granted:
    """``proc``: which groups this process is in; ``groups``: where their files are."""
    known = hasattr(os, "sched_getaffinity")
    cpus = tuple(sorted(os.sched_getaffinity(0))) if known else tuple(range(os.cpu_count() or 1))
    return Granted(cpus, _quota(proc, groups))


def _quota(proc: Path, groups: Path) -> float | None:
    """The least of this group and all above it; version 2 of control groups and version 1."""
    found = []
    for line in _text(proc).splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "none", "")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            found.append(_of(place))
    return min((quota for quota in found if quota is not None), default=None)


def _of(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us").strip(),
        _text(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None  # no file, "max", or -1
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
