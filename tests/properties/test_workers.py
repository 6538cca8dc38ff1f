"""However a command with workers is ended, it says one line, and no worker is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import properties
from properties import __main__ as entry

ROOT = Path(properties.__file__).parent.parent
LONG = {
    "scope": "scope --box arrivals --box prefixes --box trouble --jobs 2",
    "matrix": "matrix --jobs 2 --only A05 A07 S02 S18",
    "hunt": "hunt --minutes 5 --jobs 2 --seed 1",
}


def session(leader: int) -> set[int]:
    """The live processes of a session; those that ended and were not yet waited for do not count."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its) == leader and state != "Z":
            found.add(int(stat.parent.name))
    return found


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("command", "number", "status", "told"),
    [
        ("scope", signal.SIGINT, 130, "properties: interrupted\n"),
        ("scope", signal.SIGTERM, 143, "properties: terminated\n"),
        ("matrix", signal.SIGINT, 130, "properties: interrupted\n"),
        ("hunt", signal.SIGINT, 130, "properties: interrupted\n"),
        ("hunt", signal.SIGTERM, 143, "properties: terminated\n"),
        ("hunt", signal.SIGKILL, -9, None),
    ],
)
def test_ended_in_one_line_and_nobody_left(command: str, number: int, status: int, told: str | None) -> None:
    arguments = [sys.executable, "-m", "properties", *LONG[command].split()]
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert until(lambda: len(session(process.pid)) >= 4)  # parent, resource tracker, two workers
        time.sleep(0.0 if number == signal.SIGINT else 1.5)  # SIGINT must be harmless while a worker is starting, too
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == status
        assert out.startswith("seed 1: ") if command == "hunt" and told else out == ""
        assert told in (None, err)  # killed outright, nobody is left to say anything
        assert until(lambda: not session(process.pid), 10)
    finally:
        for left in session(process.pid):
            os.kill(left, signal.SIGKILL)


def test_an_interrupt_while_importing_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "properties.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "properties.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert entry.main(["show", "x"]) == 130
    assert capsys.readouterr().err == "properties: interrupted\n"
