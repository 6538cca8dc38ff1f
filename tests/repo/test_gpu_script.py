"""ci/gpu.sh where there is no GPU, and what it would carry; the table's program runs on a CPU too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci import gpu_table

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ci/gpu.sh"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    hidden = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(["sh", str(SCRIPT), *arguments], env=hidden, capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)
def test_without_a_device_it_says_so_and_ends_cleanly() -> None:
    ran = run_script()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("ci/gpu.sh: no CUDA device, nothing was run (Python 3")


def test_another_word_is_refused() -> None:
    ran = run_script("wheel")
    assert ran.returncode == 2
    assert "'wheel' is no command" in ran.stderr


def test_every_wheel_is_pinned_and_ignored_by_git() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    names = re.search(r'LACKS="([^"]*)"', text)
    assert names is not None
    pins = {line.partition("==")[0] for line in (ROOT / "ci/constraints.txt").read_text(encoding="utf-8").splitlines()}
    assert set(names[1].split()) <= pins
    assert {"fastapi", "uvicorn", "pydantic-core"} <= set(names[1].split())
    assert ".wheels/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_its_stages_end_within_ten_minutes() -> None:
    stages = re.findall(r"^stage (\d+) ", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(stages) == 5
    assert sum(map(int, stages)) <= 540


TINY = {"max_position_embeddings": 128}


@pytest.mark.timeout(600)
def test_the_table_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The same program over a small model and torch's kernels: every entry is there and every figure is a figure."""
    options = ["--device", "cpu", "--compute", "torch", "--batches", "1,2", "--prompt", "8", "--steps", "6"]
    assert gpu_table.main([*options, "--json"], TINY) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["compute"] == "torch"
    assert [(entry["batch"], entry["graphs"]) for entry in told["entries"]] == [
        (1, True), (1, False), (2, True), (2, False),
    ]  # fmt: skip
    assert all(entry["itl"] > 0 and entry["limit"] > 0 for entry in told["entries"])
    assert gpu_table.main(options, TINY) == 0
    assert "batch  invariant  ITL, graphs   ITL, eager" in capsys.readouterr().out


def test_the_table_without_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_table.main([]) == 0
    assert capsys.readouterr().out == "ci/gpu_table.py: no CUDA device, nothing was measured\n"
