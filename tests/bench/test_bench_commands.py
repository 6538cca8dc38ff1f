"""The commands in ci/ that measure a large random model and how cost grows: whole runs, on small shapes, told as they go."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from ci import bench_big, bench_growth
from engine.loading import load_model
from server.bench.offline import table
from server.bench.requests import Ask
from tests.models import write_gguf

TINY = attrs.evolve(
    bench_big.SHAPE, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
LISTS = {"single": [Ask(tuple(range(3, 11)), 6)]}


def test_the_large_model_has_the_size_that_is_told() -> None:
    assert bench_big.parameters(bench_big.SHAPE) == pytest.approx(1.07e9, rel=0.01)


@pytest.mark.timeout(600)
def test_a_random_model_is_made_once_and_measured(tmp_path: Path) -> None:
    said: list[str] = []
    options = {"repeats": 1, "threads": 1, "peers": tmp_path}
    rows = bench_big.measured(TINY, LISTS, said.append, minutes=8, **options)
    assert [row.name for row in rows] == ["lockstep, as shipped"]
    assert table.failures(rows, LISTS) == []
    assert [text.split(":")[0].split(" of ")[0] for text in said] == [
        "making q4_0.gguf",
        "llama.cpp is not installed (`make peers`)",
        "starting lockstep, as shipped",
        "round 1, single",
    ]
    (path,) = tmp_path.glob("models/*/*.gguf")
    assert load_model(path).config == TINY
    said.clear()
    rows = bench_big.measured(TINY, LISTS, said.append, minutes=1e-9, **options)
    assert not said[0].startswith("making")
    assert "took more than" in table.failures(rows, LISTS)[0]  # a run that is too slow is cut, and told


def test_wrong_options_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_big.main(lists=("nobody",)) == 1
    assert bench_big.main(minutes=0) == 1
    assert capsys.readouterr().out.count("lists are single, ") == 2
    assert bench_growth.main(longest=100) == 1
    assert "longest must be at least 160" in capsys.readouterr().out
    for command in (bench_big.main, bench_growth.main):  # before anything is measured
        assert command(plot_to=Path("picture.text")) == 1
        assert command(plot_to=Path("nowhere/picture.png")) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("--plot is picture.text, but its name must end in one of ") == 2
    assert told.count("--plot is nowhere/picture.png, but there is no folder") == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", max_position_embeddings=512)
    out = tmp_path / "growth.json"
    options = {"model": model, "threads": 1, "rows": 2}
    assert bench_growth.main(longest=256, json_to=out, plot_to=tmp_path / "growth.png", **options) == 0
    told = json.loads(out.read_text())
    assert [one["rows"] for one in told["rows"]] == [1, 2]
    assert [one["context"] for one in told["contexts"]] == [128, 240]
    assert told["prefill"][-1][0] == 224
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [
        "starting an engine for rows",
        "decode, 1 rows at 128",
        "decode, 2 rows at 128",
    ]
    assert bench_growth.main(longest=1024, **options) == 1
    assert "context holds 512" in " ".join(capsys.readouterr().out.split())
