"""The command line: exit status, JSON keys, one-sentence errors; and the canary, from an armed hunt to the replayed file."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import properties
from engine.trace import Shape, Submit, Workload, load, save
from properties import commands
from properties.__main__ import main
from properties.hunt import hunt
from properties.lockstep import run
from properties.report import LEGEND
from properties.rungs import Unavailable
from properties.trial import Trial
from tests.properties.counted_hunt import counted_hunt

ROOT = Path(properties.__file__).parent.parent
LEAK = str(ROOT / "properties" / "regress" / "A05-the-published-leak.json")
SOAK = "soak --prompts 4,4,4,4,4,4,4,4,4,4,4,4 --max-tokens 8 --rows 3 --blocks 10 --block-size 4"


def call(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    try:
        status = main(shlex.split(command))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, Any]:
    status, out, _ = call(capsys, f"{command} --json")
    return status, json.loads(out)


def test_replay_holds_and_is_violated(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, f"replay {LEAK}")
    assert (status, out) == (0, "holds: 33 iterations, 12 accepted requests\n")
    status, out, _ = call(capsys, f"replay {LEAK} --arm A05 --rung ledger")
    assert status == 1
    assert "audit at iteration 9: block 2 is allocated but no request holds it" in out
    assert out.endswith(f"replay: python -m properties replay {LEAK} --arm A05 --until 9\n")
    assert call(capsys, f"replay {LEAK} --arm A05 --until 8")[0] == 0
    assert answer(capsys, f"replay {LEAK} --arm A05 --until 9") == (
        1,
        {
            "holds": False,
            "iterations": 9,
            "check": "audit",
            "iteration": 9,
            "headline": "block 2 is allocated but no request holds it",
            "facts": [],
        },
    )


def test_show_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, f"show {LEAK} --until 3")
    assert status == 0
    assert len(out.splitlines()) == 1 + 3 + 2 + len(LEGEND.splitlines())  # the requests without a column, a blank line
    status, steps = answer(capsys, f"show {LEAK}")
    assert (status, len(steps)) == (0, 33)
    assert [step["iteration"] for step in steps] == list(range(1, 34))
    assert steps[8]["reaped"] == [0, 1, 2]


def test_shrink_writes_the_smaller_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = call(capsys, f"shrink {LEAK} --arm A05 --found {tmp_path}")
    path = tmp_path / "A05-the-published-leak-shrunk.json"
    assert status == 1
    assert re.search(rf"12 events became 1 after \d+ tries: {path}\n", out)
    assert call(capsys, f"replay {path} --arm A05")[0] == 1
    assert call(capsys, f"shrink {LEAK}")[:2] == (0, "holds: there is no failure to shrink\n")


def test_coverage_has_the_published_keys(capsys: pytest.CaptureFixture[str]) -> None:
    command = "coverage --rows 8 --requests 16 --lengths 4,8,16,32"
    assert answer(capsys, command) == (0, {"decode_steps": 47, "replayed": 47, "scattered": 0, "moves": 8})
    assert answer(capsys, f"{command} --no-persistent-batch") == (
        0,
        {"decode_steps": 47, "replayed": 12, "scattered": 35, "moves": 0},
    )


def test_soak_catches_the_leak(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = call(capsys, f"{SOAK} --arm A05 --found {tmp_path}")
    assert status == 1
    assert "audit at iteration 9: block 2 is allocated but no request holds it" in out
    status, said = answer(capsys, f"{SOAK} --arm A05 --found {tmp_path}")
    message = "block 2 is allocated but no request holds it"
    assert (status, said["caught_at_iteration"], said["message"]) == (1, 9, message)
    assert call(capsys, said["replay"].removeprefix("python -m properties "))[0] == 1


def test_soak_without_audit_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    status, figures = answer(capsys, f"{SOAK} --arm A05 --no-audit")
    assert (status, figures["finished"], figures["free_blocks_at_end"]) == (0, 12, 9)
    assert set(figures) == {
        *("finished", "forward_iterations", "steps_with_final_reap", "evictions", "max_preemptions", "preempted_twice"),
        *("oldest_preemptions", "forward_tokens", "recomputed_tokens", "recompute_share", "free_blocks_at_end", "text"),
    }


def test_matrix_of_one_fault(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = answer(capsys, "matrix --only G06 --workloads 0 --seeds 0")
    assert (status, said["holds"], [row["fault"] for row in said["rows"]]) == (0, True, [None, "G06"])
    assert said["rows"][1]["fired"].keys() == {"replay"}
    status, out, _ = call(capsys, "matrix --only A05 --workloads 0 --seeds 1")
    assert status == 0
    assert "the third release loses the first block of the table" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("replay no/such/file.json", "no/such/file.json: No such file or directory"),
        ("replay {broken}", "broken.json: shape has the unknown key 'pool'"),
        (f"replay {LEAK} --arm X99", "argument --arm: there is no fault 'X99'"),
        (f"replay {LEAK} --rung moon", "argument --rung: invalid choice: 'moon'"),
        (f"replay {LEAK} --until 0", "argument --until: 0 is too small, it must be at least 1"),
        ("coverage --rows 4 --requests 2 --lengths 4,x", "argument --lengths: 'x' is no integer"),
        ("coverage --rows 4 --requests 2", "the following arguments are required: --lengths"),
        ("coverage --rows 4 --requests 2 --lengths 4 --budget 3", "shape.budget .*is 3, but must be an integer in 4.."),
        ("soak --prompts 4 --max-tokens 4 --rows 1 --blocks 2 --block-size 4 --watermark 2", "shape.watermark is 2"),
        ("hunt --minutes 0", "argument --minutes: '0' is not a length of time"),
        ("dance", "'dance' is no command; the commands are replay, show, "),
        ("replya x", "'replya' is no command; .*did you mean 'replay'?"),
        ("--nope", "'--nope' is no command; the commands are replay, show, "),
    ],
)
def test_a_usage_error_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, message: str
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "workload/1", "shape": {"pool": 1}, "events": []}')
    status, out, err = call(capsys, command.format(broken=broken))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_without_a_command_they_are_listed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "")
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("  ")]
    assert {"replay", "show", "shrink", "hunt", "matrix", "faults", "laws", "scope"} <= {
        line.split()[0] for line in lines
    }
    assert len(lines) == 12
    assert all(len(line) <= 120 and len(line.split()) > 3 for line in lines)


def test_a_rung_that_this_machine_cannot_run_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(_: Trial, workload: Workload, *, until: int | None = None) -> None:
        raise Unavailable("no CUDA device")

    monkeypatch.setattr(Trial, "run", unavailable)
    assert call(capsys, f"replay {LEAK} --rung gpu") == (2, "", "properties: no CUDA device\n")


@pytest.mark.parametrize("command", ["", "replay", "show", "shrink", "hunt", "matrix", "faults", "coverage", "soak"])
def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = call(capsys, f"{command} --help")
    assert status == 0
    assert ("Example: python -m properties" if command else "pytest properties -n auto") in " ".join(out.split())


def test_hunt_finds_shrinks_and_saves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "hunt", lambda *_, **__: counted_hunt(Trial(fault="A03"), seed=5, workloads=500))
    status, said = answer(capsys, f"hunt --minutes 1 --seed 5 --jobs 1 --arm A03 --found {tmp_path}")
    assert (status, said["holds"], said["seed"]) == (1, False, 5)
    saved = load(Path(said["finds"][0]["file"]))
    assert saved.fault == "A03"
    assert (saved.found or {})["seed"] == 5
    assert len(saved.events) == 1
    assert run(saved).first is None


def test_hunt_without_a_fault_holds() -> None:
    hunted = hunt(
        0.15, seed=7
    )  # mostly for the processes to start: how many workloads then run is the machine's business
    assert hunted.finds == []
    assert hunted.workloads > 0
    assert hunted.iterations > hunted.workloads


def _in_process(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LOCKSTEP_PROFILE": "gate"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


def test_the_canary_from_the_hunt_to_the_replayed_file(tmp_path: Path) -> None:
    """An armed run must fail, leave a file, and print a command that meets the same divergence with exit status 1."""
    pytest_command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--arm",
        "Z00",
        "--found",
        "found",
    ]
    test = f"{ROOT}/properties/test_ledger.py::test_the_engine_follows_the_specification[0]"
    hunted = _in_process([*pytest_command, test], tmp_path)
    assert hunted.returncode == 1
    assert "audit at iteration 1: canary" in hunted.stdout
    (path,) = (tmp_path / "found").iterdir()
    saved = load(path)
    assert saved.title == "audit: canary"
    assert (saved.found or {})["iteration"] == 1
    assert len(saved.events) == 1  # Hypothesis shrank it
    printed = next(line for line in hunted.stdout.splitlines() if "replay: python" in line).split("replay: ")[1]
    replayed = _in_process([sys.executable, *shlex.split(printed)[1:]], tmp_path)
    assert replayed.returncode == 1
    assert replayed.stdout.splitlines()[0] == "audit at iteration 1: canary"
    assert printed in replayed.stdout


def test_a_saved_workload_needs_nothing_but_the_file(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    save(Workload(Shape(2, 2, 1), (Submit(0, (("a", 1),), 2),)), path)
    done = _in_process([sys.executable, "-m", "properties", "replay", path.name], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "holds: 3 iterations, 1 accepted request\n", "")


def test_a_hunt_in_which_nothing_ran_does_not_hold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = call(capsys, f"hunt --minutes 0.0001 --jobs 1 --seed 1 --found {tmp_path}")
    assert status == 1
    assert "NOTHING RAN" in out


def test_what_serving_installs_is_enough_to_replay() -> None:
    """Hypothesis comes with the tests only; ``make serve`` leaves it out."""
    script = f"""
import sys
sys.modules["hypothesis"] = None
from properties import commands
from properties.__main__ import main
sys.exit(main(["replay", {LEAK!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "holds: 33 iterations, 12 accepted requests\n"), ended.stderr
