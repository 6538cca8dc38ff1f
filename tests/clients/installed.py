"""The clients that ci/clients.sh installed into .clients, run as programs; a test that needs an absent one is skipped.

In CI a skip for that reason fails the run (tests/conftest.py), so there all of them run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".clients"
PYTHON = CLIENTS / "python" / "bin" / "python"

needs_clients = pytest.mark.skipif(
    not (CLIENTS / ".ready").exists(), reason="clients of other projects are not installed: sh ci/clients.sh"
)


def run(
    command: Sequence[str | Path], folder: Path, *, seconds: float = 280, within: Path = ROOT, **more: str
) -> subprocess.CompletedProcess[str]:
    """In ``within``, with ``folder`` as home and nothing that leads out of this machine; never waits for ever."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    environment = {
        **kept,
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "LANGSMITH_TRACING": "false",
        "LLM_USER_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return subprocess.run(
        command,
        cwd=within,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )


def node() -> str:
    """The system's Node, or the one that was installed because that is none or too old."""
    own = CLIENTS / "python" / "bin" / "node"
    found = str(own) if own.exists() else shutil.which("node")
    assert found is not None
    return found


def held(done: subprocess.CompletedProcess[str]) -> int:
    """How many checks a driver says have held. Raises ``AssertionError`` with its last words if one did not."""
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return int(answer["held"])
