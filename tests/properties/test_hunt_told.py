"""What the hunter says before it starts and after it failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.trace import Shape, Submit, Workload
from properties import commands
from properties.__main__ import main
from properties.checks import Finding
from properties.floors import Floors
from properties.hunt import Find, Hunted

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
