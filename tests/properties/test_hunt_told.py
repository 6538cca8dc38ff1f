"""What the hunter says before it starts and after it failed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.trace import Shape, Submit, Workload
from properties import commands, workers
from properties.__main__ import main
from properties.checks import Finding
from properties.floors import Floors
from properties.hunt import Find, Hunted, hunt, numbered
from properties.plural import several

ONE = Workload(Shape(blocks=8, block_size=4, rows=2), (Submit(wait=0, prompt=(("a", 6),), max_tokens=3),))


@pytest.mark.parametrize("command", ["hunt --minutes 60 --jobs 1", "scope --jobs 1"])
def test_a_folder_that_cannot_be_written_is_told_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "deeper" / "still"):
        assert main([*command.split(), "--found", str(folder)]) == 2
        assert capsys.readouterr() == ("", f"properties: {file}: Not a directory\n")


def test_a_folder_without_the_right_to_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("properties.finds.os.access", lambda path, mode: False)  # who is root may write anywhere
    assert main(["hunt", "--found", str(tmp_path / "new")]) == 2
    assert capsys.readouterr() == ("", f"properties: {tmp_path}: Permission denied\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("failed", [False, True])
def test_floors_are_judged_only_when_nothing_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    floors = Floors()
    floors.runs = 300
    finds = [Find(7, ONE, Finding("raises", 1, "broken"))] if failed else []
    monkeypatch.setattr(commands, "hunt", lambda *_, **__: Hunted(1, 10, floors, finds))
    arguments = ["hunt", "--seed", "1", "--found", str(tmp_path)]
    assert main(arguments) == 1
    assert ("FLOOR MISSED preempted" in capsys.readouterr().out) == (not failed)
    assert main([*arguments, "--json"]) == 1
    assert bool(json.loads(capsys.readouterr().out)["floors_missed"]) == (not failed)


class Inline:
    """A pool of this process alone, in which the ``at``-th batch brings ``end``."""

    def __init__(self, at: int, end: BaseException) -> None:
        self.at, self.end, self.count = at, end, 0

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self.count += 1
        if self.count == self.at:
            raise self.end
        future: Future[Any] = Future()
        future.set_result(call(*arguments))
        return future


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "properties: interrupted\n"),
        (workers.Terminated(143), 143, "properties: terminated\n"),
    ],
)
@pytest.mark.parametrize("arm", [None, "A03"])
def test_a_hunt_that_is_ended_says_what_ran_and_what_it_found(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: BaseException,
    status: int,
    said: str,
    arm: str | None,
) -> None:
    """What it found is kept, and that is the exit status; without a find, nothing was proven either."""
    monkeypatch.setattr("properties.hunt.BATCH", 20)
    monkeypatch.setattr("properties.hunt.SHRINKING", 0.0)
    command = ["hunt", "--seed", "1", "--jobs", "1", "--found", str(tmp_path), *(["--arm", arm] if arm else [])]
    monkeypatch.setattr(workers, "pool", lambda jobs: nullcontext(Inline(4, end)))
    assert main(command) == (1 if arm else status)
    out, err = capsys.readouterr()
    ran = re.search(
        r"^seed 1: (\d+) workloads, \d+ iterations, (\d+) kinds? of failure, ended before its time$", out, re.MULTILINE
    )
    assert ran is not None
    assert int(ran[1]) >= 20
    assert int(ran[2]) == len(list(tmp_path.iterdir())) == (err != said)
    monkeypatch.setattr(workers, "pool", lambda jobs: nullcontext(Inline(4, end)))
    assert main([*command, "--json"]) == (1 if arm else status)
    told = json.loads(capsys.readouterr().out)
    assert (told["holds"], told["ended_early"], len(told["finds"])) == (False, True, bool(arm))


def test_an_interrupt_while_shrinking_leaves_what_is_smallest_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def shrink(workload: Workload, fails: Callable[[Workload], bool]) -> None:
        tries.append(fails(replace(workload, events=workload.events[:-1])))
        raise KeyboardInterrupt

    monkeypatch.setattr("properties.hunt.shrink", shrink)
    monkeypatch.setattr("properties.hunt.BATCH", 20)
    monkeypatch.setattr(workers, "pool", lambda jobs: nullcontext(Inline(9, KeyboardInterrupt())))
    hunted = hunt(10, seed=1, fault="A03")
    (find,) = hunted.finds
    assert isinstance(hunted.ended, KeyboardInterrupt)
    whole = numbered(1, find.number)
    assert tries == [True]
    assert find.workload.events == whole.events[:-1]


@pytest.mark.parametrize(("count", "words"), [(0, "0 tries"), (1, "1 try"), (2, "2 tries")])
def test_one_is_not_several(count: int, words: str) -> None:
    assert several(count, "try", "tries") == words
    assert several(count, "kind") == f"{count} kind{'' if count == 1 else 's'}"
