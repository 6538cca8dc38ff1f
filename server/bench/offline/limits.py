"""The machine's own limits, measured in the same run: how fast it reads memory and how fast it multiplies.

A limit is a bound, so it is the fastest reading of many: several ways to do it (limits.cpp), at several moments around the
steps that it is compared with. On a machine that others use the rate changes by a quarter within seconds.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path

import attrs

import engine.native
from engine.native.build import BuildError, find_compiler, native_target

SOURCE = Path(__file__).with_name("limits.cpp")
HEADERS = Path(engine.native.__file__).parent  # the pool of threads and the tiles are the engine's own
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-pthread", f"-I{HEADERS}")
MOST_BYTES = 2**30  # of a buffer: what is larger is read from memory all the same
PARTS = 3  # products of bf16 that the tiles need for one of fp32 (tiles.h)
_TIMEOUT = 300


@attrs.frozen
class Limits:
    """``gflop_s``: fused multiply-adds count twice. ``read_gb_s``: by the size of what is read over and over, in bytes;
    a small model is read from the cache where it fits, so each size has a limit of its own. ``tile_gflop_s``: of bf16 on
    matrix tiles, 0 where the engine uses none."""

    threads: int
    gflop_s: float
    read_gb_s: dict[int, float]
    tile_gflop_s: float = 0.0

    def read(self, nbytes: int) -> float:
        """GB/s for ``nbytes``: the fastest of all sizes that are not smaller, since less is not read more slowly."""
        least = min(nbytes, MOST_BYTES, max(self.read_gb_s))
        return max(rate for size, rate in self.read_gb_s.items() if size >= least)

    def multiply(self, *, tiles: bool) -> float:
        """GFLOP/s in the precision of fp32, with vectors or, where ``tiles``, with what is faster."""
        return max(self.gflop_s, self.tile_gflop_s / PARTS) if tiles else self.gflop_s

    def best(self, other: Limits) -> Limits:
        """The higher of two measurements: what disturbs one can only lower it."""
        sizes = {*self.read_gb_s, *other.read_gb_s}
        reads = {size: max(found.read_gb_s.get(size, 0.0) for found in (self, other)) for size in sorted(sizes)}
        flops, on_tiles = max(self.gflop_s, other.gflop_s), max(self.tile_gflop_s, other.tile_gflop_s)
        return Limits(self.threads, flops, reads, on_tiles)


def best_of(measured: Iterable[Limits]) -> Limits:
    """At least one."""
    return reduce(Limits.best, measured)


def compiled(folder: Path) -> Path:
    """limits.cpp as a program in ``folder``. Raises ``BuildError`` where there is no working compiler."""
    program = folder / "limits"
    _run([find_compiler(), *FLAGS, *native_target(), str(SOURCE), "-o", str(program)])
    return program


def measure_limits(program: Path, threads: int, sizes: Sequence[int]) -> Limits:
    """Runs what ``compiled`` made. Raises ``BuildError`` when it fails."""
    asked = [min(size, MOST_BYTES) for size in sizes]
    told = json.loads(_run([str(program), str(threads), *map(str, asked)]))
    reads = dict(zip(asked, told["read_gb_s"], strict=True))
    return Limits(threads, told["gflop_s"], reads, told["tile_gflop_s"])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed with status {error.returncode}: {error.stderr.strip()[:300]}") from None
    return done.stdout
