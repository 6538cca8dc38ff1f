"""The Makefile and .ci/run: the promised targets exist, each sets up first, and the scripts parse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("serve", "test", "full", "hunt", "bench", "check", "readme", "clients", "lock")


def dry_run(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", "-n", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, text=True, capture_output=True).stdout


@pytest.mark.parametrize("target", TARGETS)
def test_target_sets_up_first(target: str) -> None:
    lines = dry_run(target).splitlines()
    assert "ci/setup.sh" in lines[0]
    assert len(lines) >= 2


def test_arguments_arrive() -> None:
    assert "-m server --port 8001" in dry_run("serve", "ARGS=--port 8001")
    assert "--minutes 3" in dry_run("hunt", "MINUTES=3")
    assert 'PYTHON="python3.12"' in dry_run("serve", "PYTHON=python3.12")


def test_help_is_the_default_and_lists_every_target() -> None:
    shown = subprocess.run(["make", "-s"], cwd=ROOT, check=True, text=True, capture_output=True).stdout
    assert re.findall(r"^make (\w+)", shown, re.MULTILINE) == re.findall(
        r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert set(TARGETS) <= set(re.findall(r"^make (\w+)", shown, re.MULTILINE))


def test_gate_leaves_out_slow_tests_and_full_does_not() -> None:
    assert '-m "not slow"' in dry_run("test")
    assert "not slow" not in dry_run("full")


@pytest.mark.parametrize("script", [".ci/run", "ci/setup.sh", "ci/clients.sh", "ci/check.sh", "ci/lock.sh"])
def test_script_is_executable_and_parses(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    shell = "bash" if "bash" in path.read_text(encoding="utf-8").splitlines()[0] else "sh"
    subprocess.run([shell, "-n", str(path)], check=True)


def run_ci(folder: Path, makefile: str, limit: str = "") -> subprocess.CompletedProcess[str]:
    """.ci/run in an empty folder with ``makefile``; every limit is ``limit`` where one is given. Nothing is installed on the
    machine that the test runs on."""
    (folder / ".ci").mkdir()
    (folder / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "Makefile").write_text(makefile, encoding="utf-8")
    programs = {"apt-get": "exit 1"}
    if limit:
        programs["timeout"] = f'shift 2; exec {shutil.which("timeout")} --kill-after=1 {limit} "$@"'
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", ".ci/run"],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        check=False,
        text=True,
        capture_output=True,
        timeout=60,
    )


def test_ci_runs_every_stage_even_after_one_failed(tmp_path: Path) -> None:
    makefile = "setup clients:\n\t@true\ncheck:\n\t@exit 1\nreadme:\n\t@true\ntest:\n\t@echo '3 passed in 1s'\n"
    result = run_ci(tmp_path, makefile)
    assert result.returncode == 1
    assert result.stdout.endswith("3 passed in 1s\n")
    assert "'make check' ended with status 2" in result.stderr
    assert "make clients" not in result.stderr


@pytest.mark.parametrize(
    ("recipe", "status", "limit"), [("echo no such package >&2; exit 1", 2, ""), ("sleep 1000", 124, "2")]
)
def test_clients_that_cannot_be_installed_fail_the_run_in_words(
    recipe: str, status: int, limit: str, tmp_path: Path
) -> None:
    """Also when the index never answers; and the stages beside and behind it have run."""
    stages = "".join(f"{name}:\n\t@echo {name} ran\n" for name in ("check", "readme", "test"))
    result = run_ci(tmp_path, f"clients:\n\t@{recipe}\n{stages}", limit)
    assert result.returncode == 1
    assert result.stdout.splitlines() == ["check ran", "readme ran", "test ran"]
    assert f"'make clients' ended with status {status} " in result.stderr
    assert ("no such package" in result.stderr) == (status == 2)
