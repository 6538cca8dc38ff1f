"""ci/memory.py tells what it says: the pool's pages apart from the rest, by what was touched and not by what was reserved."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ci.memory import MIB, Ledger, rollup, touched
from tests.models import write_gguf

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells what is resident"
)


def reserved(size: int) -> tuple[mmap.mmap, tuple[int, int]]:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    first = np.frombuffer(memory, np.uint8).ctypes.data
    return memory, (first, first + size)


def test_touched_counts_pages_that_were_written() -> None:
    memory, span = reserved(8 * MIB)
    assert touched([span]) == 0
    memory[2 * MIB : 5 * MIB] = bytes(3 * MIB)
    assert touched([span]) == 3
    assert touched([(span[0], span[0] + 3 * MIB), (span[0] + 4 * MIB, span[1])]) == 2


def test_the_pool_is_left_out_of_the_rest() -> None:
    ledger = Ledger(lambda row: None)
    memory, span = reserved(64 * MIB)
    memory[:] = bytes(64 * MIB)
    ledger.note("counted")
    ledger.pool = [span]
    ledger.note("apart")
    counted, apart = ledger.rows
    assert (counted["pool"], apart["pool"]) == (0, 64)
    for kind in ("resident", "anonymous"):
        assert counted[kind] - apart[kind] > 60  # which a table that forgets the pool would not show
    assert rollup()["Rss"] > 64


def test_every_stage_is_told(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "a.gguf", "llama", "F32")
    command = [sys.executable, "ci/memory.py", "--model", str(model), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    rows = json.loads(answer.stdout)
    assert [row["stage"] for row in rows][:3] == ["Python", "numpy", "torch"]
    assert "given back: ready" in [row["stage"] for row in rows]
    assert all(row["resident"] >= row["anonymous"] > 0 for row in rows)
    assert rows[-1]["pool"] > 0
