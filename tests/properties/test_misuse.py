"""What cannot be meant is told in one sentence with exit status 2, and nothing is overwritten; the catalogue can be listed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import properties
from engine.config import ConfigError, EngineConfig
from engine.trace import MAX_TOTAL, MOST_GRAPHS, FormatError, Shape, Submit, Workload, dumps, loads, save
from properties.__main__ import main
from properties.cli import parser
from properties.faults import CATALOGUE
from properties.rungs import Unavailable
from properties.trial import Trial

ROOT = Path(properties.__file__).parent.parent
ONE = Workload(Shape(4, 2, 2), (Submit(0, (("a", 1),), 2),))
SLOTS = "properties.examples.slots:make"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    path = tmp_path / "one.json"
    save(ONE, path)
    return path


def refused(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """The one line that a refused command says."""
    try:
        status: Any = main(shlex.split(command))
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (2, "", 1), said
    return said.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"replay FILE --subject {SLOTS} --arm A05", "but --arm are of our engine"),
        (f"shrink FILE --subject {SLOTS} --rung rows --arm A05", "--arm and --rung are of our engine"),
        (f"hunt --subject {SLOTS} --rung rows", "--rung"),
        ("replay FILE --html FILE", "--html is .*one.json, but that is where the workload is"),
        ("show FILE --perfetto FILE", "--perfetto is .*one.json, but that is where the workload is"),
        ("shrink FILE --output FILE", "--output is .*one.json, but that is where the workload is"),
        ("replay FILE --html DIR/x --perfetto DIR/no/../x", "--perfetto is .*x, but that is where --html is"),
        ("replay FILE --html DIR/none/x", "no folder .*none"),
        ("shrink FILE --output DIR/none/x", "no folder .*none"),
        ("replay FILE --html DIR", "that is a folder"),
        ("hunt --minutes 1e9", "above 0 and below 1000000"),
        ("replay FILE --arm NOPE", "there is no fault 'NOPE'.*faults --list"),
        ("replay FILE --arm A5", "did you mean A05"),
        ("laws --arm A5", "did you mean A05"),
        ("matrix --only A5", "did you mean A05"),
        ("laws --model /nonexistent", "--model: /nonexistent: no such file or folder"),
        ("replay FILE --subject os:getcwd", "'os:getcwd' is no function of a shape"),
        ("replay FILE --subject builtins:str", "make returns a str, which is no subject"),
    ],
)
def test_a_misuse_is_one_sentence(
    capsys: pytest.CaptureFixture[str], one: Path, tmp_path: Path, command: str, words: str
) -> None:
    before = one.read_bytes()
    (tmp_path / "no").mkdir()
    said = refused(capsys, command.replace("FILE", str(one)).replace("DIR", str(tmp_path)))
    assert re.search(words, said)
    assert len(said) < 400
    assert one.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["no", "one.json"]


def test_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CATALOGUE)
    for line, fault in zip(lines, CATALOGUE.values(), strict=True):
        assert line.split()[1] == fault.rung
        assert fault.area in line
        assert line.endswith(fault.title)
    assert main(["faults", "--list", "--only", "A05", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["id"], entry["rung"]) == ("A05", "ledger")


def test_a_number_of_too_many_digits_is_a_format_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = dumps(ONE).replace('"blocks": 4', '"blocks": ' + "9" * 6000)
    with pytest.raises(FormatError, match="this is not JSON"):
        loads(text)
    with pytest.raises(FormatError, match="the key 'format' stands twice"):
        loads(dumps(ONE).replace("{", '{"format": 1, ', 1))
    (tmp_path / "long.json").write_text(text)
    assert "long.json: this is not JSON" in refused(capsys, f"replay {tmp_path}/long.json")


@pytest.mark.parametrize("rung", ["rows", "tiny", "native"])
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"blocks": MAX_TOTAL}, r"blocks \* block_size is 2097152"),
        ({"block_size": MAX_TOTAL}, r"blocks \* block_size is 4194304"),
        ({"rows": MAX_TOTAL, "budget": MAX_TOTAL}, "rows is 1048576"),
        ({"capture_rows": (MAX_TOTAL,)}, "rows is 1048576"),
        ({"rows": 64, "capture_widths": (MAX_TOTAL,)}, "rows .* blocks of the longest request is 67108864"),
        (
            {"capture_rows": tuple(range(1, 66)), "capture_widths": tuple(range(1, 65))},
            "capture_rows x capture_widths is 4160, but at most 4096 fit",
        ),
    ],
)
def test_a_rung_says_what_it_cannot_hold(rung: str, sizes: dict[str, Any], words: str) -> None:
    shape = Shape(**{"blocks": 4, "block_size": 2, "rows": 2, **sizes})
    with pytest.raises(Unavailable, match=f"the rung {rung} cannot hold this shape: {words}"):
        Trial(rung).run(Workload(shape, ONE.events))


def test_more_graphs_than_a_server_may_record_are_refused_before_they_are_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file of a megabyte would otherwise be a list of ten thousand million pairs."""
    listed = ", ".join(str(number) for number in range(1, 10**5 + 1))
    path = tmp_path / "graphs.json"
    path.write_text(dumps(ONE).replace('"capture_rows": []', f'"capture_rows": [{listed}]'), encoding="utf-8")
    assert main(["replay", str(path)]) == 0  # without widths there are none
    capsys.readouterr()
    text = path.read_text(encoding="utf-8").replace('"capture_widths": []', f'"capture_widths": [{listed}]')
    path.write_text(text, encoding="utf-8")
    said = refused(capsys, f"replay {path}")
    assert "shape.capture_rows x shape.capture_widths is 100000 x 100000, which makes 10000000000 graphs" in said
    assert f"but at most {MOST_GRAPHS} are allowed" in said
    side = tuple(range(1, 2**8 + 1))
    assert len(Shape(4, 2, 2, capture_rows=side, capture_widths=side).captures) == MOST_GRAPHS
    with pytest.raises(FormatError, match=r"is 257 x 256, which makes 65792 graphs"):
        Shape(4, 2, 2, capture_rows=(*side, 300), capture_widths=side)
    assert EngineConfig(max_captures=MOST_GRAPHS).max_captures == MOST_GRAPHS
    with pytest.raises(ConfigError):
        EngineConfig(max_captures=MOST_GRAPHS + 1)


def test_the_ledger_holds_the_largest_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "wide.json"
    save(Workload(Shape(4, MAX_TOTAL, MAX_TOTAL, budget=MAX_TOTAL), ONE.events), path)
    assert main(["replay", str(path)]) == 0
    capsys.readouterr()
    assert "cannot hold this shape" in refused(capsys, f"replay {path} --rung rows")


def test_a_page_has_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Processes differ in how they hash text."""
    file = ROOT / "properties" / "regress" / "A05-the-published-leak.json"
    made = []
    for seed in ("1", "2", "3"):
        out = tmp_path / "run.html", tmp_path / "run.trace"
        command = [
            sys.executable,
            "-m",
            "properties",
            "show",
            str(file),
            "--html",
            str(out[0]),
            "--perfetto",
            str(out[1]),
        ]
        subprocess.run(
            command,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        made.append(tuple(path.read_bytes() for path in out))
    assert len(set(made)) == 1


@pytest.mark.parametrize("command", ["matrix", "faults", "graph-faults"])
def test_names_stand_behind_only_with_spaces_or_commas(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for spelled in (["G02", "N01"], ["G02,N01"], ["G02,", "N01"]):
        assert parser().parse_args([command, "--only", *spelled]).only == ["G02", "N01"]
    for wrong in (["G02,G2"], [","]):
        with pytest.raises(SystemExit):
            parser().parse_args([command, "--only", *wrong])
        assert "argument --only: " in capsys.readouterr().err


def test_laws_are_named_alike(capsys: pytest.CaptureFixture[str]) -> None:
    for spelled in (["restart", "block size"], ["restart,block size"]):
        assert parser().parse_args(["laws", "--only", *spelled]).only == ["restart", "block size"]
    with pytest.raises(SystemExit):
        parser().parse_args(["laws", "--only", "gravity"])
    assert "there is no law 'gravity'; there are" in capsys.readouterr().err
