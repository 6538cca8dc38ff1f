"""A whole offline bench on a tiny model, without peers: files, workers, table, document, picture; and its parts alone."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from rich.console import Console

from engine import Engine
from engine.config import EngineConfig
from engine.loading import load_model
from engine.loading.synthetic import synthetic_config
from engine.native.runner import library
from server.bench.cli import main
from server.bench.offline import drive_own, limits, models, quality, report, shares, steps, table
from server.bench.offline.contestants import own
from server.bench.offline.drive import Request
from server.bench.offline.drive_ctranslate2 import read_safetensors
from server.bench.offline.limits import Limits
from tests.models import write_gguf

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 2048}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    write_gguf(path, "llama", **SHAPE)
    return path


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    config = EngineConfig(model=str(tiny), threads=1, num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=64)
    return Engine.from_config(config)


@pytest.mark.timeout(600)
def test_the_whole_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = {
        "single": [{"prompt": list(range(3, 11)), "gen": 6}],
        "shared16": [{"prompt": [*range(3, 35), 40 + at], "gen": 3} for at in range(2)],
    }
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = [
        "--offline",
        "--no-peers",
        "--no-limits",
        "--model",
        str(tiny),
        "--peers",
        str(tmp_path),
        "--threads",
        "1",
    ]
    options += ["--file", str(tmp_path / "lists.json"), "--repeats", "1", "--json", str(out), "--plot", str(picture)]
    options += ["--only", "shipped", "--only", "F32"]
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert "WITHOUT PEERS" in " ".join(shown.split())
    document = json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]] == ["lockstep, as shipped", "lockstep, F32"]
    assert document["rows"][0]["cells"]["decode_tok_s"] > 0
    assert document["rows"][0]["cells"]["shared16_cold_tok_s"] > 0
    assert document["rows"][0]["cells"]["prefill_tok_s"] is None
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(("option", "name"), [("--plot", "a.text"), ("--plot", "no/a.png"), ("--json", "no/a.json")])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    option: str, name: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / name
    assert main(["--offline", "--no-peers", "--model", str(tiny), "--peers", str(tmp_path), option, str(place)]) == 2
    said = capsys.readouterr()
    assert f"error: {option} is {place}, but" in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_int8_takes_part_where_there_is_something_to_round(tiny: Path, tmp_path: Path) -> None:
    small = write_gguf(tmp_path / "small.gguf", "llama", "Q8_0", **SHAPE)
    assert models.quantised(small)
    assert not models.quantised(tiny)
    names = [[one.name for one in own(models.files_of(tiny, tmp_path), 1, int8=int8)] for int8 in (True, False)]
    assert [table.INT8 in found for found in names] == [True, False]


def test_a_run_gives_everybody_their_tokens(engine: Engine) -> None:
    asked = [Request([1, 2, 3, 4], 5), Request([9, 8, 7], 3)]
    reading = drive_own.run(engine, asked)
    assert [len(tokens) for tokens in reading.tokens] == [5, 3]
    assert 0 < reading.first < reading.last <= reading.wall
    assert drive_own.run(engine, asked[1:]).tokens == reading.tokens[1:]


def test_without_hits_nothing_is_taken_from_the_prefix_cache(engine: Engine) -> None:
    asked = [Request(list(range(5, 45)), 2)]
    drive_own.run(engine, asked)
    before = engine.counters.prefix_hit_tokens
    drive_own.run(engine, asked, hits=False)
    assert engine.counters.prefix_hit_tokens == before
    drive_own.run(engine, asked)
    assert engine.counters.prefix_hit_tokens > before


def test_scores_are_those_of_the_prompt(engine: Engine) -> None:
    ids = [5, 17, 90, 4, 3]
    logprobs, best = drive_own.score(engine, ids)
    assert len(logprobs) == len(best) == 4
    assert all(value < 0 for value in logprobs)
    (made,) = drive_own.run(engine, [Request(ids[:2], 1)]).tokens
    assert made == [best[1]], "the most likely token in the third place is what greedy decoding puts there"


def test_quality_compares_perplexity_and_best_tokens() -> None:
    ours, theirs = quality.Scored([-1.0, -2.0, -3.0], [4, 5, 6]), quality.Scored([-1.0, -2.0, -3.3], [4, 5, 7])
    told = quality.compare("Q8_0", ours, theirs)
    assert told.agreement == pytest.approx(2 / 3)
    assert told.difference == pytest.approx(np.exp(-0.1) - 1)
    assert quality.agreeing([1, 2, 3], [1, 2, 4]) == 2
    assert len(quality.text()) > 4000


def test_model_files_hold_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    files = models.prepare(models.files_of(tiny, tmp_path), said.append)
    assert len(said) == 6
    models.prepare(files, said.append)
    assert len(said) == 6, "made once"
    shipped, plain, small = (load_model(path).source for path in (tiny, files.gguf("F32"), files.gguf("Q8_0")))
    folder = read_safetensors(files.hf / "model.safetensors", np)
    for name in shipped:
        assert (plain.load(name) == shipped.load(name)).all()
        assert np.array_equal(folder[name], shipped.load(name).numpy())
        assert np.allclose(small.load(name), shipped.load(name), atol=0.05)
    assert small.stored("model.layers.0.mlp.up_proj.weight").type == "Q8_0"
    assert load_model(files.hf).config == load_model(tiny).config
    (files.folder / ".q8_0.gguf.made").unlink()
    models.prepare(files, said.append)
    assert said[6:] == ["making q8_0.gguf of tiny.gguf"], "what an interrupted run left is made again"


def test_decode_steps_are_measured_with_everybody_decoding(engine: Engine) -> None:
    time = steps.decode(engine, 3, 24, 6)
    assert (time.rows, time.context) == (3, 24)
    assert 0 < time.execute <= time.wall
    assert time.host > 0
    with pytest.raises(RuntimeError, match="never decoded together"):
        steps.decode(engine, 5, 24, 6)  # of four rows
    lengths = [tokens for tokens, _ in steps.prefill(engine, 150)]
    assert lengths == [64, 128, 150]


def test_shares_are_of_the_least_work() -> None:
    config = synthetic_config("llama", num_layers=1, vocab_size=512)
    least = steps.work(config, 1_000_000, 128.0, 10)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 10 * 64
    assert least.flops == 2 * (layer + 512 * 64)
    machine = limits.Limits(1, 100.0, {1_000_000: 10.0, 5_000_000: 2.0})
    head = {"weight_bytes": 1_000_000, "kv_bytes_per_token": 128.0, "config": attrs.asdict(config)}
    times = [steps.StepTime(1, 10, 2e-4, 0.0, 0.0), steps.StepTime(16, 10, 1e-3, 0.0, 0.0)]
    share = shares.share_of("F32", head, times, machine)
    assert share.shares[1] == pytest.approx((1_000_000 + 1280) / 10e9 / 2e-4)
    assert share.shares[16] == pytest.approx(16 * least.flops / 100e9 / 1e-3)


def test_a_share_above_the_limit_is_flagged() -> None:
    """A step cannot be faster than the machine: such a share says that the limit was measured too low."""
    machine = limits.Limits(2, 100.0, {1_000_000: 10.0})
    times = {1: 1e-3, 16: 2e-3}
    for reached, flagged in ((1.45, True), (1.0, False)):
        share = shares.Share("F32", 1.0, times, {1: 0.5, 16: reached})
        assert share.impossible == ((16,) if flagged else ())
        assert shares.plain(machine, [share])["shares"][0]["above_limit"] == ([16] if flagged else [])
        told = io.StringIO()
        report.show_shares(Console(file=told, width=200), machine, [share])
        assert ("(!) more than the limit" in told.getvalue()) == flagged


def test_the_machine_has_limits(tmp_path: Path) -> None:
    found = limits.measure_limits(limits.compiled(tmp_path), 1, [1_000_000])
    assert found.gflop_s > 0
    assert found.read(900_000) > 0
    assert (found.tile_gflop_s > 0) == library().tiles


def test_of_several_readings_the_fastest_is_the_limit() -> None:
    """Whatever disturbs one of them; and a size may be read as fast as any larger one."""
    calm, busy = limits.Limits(1, 5.0, {8: 1.0, 9: 4.0}, 7.0), limits.Limits(1, 4.0, {8: 2.0, 10: 3.0}, 8.0)
    assert limits.best_of([calm, busy]) == limits.best_of([busy, calm, busy])
    both = limits.best_of([calm, busy])
    assert both == limits.Limits(1, 5.0, {8: 2.0, 9: 4.0, 10: 3.0}, 8.0)
    assert [both.read(size) for size in (7, 8, 9, 10, 11, 2**40)] == [4.0, 4.0, 4.0, 3.0, 3.0, 3.0]
    assert both.multiply(tiles=False) == both.multiply(tiles=True) == 5.0
    assert limits.Limits(1, 5.0, {}, 60.0).multiply(tiles=True) == 20.0, "three products of bf16 make one of fp32"


def test_limits_are_read_around_the_steps(engine: Engine, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process that steps says, in its order; the chooser sees all readings, wherever they stand."""
    config = attrs.asdict(engine.model.config)
    head = {"weight_bytes": 1_000_000, "kv_bytes_per_token": 128.0, "config": config, "on_tiles": False}
    rates = itertools.cycle([10.0, 30.0, 20.0])

    def told(settings: object, *, decode: object, limits: Path) -> Iterator[dict[str, Any]]:
        assert limits.exists()
        yield json.loads(json.dumps(head))
        for _ in range(2):
            yield json.loads(json.dumps({"limits": attrs.asdict(Limits(1, 9.0, {1_000_000: next(rates)}))}))
            yield {"decode": attrs.asdict(steps.StepTime(1, 10, 1.001280e6 / 25e9, 0.0, 0.0))}
        yield json.loads(json.dumps({"limits": attrs.asdict(Limits(1, 8.0, {1_000_000: next(rates)}))}))

    monkeypatch.setattr(shares, "measured", told)
    machine, found = shares.shares(models.files_of(tiny, tiny.parent), 1, lambda text: None)
    assert machine == Limits(1, 9.0, {1_000_000: 30.0})
    assert not any(share.impossible for share in found)
    monkeypatch.setattr(shares, "best_of", lambda readings: list(readings)[-1])  # one reading only, as it once was
    machine, found = shares.shares(models.files_of(tiny, tiny.parent), 1, lambda text: None)
    assert machine.read(10) == 20.0
    assert all(share.impossible == (1,) for share in found)


def test_steps_tell_limits_before_and_after_each_point(tiny: Path, tmp_path: Path) -> None:
    program = tmp_path / "limits"
    program.write_text('#!/bin/sh\necho "{\\"gflop_s\\": $1, \\"tile_gflop_s\\": 0, \\"read_gb_s\\": [$2]}"\n')
    program.chmod(0o755)
    settings = {"model": str(tiny), "threads": 1, "compute": "native"}
    lines = list(shares.measured(settings, decode=[(1, 24, 4), (2, 24, 4)], limits=program))
    assert [next(iter(line)) for line in lines] == ["weight_bytes", *["limits", "decode"] * 2, "limits"]
    assert lines[0]["on_tiles"] == library().tiles
    size = lines[0]["weight_bytes"]
    assert shares.limits_of(lines[1]["limits"]) == Limits(1, 1.0, {size: float(size)})
