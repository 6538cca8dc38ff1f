"""Pruning a cache folder: what was used lately stays, what is not ours is never touched, and whoever is quicker harms nobody."""

from __future__ import annotations

import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

from engine.native import prune as module
from engine.native.prune import Limits, prune, used

LIMITS = Limits(re.compile(r"[0-9]+\.kept"), files=4, nbytes=1000, days=10)


def made(folder: Path, name: str, hours: float, size: int = 100) -> Path:
    path = folder / name
    path.write_bytes(bytes(size))
    os.utime(path, times=(0, time.time() - 3600 * hours))
    return path


def test_the_last_used_stay(tmp_path: Path) -> None:
    paths = [made(tmp_path, f"{hours}.kept", hours) for hours in range(1, 8)]
    assert prune(tmp_path, LIMITS) == paths[4:]
    assert sorted(tmp_path.iterdir()) == paths[:4]
    assert prune(tmp_path, LIMITS) == []


def test_a_use_counts(tmp_path: Path) -> None:
    paths = [made(tmp_path, f"{hours}.kept", hours) for hours in range(1, 8)]
    used(paths[6])
    assert prune(tmp_path, LIMITS) == paths[3:6]
    used(tmp_path / "never there")


def test_bytes_count(tmp_path: Path) -> None:
    paths = [made(tmp_path, f"{hours}.kept", hours, 400) for hours in range(1, 5)]
    assert prune(tmp_path, LIMITS) == paths[2:]


def test_days_count(tmp_path: Path) -> None:
    made(tmp_path, "1.kept", 9 * 24)
    old = made(tmp_path, "2.kept", 11 * 24)
    assert prune(tmp_path, LIMITS) == [old]


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    """The file that is asked for, however old and large; and what was used minutes ago, however much that is."""
    asked = made(tmp_path, "1.kept", 10**4, 10**4)
    others = [made(tmp_path, f"{number}.kept", 0.1, 10**4) for number in range(2, 9)]
    assert prune(tmp_path, LIMITS, asked) == []
    assert all(path.exists() for path in (asked, *others))


def test_what_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = attrs.evolve(LIMITS, files=0)
    (tmp_path / "1.kept").mkdir()
    (tmp_path / "2.kept").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "3.kept")
    for name in ("4.kept.bak", "a4.kept", "5.packed", "6.kept\n"):
        made(tmp_path, name, 10**4)
    before = sorted(tmp_path.iterdir())
    assert prune(tmp_path, nothing) == []
    mine = made(tmp_path, "7.kept", 10**4)
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: mine.stat().st_uid + 1)
        assert prune(tmp_path, nothing) == []
    assert prune(tmp_path, nothing) == [mine]
    assert sorted(tmp_path.iterdir()) == before
    assert prune(tmp_path / "never there", nothing) == []


def test_what_is_used_while_others_prune_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, "1.kept", 10**4)
    listed = list(module._ours(tmp_path, LIMITS.names))
    used(path)  # by another process, between the look and the removal
    monkeypatch.setattr(module, "_ours", lambda folder, names: iter(listed))
    assert prune(tmp_path, LIMITS) == []
    assert path.exists()
    path.unlink()
    assert prune(tmp_path, LIMITS) == []


def test_many_at_once(tmp_path: Path) -> None:
    paths = [made(tmp_path, f"{hours}.kept", hours) for hours in range(1, 200)]
    with ThreadPoolExecutor(4) as processes:
        removed = [path for found in processes.map(lambda _: prune(tmp_path, LIMITS), range(4)) for path in found]
    assert sorted(tmp_path.iterdir()) == sorted(paths[:4])
    assert sorted(removed) == sorted(paths[4:])


def test_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("engine"), "propagate", True)  # also where a server has set up its log
    caplog.set_level(logging.INFO, "engine")
    for hours in range(1, 7):
        made(tmp_path, f"{hours}.kept", hours, 2**20)
    prune(tmp_path, attrs.evolve(LIMITS, nbytes=2**30))
    prune(tmp_path, LIMITS, tmp_path / "1.kept")
    prune(tmp_path, LIMITS, tmp_path / "1.kept")
    told = [f"removed {count} files ({count} MiB) not used lately from {tmp_path}" for count in (2, 3)]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", line) for line in told]
