"""The start as it is seen: a line at once, each stage with its seconds, and an end at once while the compiler works."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from server import logs
from server.console import StartProgress
from tests.models import write_folder
from tests.server.test_server_cli import ROOT, finish

STAGES = (  # as the engine and the server tell them: what, done, of how many, at which second
    ("importing torch", 0, 1, 1.0),
    ("reading the model", 0, 1, 4.0),
    ("compiling", 0, 1, 6.0),
    ("preparing kernels", 1, 1, 36.0),
    ("loading weights", 1, 2, 38.0),
    ("loading weights", 2, 2, 40.0),
    ("recording graphs", 1, 1, 43.0),
)
SECONDS = {
    "importing torch": 3.0,
    "reading the model": 2.0,
    "compiling": 30.0,
    "preparing kernels": 0.0,
    "loading weights": 4.0,
    "recording graphs": 3.0,
}


def played(progress: StartProgress, now: list[float]) -> float:
    for stage, done, total, when in STAGES:
        now[0] = when
        progress(stage, done, total)
    now[0] = 50.0
    return progress.stop()


def test_each_stage_is_told_with_its_seconds() -> None:
    """Time that nobody claims after a stage that was done (7 s at the end) is no stage's."""
    now = [0.0]
    with capture_logs() as entries:
        total = played(StartProgress("a model", lambda: now[0]), now)
    assert total == 50.0
    assert (entries[0]["event"], entries[0]["model"]) == ("loading", "a model")
    assert {entry["stage"]: entry["seconds"] for entry in entries if entry["event"] == "done"} == SECONDS
    began = [entry["stage"] for entry in entries if entry["event"] == "starting"]
    assert began == ["importing torch", "reading the model", "compiling", "loading weights"]


def test_a_stage_that_was_cut_short_is_told_too() -> None:
    now = [0.0]
    with capture_logs() as entries:
        progress = StartProgress("a model", lambda: now[0])
        progress.begin("reading the model")
        now[0] = 2.0
        progress.stop()
        now[0] = 3.0
        assert progress.stop() == 3.0
    assert [entry.get("seconds") for entry in entries] == [None, None, 2.0]


def test_on_a_terminal_lines_stay_and_bars_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    played(StartProgress("a [model]", lambda: now[0]), now)
    shown = capsys.readouterr().err
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown).splitlines()]
    assert re.fullmatch(r"Lockstep \S+: loading a \[model\]", lines[0])
    for stage, seconds in SECONDS.items():
        assert any(re.search(rf"  {stage} +{seconds} s$", line) for line in lines), (stage, lines)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again


def test_a_line_is_printed_before_anything_slow_is_imported() -> None:
    code = (
        "import sys\nfrom server import cli\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('torch', 'fastapi', 'uvicorn', 'pydantic'):\n"
        "            print('IMPORTS', name, file=sys.stderr)\n            sys.exit(7)\n"
        "sys.meta_path.insert(0, Slow())\ncli.main(['--port', '0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "bound" not in line]
    assert done.returncode == 7, done.stderr
    assert " loading " in lines[0]
    assert "importing the server" in lines[1]
    assert "IMPORTS" in lines[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


COMPILER = """#!/bin/sh
case "$*" in *--version*) echo pretended 1.0; exit ;; esac
echo $$ >"$PID_FILE"
exec sleep 1000
"""


def compiling(folder: Path, place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A first start whose compiler works for a very long time, and the file in which that one leaves its id."""
    compiler, pid = place / "slow-c++", place / "pid"
    place.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    more = {"CXX": str(compiler), "XDG_CACHE_HOME": str(place / "cache"), "PID_FILE": str(pid), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "--port", "0", "--model", str(folder)],
        cwd=ROOT,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, pid


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.timeout(600)
def test_a_signal_ends_a_start_that_compiles(folder: Path, tmp_path: Path) -> None:
    """At once: the compiler would go on for a quarter of an hour, and ends as well."""
    signals = (signal.SIGTERM, signal.SIGINT)
    started = [compiling(folder, tmp_path / str(int(number))) for number in signals]
    try:
        for (process, pid), number in zip(started, signals, strict=True):
            assert process.stderr is not None
            assert any("compiling kernels" in line for line in process.stderr)  # reads no further
            assert soon(lambda pid=pid: pid.exists() and pid.read_text().strip() != "")
            compiler = int(pid.read_text())
            assert not gone(compiler)
            process.send_signal(number)
            status, out, err = finish(process, 120)
            assert (status, out) == (0, ""), err
            assert "Traceback" not in err
            assert soon(lambda compiler=compiler: gone(compiler)), "the compiler works on for nobody"
    finally:
        for process, _ in started:
            process.kill()
            process.communicate()


def test_what_the_engine_logs_is_a_line_like_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("engine.native.prune")
    logs.configure("info", "json")
    log.info("removed %d files", 3)
    assert json.loads(capsys.readouterr().err) | {"timestamp": ""} == {
        "event": "removed 3 files",
        "level": "info",
        "timestamp": "",
    }
    logs.configure("warning", "text")
    log.info("removed %d files", 3)
    assert capsys.readouterr().err == ""


def test_a_quiet_log_level_starts_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "text")
    progress = StartProgress("a model")
    progress.begin("reading the model")
    progress.stop()
    assert capsys.readouterr().err == ""


STARTED = """
import gc, socket, sys
from engine.config import EngineConfig
from engine.engine import Engine
from server import serve
from server.console import StartProgress
from server.settings import ServerSettings

class Enough(Exception):
    pass

def made(make, *rest):
    engine = make()
    print(engine, gc.get_freeze_count() > 1000, gc.isenabled())
    raise Enough

Engine.from_config = lambda config, progress: "an engine"
serve.create_lazy_app = made
try:
    serve.serve(EngineConfig(), ServerSettings(), socket.create_server(("127.0.0.1", 0)), StartProgress("a model"))
except Enough:
    sys.exit(7)
"""


def test_what_a_start_leaves_is_not_collected_again_and_again() -> None:
    """Otherwise every answer stands still for more than a tenth of a second whenever all of it is looked through."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, "an engine True True"), done.stderr


INTERRUPTED = """
import os, sys
from importlib.abc import MetaPathFinder
from server import cli

class Stopped(MetaPathFinder):
    def find_spec(self, name, *rest):
        if name == "server.serve":
            os.kill(os.getpid(), int(sys.argv[1]))

sys.meta_path.insert(0, Stopped())
sys.exit(cli.main(["--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_can_be_drained_ends_cleanly(number: signal.Signals) -> None:
    """While the server itself is imported nobody is served, so there is nothing to wait for and nothing to complain about."""
    command = [sys.executable, "-c", INTERRUPTED, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
