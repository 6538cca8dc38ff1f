"""ci/gpu.sh where there is no GPU, and what it would carry; the table's program runs on a CPU too."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci import gpu_model, gpu_table
from engine.loading import load_model
from server.graphbench.cli import app

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


# What the image of that machine holds, of the packages that ours need.
THERE = frozenset(
    """annotated-doc anyio attrs click h11 idna jinja2 numpy packaging pygments pyyaml regex requests rich safetensors
    setuptools tokenizers torch tqdm transformers triton typing-extensions""".split()  # noqa: SIM905 - twenty quotes less
)


def missing(carried: set[str], there: frozenset[str]) -> set[str]:
    """Packages that the product or a carried package imports and that would be found nowhere on that machine."""
    environment: dict[str, str] = {name: str(value) for name, value in default_environment().items()}
    environment |= {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}

    def needed(lines: list[str]) -> set[str]:
        wanted = [Requirement(line) for line in lines]
        return {canonicalize_name(it.name) for it in wanted if it.marker is None or it.marker.evaluate(environment)}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = needed(project["dependencies"])
    for name in carried:
        try:
            wanted |= needed(requires(name) or [])
        except PackageNotFoundError:
            raise AssertionError(f"{name} is carried, but is not installed here") from None
    return wanted - carried - there


def carried() -> set[str]:
    return set((re.search(r'LACKS="([^"]*)"', SCRIPT.read_text(encoding="utf-8")) or [""])[1].split())


def test_what_is_carried_and_what_is_there_is_all_that_is_imported() -> None:
    """One package less and no server starts there, of which nobody hears before a GPU is lent."""
    assert missing(carried(), THERE) == set()
    for name in carried():
        assert missing(carried() - {name}, THERE) == {name}


def stages() -> list[tuple[int, list[str]]]:
    """Limit in seconds and words of each stage of the script."""
    text = SCRIPT.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if re.match(r"stage \d", line)]
    return [(int(limit), words) for _, limit, *words in lines]


def test_its_stages_end_within_ten_minutes() -> None:
    assert len(stages()) == 5
    assert sum(limit for limit, _ in stages()) <= 540


def test_the_stage_of_gpu_tests_holds_every_such_test() -> None:
    (words,) = [words for _, words in stages() if words[-1].endswith("test_gpu.py")]
    asked = words[words.index("gpu") + 1 :]
    marked = [
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "properties")
        for path in (ROOT / folder).rglob("test_*.py")
        if "mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__).resolve()
    ]
    assert len(marked) >= 4
    assert [path for path in marked if not path.startswith(tuple(asked))] == []


def test_graphbench_is_asked_for_what_it_knows_and_over_a_model_that_is_made_on_the_spot(tmp_path: Path) -> None:
    (words,) = [words for _, words in stages() if words[0] == "sh"]
    made, _, asked = words[2].partition(" && ")
    assert made == '"$0" ci/gpu_model.py "$1"'
    assert (ROOT / "ci/gpu_model.py").is_file()
    _, bound, ignored = app.parse_args(asked.partition("graphbench ")[2], print_error=False, exit_on_error=False)
    assert not ignored
    told = bound.arguments
    passes = 2 * len(told["rates"].split(","))  # both arms, one after the other
    assert passes * told["seconds"] <= 40
    fewest = min(map(float, told["rates"].split(","))) * told["seconds"]
    # A p99 needs 200 samples. No answer is shorter than 8, and of a server that is quicker than its clients several tokens
    # arrive at once.
    assert fewest * 8 > 5 * 200
    assert gpu_model.main([str(tmp_path / "model")], {"max_position_embeddings": 128}) == 0
    assert load_model(str(tmp_path / "model")).config.max_position_embeddings == 128


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
