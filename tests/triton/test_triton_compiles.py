"""Every device program compiles for a Hopper GPU, which need not be there; no product in it is TF32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_SHARED = 227 * 1024  # bytes that one program may have on that GPU


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "dim"), [("bf16", 64), ("bf16", 256), ("fp16", 80), ("fp32", 96)])
def test_programs_compile_without_a_gpu(tmp_path: Path, kind: str, dim: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/triton/compile_programs.py"), kind, str(dim)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) == 7
    for name, made in found.items():
        assert made["binary"] > 1000
        assert not made["tf32"], name
        assert made["shared"] <= MOST_SHARED, (name, made)
    products = {name for name, made in found.items() if made["matrix unit"]}
    assert products == ({"attend_decode", "attend_prefill", "linear"} if kind != "fp32" else set())
