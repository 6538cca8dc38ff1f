"""From the C++ sources to a shared object: the system's compiler, once, into the user's cache.

The name of a cached file is a hash of everything that its bytes depend on: sources, flags, the compiler's version and
the processor's features. It is written under another name first and then renamed, so two processes that build at once
both find a whole file. A cached file that somebody else could have written is not loaded. Those used last are kept (KEPT).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.native.prune import Limits, prune, used

SOURCES = (
    "kernels.cpp",
    "attention.h",
    "product.h",
    "tiles.h",
    "pool.h",
    "simd.h",
    "checksum.h",
    "integer.h",
    "sampling.h",
)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
TARGET = ("-march=native",)
NO_TILES = ("-DLOCKSTEP_NO_TILES",)
_TILES = "LOCKSTEP_TILES"  # the environment variable: "off" refuses matrix tiles
_TIMEOUT = 600  # seconds; a build takes a few
KEPT = Limits(re.compile(r"kernels-[0-9a-f]{24}\.so"), files=16, nbytes=2**28, days=90)
LEFT = Limits(re.compile(r"kernels-[0-9a-f]{24}\w{8}\.tmp"), files=2**31, nbytes=2**63, days=2 * _TIMEOUT / 86400)
_ROOT = 0
_ARCH_PRCTL, _REQUEST_STATE, _TILE_STATE = 158, 0x1023, 18  # of x86-64 Linux


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message is one sentence that says which."""


class BadTiles(BuildError):
    """``LOCKSTEP_TILES`` holds what it may not."""


def find_compiler() -> str:
    """``CXX``, else the first of COMPILERS on PATH. Raises ``BuildError``."""
    wanted = os.environ.get("CXX", "").strip()
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    if wanted:
        raise BuildError(f"CXX is {wanted!r}, but no such program is on PATH")
    raise BuildError(f"no C++ compiler is on PATH (looked for {', '.join(COMPILERS)}; CXX names another)")


def cache_home() -> Path:
    """``lockstep`` in ``XDG_CACHE_HOME``, by default in the home's ``.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "lockstep"


def cache_folder() -> Path:
    """Where shared objects are kept."""
    return cache_home() / "native"


def built(
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    target: Sequence[str] | None = None,
    extra: Sequence[str] = (),
    announce: Callable[[], None] | None = None,
) -> Path:
    """The shared object for this machine, compiled now unless it is in ``cache`` already.

    ``folder`` holds the sources; ``target`` are the flags that choose the processor, by default ``native_target``;
    ``extra`` come after all others.
    ``announce`` is called before the compiler. Raises ``BuildError``.
    """
    folder = folder or Path(__file__).parent
    compiler = find_compiler()
    flags = (*FLAGS, *(native_target() if target is None else target), *extra)
    place = (cache or cache_folder()) / f"kernels-{_key(folder, compiler, flags)}.so"
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache folder {place.parent} cannot be made: {error.strerror or error}") from None
    if why := foreign(place.parent):
        raise BuildError(f"the cache folder {place.parent} {why}, so nothing is loaded from it")
    if place.is_file() and not foreign(place):  # a pipe would be waited for
        used(place)
        return place
    prune(place.parent, LEFT)
    prune(place.parent, KEPT, place)
    if announce is not None:
        announce()
    try:
        _compile(compiler, flags, folder, place)
    except OSError as error:
        raise BuildError(f"{place} cannot be written: {error.strerror or error}") from None
    return place


def native_target() -> tuple[str, ...]:
    """Flags for this machine: matrix tiles only where the system grants them and ``LOCKSTEP_TILES`` is not ``off``.

    Raises ``BadTiles`` for another value of the variable.
    """
    wanted = os.environ.get(_TILES, "").strip()
    if wanted not in ("", "on", "off"):
        raise BadTiles(f"{_TILES} is {wanted!r}, but must be on or off")
    return TARGET if wanted != "off" and tiles_granted() else (*TARGET, *NO_TILES)


def tiles_granted() -> bool:
    """Whether this processor has matrix tiles of bf16 and Linux lets this process use them, which it must be asked for."""
    flags = processor().partition("flags")[2].split()
    if platform.machine() != "x86_64" or not {"amx_tile", "amx_bf16"} <= set(flags):
        return False
    call = ctypes.CDLL(None).syscall
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_long] * 3
    return int(call(_ARCH_PRCTL, _REQUEST_STATE, _TILE_STATE)) == 0


def foreign(path: Path) -> str | None:
    """Why somebody else could have written ``path``; ``None`` if nobody could."""
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), _ROOT):
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
        return "can be written by others"
    return None


def _compile(compiler: str, flags: Sequence[str], folder: Path, place: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=place.stem, suffix=".tmp", dir=place.parent)
    os.close(handle)
    half = Path(name)
    try:
        status, errors = _run([compiler, *flags, str(folder / SOURCES[0]), "-o", str(half)])
        if status != 0:
            lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
            raise BuildError(f"{compiler} failed with status {status}: {(lines or ['no message'])[0]}")
        half.chmod(0o700)
        with half.open(
            "rb"
        ) as file:  # a name that outlives a power failure, without what it names, could not be loaded
            os.fsync(file.fileno())
        half.replace(place)
    finally:
        half.unlink(missing_ok=True)


# The compiler, and beside it a shell that reads a pipe until its end: when whoever holds the other end is gone, however it
# went, all of them go. A compiler that was left alone would work on for nobody.
_UNTIL_WE_END = """
exec 3<&0
{ read -r _ <&3; kill -KILL 0; } >/dev/null 2>&1 &
"$@" 3<&- </dev/null &
wait $!
"""


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Status and stderr. Ends with this process, with Ctrl-C or after _TIMEOUT. Raises ``BuildError``."""
    with tempfile.TemporaryFile() as errors:
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", _UNTIL_WE_END, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # a group of its own, so that all of it can be ended
            )
        except OSError as error:
            raise BuildError(f"{command[0]} did not run: {error}") from None
        assert shell.stdin is not None
        try:
            status = shell.wait(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} did not run: {error}") from None
        finally:
            shell.stdin.close()
            shell.wait()
        errors.seek(0)
        return status, errors.read().decode(errors="replace")


def _key(folder: Path, compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    for part in (*flags, compiler, _version(compiler), platform.machine(), processor()):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} did not run: {error}") from None


def processor() -> str:
    """What -march=native depends on: the processor's model and its features, as the kernel lists them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    lines = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in wanted)
