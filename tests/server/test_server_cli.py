"""The command line: exit statuses, one sentence on stderr, nothing slow too early; and a server from start to end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from server import cli
from server.options import Options

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)  # processes that import torch start slowly beside others


def start(*arguments: str, program: Sequence[str] = ("-m", "server")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 280) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--dry-run"], ["--prot", "1"], ["--port", "x"]])
def test_neither_torch_nor_fastapi_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom server import cli\n"
        f"status = cli.main({arguments!r})\n"
        "slow = {'torch', 'fastapi', 'pydantic', 'uvicorn', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if arguments[0].startswith("--p") else 0), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prot", "1"], ["--prot"]),
        (["--port", "x"], ["--port", "'x'|\"x\""]),
        (["--port", "70000"], ["port", "70000", "65535"]),
        (["stray"], ["stray", "bench and graphbench"]),
        (["bnch"], ["bnch", "did you mean 'bench'"]),
        (["--max-num-batched-tokens", "4"], ["max_num_batched_tokens", "4", "max_num_seqs = 16"]),
        (["--device", "tpu"], ["device", "tpu", "cpu, cuda"]),
        (["--num-kv-blocks", "0"], ["num_kv_blocks", "0"]),
        (["--log-level", "loud"], ["loud", "warning"]),
        (["--metrics-prefix", "a-b"], ["metrics_prefix", "a-b"]),
        (["--allowed-hosts", "http://a.org"], ["allowed_hosts", "http://a.org", "example.org"]),
        (["--drain-timeout", "-1"], ["drain_timeout", "-1"]),
        (["--config", "/nope.toml"], ["/nope.toml"]),
        (["--host", "192.0.2.1", "--port", "0"], ["192.0.2.1"]),
        (["--model", "/nope"], ["model", "/nope"]),
        (["--model", "nope.gguf"], ["model", "nope.gguf"]),
    ],
)
def test_one_sentence_and_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    status, out, err = in_process(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    for word in words:
        assert re.search(word.replace(".", r"\."), err), err


def test_help_speaks_no_python(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = in_process(capsys, "--help")
    assert status == 0
    assert not {"()", "None", "tuple", "auto]]"} & set(out.replace("[default: ", " ").replace("]", " ").split())
    assert "Exit status: 0 " in " ".join(out.split())


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"bench", "graphbench"} <= set(in_process(capsys, "--help")[1].split())


def test_flag_beats_variable_beats_file_beats_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "lockstep.toml"
    file.write_text("port = 1\nmax-num-seqs = 2\nblock_size = 4\nenforce-eager = true\n")
    monkeypatch.setenv("LOCKSTEP_PORT", "3")
    monkeypatch.setenv("LOCKSTEP_MAX_NUM_SEQS", "5")
    status, out, err = in_process(capsys, "--dry-run", "--config", str(file), "--port", "7")
    assert (status, err) == (0, "")
    shown = {line.split()[0]: line.split()[1] for line in out.splitlines() if line.startswith("--")}
    wanted = {
        "--port": "7",
        "--max-num-seqs": "5",
        "--block-size": "4",
        "--enforce-eager": "on",
        "--max-waiting": "1024",
    }
    assert wanted.items() <= shown.items()


def test_the_file_may_hold_no_unknown_option_and_must_be_toml(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for text in ("max-nonsense = 3\n", "port = \n", "port = 'x'\n"):
        file = tmp_path / "lockstep.toml"
        file.write_text(text)
        status, _, err = in_process(capsys, "--dry-run", f"--config={file}")
        assert status == 2
        assert err.count("\n") == 1


def test_dry_run_shows_every_option_and_no_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = in_process(
        capsys, "--dry-run", "--api-key", "SENTINEL", "--num-kv-blocks", "10", "--model", str(tmp_path)
    )
    assert status == 0
    assert "SENTINEL" not in out
    assert "160 tokens in 10 blocks" in out
    assert "(a folder)" in out
    assert out.count("\n--") + 1 == len(Options.__attrs_attrs__)


def test_every_option_reaches_its_setting() -> None:
    """No dead switch: each field of Options is one of the engine's or of the server's, but for the two of the CLI."""
    import attrs

    from engine.config import EngineConfig
    from server.settings import ServerSettings

    mine = {field.name for field in attrs.fields(Options)} - {"config", "dry_run"}
    theirs = {field.name for kind in (EngineConfig, ServerSettings) for field in attrs.fields(kind)}
    renamed = {"api_keys": ("api_key", "api_key_file"), "admin_keys": ("admin_key",), "cors_origins": ("cors_origin",)}
    assert mine == (theirs - {*renamed}) | {name for names in renamed.values() for name in names}
    for kind in (EngineConfig, ServerSettings):  # and the defaults agree
        for field in attrs.fields(kind):
            if field.name not in renamed:
                assert getattr(attrs.fields(Options), field.name).default == field.default, field.name


def test_port_in_use_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "server.serve", None)  # whoever imports it fails
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        status, _, err = in_process(capsys, "--port", str(port))
    assert status == 2
    assert str(port) in err
    assert "in use" in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import write_folder

    path = tmp_path_factory.mktemp("model") / "tiny"
    return write_folder(path)


def test_what_only_the_engine_knows_is_one_sentence_too(tmp_path: Path) -> None:
    """Started side by side: each has to import torch."""
    import torch

    cases = [(["--model", str(tmp_path)], ["config.json"])]
    if not torch.cuda.is_available():
        cases.append((["--device", "cuda"], ["cuda", "torch"]))
    processes = [start("--port", "0", "--log-level", "error", *arguments) for arguments, _ in cases]
    for process, (_, words) in zip(processes, cases, strict=True):
        status, out, err = finish(process)
        assert status == 2, err
        assert "Traceback" not in err
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert all(word in last for word in words), last
        assert "ready" not in out


class Running:
    """A server process that has said its last line of the start."""

    def __init__(
        self, *arguments: str, program: Sequence[str] = ("-m", "server"), rows: int = 2, blocks: int = 64
    ) -> None:
        sizes = ("--port", "0", "--max-num-seqs", str(rows), "--num-kv-blocks", str(blocks), "--threads", "1")
        self.process = start(*sizes, *arguments, program=program)
        assert self.process.stdout is not None
        self.lines: list[str] = []
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                if line.startswith("Lockstep is ready on "):
                    break
            else:
                raise AssertionError(finish(self.process)[2])
        except BaseException:  # the test's time is over: nobody else would end the process
            self.process.kill()
            raise
        self.url = self.lines[-1].removeprefix("Lockstep is ready on ")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=60)


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    server = Running("--model", str(folder), "--drain-timeout", "0.2")
    yield server
    server.process.kill()
    server.process.communicate()


def test_a_server_from_start_to_sigterm(running: Running, folder: Path) -> None:
    """The table, the curl that works when pasted, an answer, and a stream that is cut with a terminal event."""
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", running.url)
    assert not running.url.endswith(":0")
    assert any("64 blocks" in line for line in running.lines)
    assert [line.split()[1] for line in running.lines if line.startswith("page ")] == [f"{running.url}/"]
    watched = urllib.request.urlopen(running.url + "/live", timeout=60)
    assert watched.readline().startswith(b"data: {")
    (curl,) = [line for line in running.lines if line.startswith("curl ")]
    data = json.loads(curl.partition(" -d '")[2].removesuffix("'"))
    with running.post(curl.split()[2].removeprefix(running.url), data) as response:
        assert json.load(response)["choices"][0]["message"]["role"] == "assistant"
    stream = running.post("/v1/completions", {"prompt": "hi", "max_tokens": 490, "ignore_eos": True, "stream": True})
    assert stream.readline().startswith(b"data: {")
    running.process.send_signal(signal.SIGTERM)
    rest = stream.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert watched.read().endswith(b"data: [DONE]\n\n")  # who only watches does not hold up the end
    status, out, err = finish(running.process)
    assert status == 0, err
    assert out == ""
    assert "Traceback" not in err
    assert "hi" not in [word.strip("'\"") for word in err.split()]


def test_ctrl_c_idle_and_sigterm_while_loading(running: Running) -> None:
    # The default model takes longer.
    loading = start("--port", "0", "--log-level", "info", "--drain-timeout", "600")
    assert loading.stderr is not None
    assert " loading " in loading.stderr.readline()  # from now on it may take seconds
    assert "starting" in loading.stderr.readline()
    for process, number in ((running.process, signal.SIGINT), (loading, signal.SIGTERM)):
        began = time.monotonic()
        process.send_signal(number)
        status, _, err = finish(process)
        assert status == 0, err
        assert "Traceback" not in err
        assert time.monotonic() - began < 250  # below the drain time, and above what a busy machine needs


def test_two_signals_at_once_end_at_once_and_quietly(folder: Path) -> None:
    """A second Ctrl-C, or a supervisor that tells the whole group and the process."""
    server = Running("--model", str(folder))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        server.process.send_signal(number)
    status, _, err = finish(server.process)
    assert status == 0, err
    assert "Traceback" not in err
    assert "ERROR" not in err


def test_a_second_signal_ends_open_streams_with_their_last_events(folder: Path, tmp_path: Path) -> None:
    """The first says for whom it waits, and how not to; the recording is written, and where it went is said."""
    file = tmp_path / "run.json"
    server = Running("--model", str(folder), "--drain-timeout", "300", "--record", str(file))
    body = {"prompt": "hi", "max_tokens": 490, "n": 64, "ignore_eos": True, "stream": True}
    stream = server.post("/v1/completions", body)
    assert stream.readline().startswith(b"data: {")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.stderr is not None
    assert any("waiting up to 300 s for 1 requests; again to stop now" in line for line in server.process.stderr)
    server.process.send_signal(signal.SIGINT)
    *_, error, _, done, _, _ = stream.read().split(b"\n")
    assert (b"server_shutdown" in error, done) == (True, b"data: [DONE]")
    status, _, err = finish(server.process)
    assert (status, "Traceback" in err, "ERROR" in err) == (0, False, False), err
    assert file.exists()
    assert re.search(rf"recorded +file=.*{file.name} iterations=\d+", err), err


def test_engine_death_ends_the_process_with_3(folder: Path) -> None:
    """The open request is told before the process goes."""
    code = (
        "import sys\nfrom engine.control.scheduler import Scheduler\nfrom server import cli\n"
        "def commit(*_):\n    raise AssertionError('the state is not what it should be')\n"
        "Scheduler.commit = commit\nsys.exit(cli.main(sys.argv[1:]))"
    )
    server = Running("--model", str(folder), program=["-c", code])
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/v1/completions", {"prompt": "hi"})
    assert refused.value.code == 503
    assert json.load(refused.value)["error"]["code"] == "engine_dead"
    status, _, err = finish(server.process)
    assert status == 3
    assert "the engine loop failed" in err


def test_a_variable_that_belongs_to_no_option_is_named_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_MAX_NUM_SEQ", "5")
    monkeypatch.setenv("LOCKSTEP_APIKEY", "secret")
    monkeypatch.setenv("LOCKSTEP_MAX_NUM_SEQS", "5")
    status, _, err = in_process(capsys, "--dry-run")
    assert status == 0
    assert err == "warning: no option belongs to LOCKSTEP_APIKEY, LOCKSTEP_MAX_NUM_SEQ\n"


@pytest.mark.parametrize("value", ["None", "'13.0'"])
def test_a_dry_run_for_cuda_says_whether_torch_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__all__ = ['cuda']\ncuda: Optional[str] = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    status, _, err = in_process(capsys, "--dry-run", "--device", "cuda")
    assert status == 0
    assert ("built without CUDA" in err) == (value == "None")
    assert in_process(capsys, "--dry-run", "--device", "cpu")[2] == ""
