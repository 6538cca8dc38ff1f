"""Building: one cached file for one source, compiler and machine; whole or not there; never somebody else's."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.native import build
from engine.native.build import BuildError, built, cache_folder, find_compiler, processor
from engine.native.library import Library

SMALL = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in build.SOURCES:
        (folder / name).write_text(SMALL if name == build.SOURCES[0] else "", encoding="utf-8")
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wraps the real compiler and counts how often it compiles."""
    log, wrapper = tmp_path / "log", tmp_path / "wrapped c++"
    log.write_text("", encoding="utf-8")
    script = (
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo compiled >> "{log}";; esac\nexec "{find_compiler()}" "$@"\n'
    )
    wrapper.write_text(script, encoding="utf-8")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


def count(log: Path) -> int:
    return log.read_text(encoding="utf-8").count("compiled")


def test_compiled_once(source: Path, compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = built(folder=source, cache=cache)
    assert built(folder=source, cache=cache) == first
    assert count(compiler) == 1
    assert [path.name for path in cache.iterdir()] == [first.name]  # nothing half made is left
    assert stat.S_IMODE(first.stat().st_mode) & 0o077 == 0


def test_everything_that_matters_is_in_the_name(
    source: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    names = {built(folder=source, cache=cache).name}
    names.add(built(folder=source, cache=cache, target=()).name)
    names.add(built(folder=source, cache=cache, extra=("-O1",)).name)
    (source / build.SOURCES[-1]).write_text("// changed", encoding="utf-8")
    names.add(built(folder=source, cache=cache).name)
    monkeypatch.setattr(build, "processor", lambda: "another machine")
    names.add(built(folder=source, cache=cache).name)
    monkeypatch.setattr(build, "_version", lambda compiler: "another version")
    names.add(built(folder=source, cache=cache).name)
    assert len(names) == 6 == count(compiler)
    assert processor()


def test_builders_at_the_same_time(source: Path, compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as builders:
        paths = set(builders.map(lambda _: built(folder=source, cache=cache), range(4)))
    assert len(paths) == 1
    assert [path.name for path in cache.iterdir()] == [path.name for path in paths]


def test_what_a_killed_builder_left_is_removed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    old, new = (cache / f"kernels-{'0' * 24}{name}.tmp" for name in ("old_____", "new_____"))
    foreign = cache / "kernels-of-somebody.tmp"
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (1, 1))
    built(folder=source, cache=cache)
    assert not old.exists()
    assert new.exists()  # another builder may be at work on it
    assert foreign.exists()


def test_kernels_of_old_sources_are_removed(source: Path, compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    mine = built(folder=source, cache=cache)
    others = [cache / f"kernels-{number:024x}.so" for number in range(build.KEPT.files + 3)]
    for age, path in enumerate(others):
        path.touch()
        os.utime(path, (0, time.time() - 3600 * (age + 1)))
    os.utime(mine, (0, time.time() - 3600 * 10**4))
    assert built(folder=source, cache=cache) == mine  # a use is noted, and nothing is removed while nothing is made
    assert mine.stat().st_mtime > time.time() - 3600
    assert all(path.exists() for path in others)
    built(folder=source, cache=cache, extra=("-O1",))
    assert count(compiler) == 2
    assert mine.exists()
    assert sum(path.exists() for path in others) == build.KEPT.files - 1
    assert not any(path.exists() for path in others[build.KEPT.files - 1 :])


def test_file_that_others_can_write_is_built_anew(source: Path, compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = built(folder=source, cache=cache)
    path.write_bytes(b"evil")
    path.chmod(0o777)
    assert built(folder=source, cache=cache).read_bytes() != b"evil"
    assert count(compiler) == 2
    cache.chmod(0o777)
    with pytest.raises(BuildError, match="can be written by others"):
        built(folder=source, cache=cache)


def test_folder_of_another_user_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    if cache.stat().st_uid == 0:
        monkeypatch.setattr(build, "_ROOT", -1)
    with pytest.raises(BuildError, match="belongs to user"):
        built(folder=source, cache=cache)


def test_no_compiler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler is on PATH"):
        built(folder=source, cache=tmp_path / "cache")
    monkeypatch.setenv("CXX", "imaginary++")
    with pytest.raises(BuildError, match="CXX is 'imaginary"):
        built(folder=source, cache=tmp_path / "cache")


def test_compiler_that_fails(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / build.SOURCES[0]).write_text("#error no luck\n", encoding="utf-8")
    with pytest.raises(BuildError, match="no luck"):
        built(folder=source, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("CXX", shutil.which("false") or "")
    with pytest.raises(BuildError, match="failed with status 1"):
        built(folder=source, cache=tmp_path / "cache")


STUCK = """#!/bin/sh
case "$*" in *--version*) echo stuck 1; exit;; esac
echo $$ > "{0}/pid"
sleep 600 &
echo $! > "{0}/child"
wait
"""

BUILDER = """
import sys
from pathlib import Path
from engine.native.build import built
built(folder=Path(sys.argv[1]), cache=Path(sys.argv[2]))
"""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_compiler_ends_with_whoever_waits_for_it(
    end: signal.Signals, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the compiler started itself, and also where the waiting process had no chance to say goodbye."""
    stuck = tmp_path / "stuck"
    stuck.write_text(STUCK.format(tmp_path), encoding="utf-8")
    stuck.chmod(0o755)
    monkeypatch.setenv("CXX", str(stuck))
    command = [sys.executable, "-c", BUILDER, str(source), str(tmp_path / "cache")]
    builder = subprocess.Popen(command, cwd=Path(build.__file__).parents[2], stderr=subprocess.DEVNULL)
    until(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text(encoding="utf-8").strip()))
    pids = [int((tmp_path / name).read_text(encoding="utf-8")) for name in ("pid", "child")]
    assert all(map(alive, pids))
    builder.send_signal(end)
    assert builder.wait(100) != 0
    until(lambda: not any(map(alive, pids)))


def test_it_is_said_only_before_compiling(source: Path, compiler: Path, tmp_path: Path) -> None:
    said: list[int] = []
    for _ in range(2):
        built(folder=source, cache=tmp_path / "cache", announce=lambda: said.append(count(compiler)))
    assert said == [0]  # once, and the compiler had not run yet


def test_cache_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BuildError, match="cannot be made"):
        built(folder=source, cache=tmp_path / "file" / "cache")


def test_what_is_no_file_is_built_anew_or_told(source: Path, compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    place = built(folder=source, cache=cache)
    place.unlink()
    os.mkfifo(place, 0o600)
    assert built(folder=source, cache=cache) == place
    assert place.is_file()
    assert count(compiler) == 2
    place.unlink()
    place.mkdir(mode=0o700)
    with pytest.raises(BuildError, match=r"\.so cannot be written: Is a directory"):
        built(folder=source, cache=cache)
    assert list(cache.iterdir()) == [place]


def test_a_disk_that_is_full(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BuildError, match="cannot be written: No space left"):
        built(folder=source, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lockstep" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "lockstep" / "native"


def test_another_shared_object_is_not_a_library(source: Path, tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        Library(built(folder=source, cache=tmp_path / "cache"))
