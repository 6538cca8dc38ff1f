"""The machine's own limits, measured in the same run: how fast it reads memory and how fast it multiplies."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from engine.native.build import BuildError, find_compiler

SOURCE = Path(__file__).with_name("limits.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-pthread")
_TIMEOUT = 300


@attrs.frozen
class Limits:
    """``gflop_s``: fused multiply-adds count twice. ``read_gb_s``: by the size of what is read over and over, in bytes;
    a small model is read from the cache where it fits, so each size has a limit of its own."""

    threads: int
    gflop_s: float
    read_gb_s: dict[int, float]

    def read(self, nbytes: int) -> float:
        """GB/s of the size measured that is nearest to ``nbytes``."""
        return self.read_gb_s[min(self.read_gb_s, key=lambda size: abs(size - nbytes))]

    def best(self, other: Limits) -> Limits:
        """The higher of two measurements: what disturbs one can only lower it."""
        reads = {size: max(value, other.read_gb_s[size]) for size, value in self.read_gb_s.items()}
        return Limits(self.threads, max(self.gflop_s, other.gflop_s), reads)


def measure_limits(threads: int, sizes: Sequence[int]) -> Limits:
    """Compiles and runs limits.cpp. Raises ``BuildError`` where there is no working compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "limits")
        _run([find_compiler(), *FLAGS, str(SOURCE), "-o", str(program)])
        told = json.loads(_run([str(program), str(threads), *(str(size) for size in sizes)]))
    return Limits(threads, told["gflop_s"], dict(zip(sizes, told["read_gb_s"], strict=True)))


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed with status {error.returncode}: {error.stderr.strip()[:300]}") from None
    return done.stdout
