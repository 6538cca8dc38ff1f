"""The offline table: what a cell is, whom a ratio compares, which aims are met, and when the table fails."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from server.bench.offline import report, table
from server.bench.offline.contestants import NEEDED, OPTIONAL, contestants
from server.bench.offline.models import Files
from server.bench.offline.plot import plot
from server.bench.offline.rounds import COLD, Outcome
from server.bench.offline.worker import Reading
from server.bench.requests import Ask

LISTS = {
    "single": [Ask((1,) * 128, 11)],
    "batch16": [Ask((1,) * 64, 20)] * 4,
    "prefill1024": [Ask((1,) * 1024, 1)],
    "shared16": [Ask((1,) * 544, 10)] * 4,
}


def outcome(
    name: str, peer: str | None, speed: float, *, fp32: bool = True, int8: bool = False, rss: float = 500.0
) -> Outcome:
    """Everything takes 1 / speed as long as with speed 1, where 10 tokens follow the first in 1 s."""

    def reading(first: float, rest: float) -> Reading:
        return Reading((first + rest) / speed, first / speed, (first + rest) / speed, [])

    runs = {
        "single": [reading(0.5, 1.0), reading(0.5, 3.0), reading(0.5, 1.0)],
        "batch16": [reading(1.0, 7.0)],
        "prefill1024": [reading(2.0, 0.0)],
        "shared16": [reading(1.0, 3.0)],
    }
    if peer is None:
        runs[COLD] = [reading(4.0, 8.0)]
    return Outcome(name, peer, fp32, int8, runs, rss=rss)


def outcomes() -> list[Outcome]:
    return [
        outcome(table.SHIPPED, None, 4.0, fp32=False, rss=200.0),
        outcome(table.F32, None, 1.5, rss=700.0),
        outcome("slow, fp32", "transformers", 0.5, rss=900.0),
        outcome("fast, fp32", "openvino", 1.0, rss=1800.0),
        outcome("faster, int8", "openvino", 2.0, fp32=False, int8=True, rss=400.0),
        outcome(table.LLAMA_SHIPPED, "llamacpp", 2.5, fp32=False, rss=300.0),
        outcome(table.INT8, None, 6.0, fp32=False, int8=True, rss=200.0),
    ]


@pytest.fixture
def rows() -> list[table.Row]:
    return table.rows(outcomes(), LISTS)


def test_cells_are_medians_of_what_the_columns_mean(rows: list[table.Row]) -> None:
    assert rows[3].cells == {
        "ttft_ms": 500.0,
        "decode_tok_s": 10.0,  # the run of 3 s is not the median
        "prefill_tok_s": 512.0,
        "batch16_tok_s": 10.0,
        "shared16_tok_s": 10.0,
        "shared16_cold_tok_s": None,
        "rss_mib": 1800.0,
    }


def test_ratios_are_to_the_best_peer_and_above_1_when_better(rows: list[table.Row]) -> None:
    fp32, every = table.ratios(rows), table.ratios(rows, fp32_only=False)
    assert set(fp32) == {table.SHIPPED, table.F32, table.INT8}
    assert fp32[table.F32]["decode_tok_s"] == pytest.approx(1.5)
    assert fp32[table.F32]["ttft_ms"] == pytest.approx(1.5), "a shorter time is better"
    assert fp32[table.F32]["rss_mib"] == pytest.approx(900 / 700), "the smallest fp32 peer counts"
    assert every[table.SHIPPED]["decode_tok_s"] == pytest.approx(4.0 / 2.5)
    assert every[table.SHIPPED]["rss_mib"] == pytest.approx(1.5)
    assert fp32[table.F32]["shared16_cold_tok_s"] is None, "no peer has a number there"


def test_aims_are_judged_by_the_numbers(rows: list[table.Row]) -> None:
    told = {goal.text: goal for goal in table.goals(rows)}
    assert told["1 stream, as shipped, to llama.cpp on the same file"].reached == pytest.approx(1.6)
    assert told["16 sharing 512 tokens, to the same without prefix cache"].reached == pytest.approx(3.0)
    assert told["16 requests, as shipped, to the best peer"].met is True
    assert all(goal.met for goal in told.values())
    slower = table.rows([outcome(table.F32, None, 1.05), *outcomes()[2:]], LISTS)
    judged = {goal.text: goal.met for goal in table.goals(slower)}
    assert judged["1 stream, F32 weights, to the best fp32 peer"] is False
    assert judged["1 stream, as shipped, to the best fp32 peer"] is None


def test_like_is_compared_with_like(rows: list[table.Row]) -> None:
    """Eight bits with eight bits: the faster peer that does not say so is no part of it, whatever its weights are."""
    told = {one.text: one.ratio for one in table.comparisons(rows)}
    assert told == {
        "16 requests, as shipped, to the best fp32 peer": pytest.approx(4.0),
        "prefill of 1024, as shipped, to the best fp32 peer": pytest.approx(4.0),
        "16 requests, int8 activations, to the best 8-bit peer": pytest.approx(3.0),
        "prefill of 1024, int8 activations, to the best 8-bit peer": pytest.approx(3.0),
    }
    assert [one.ratio for one in table.comparisons(rows[:4])] == [pytest.approx(4.0)] * 2 + [None] * 2
    assert [row.label for row in rows[4:]] == ["faster, int8 (8-bit activations)", table.LLAMA_SHIPPED, table.INT8]
    shown = io.StringIO()
    report.show_goals(Console(file=shown, width=120), rows)
    assert "16 requests, int8 activations, to the best 8-bit peer" in shown.getvalue()


def test_who_rounds_activations_says_so(tmp_path: Path) -> None:
    for name in (*NEEDED, *OPTIONAL):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / ".ready").touch()
        (tmp_path / name / "bin" / "python").touch()
    files = Files(tmp_path / "a.gguf", tmp_path)
    for place in (files.hf, files.openvino, files.ct2):
        place.mkdir()
    everybody = contestants(files, tmp_path, 2, with_peers=True, http=True)
    assert [one.name for one in everybody][:4] == [table.SHIPPED, f"{table.SHIPPED}, HTTP", table.INT8, table.F32]
    assert {one.name for one in everybody if one.int8} == {
        table.INT8,
        "OpenVINO GenAI, Q8_0",
        "CTranslate2, int8",
        table.LLAMA_SHIPPED,
    }
    assert not any(one.int8 and one.fp32 for one in everybody)
    assert '"compute": "int8"' in everybody[2].command[-1]


def test_a_contestant_without_numbers_fails_the_table(rows: list[table.Row]) -> None:
    assert table.failures(rows, LISTS) == []
    dead = Outcome("dead", "openvino", True, failure="dead ended: it said nothing")
    assert table.failures(table.rows([dead], LISTS), LISTS) == ["dead was not measured: dead ended: it said nothing"]
    cut = outcome("slow, fp32", "transformers", 0.5)
    cut.runs["batch16"], cut.lost["batch16"] = [], "slow, fp32 took more than 90 s"
    assert table.failures(table.rows([cut], LISTS), LISTS) == [], "a peer that is too slow for a list is no failure"
    ours = outcome(table.F32, None, 1.0)
    ours.lost["batch16"] = "it raised"
    assert table.failures(table.rows([ours], LISTS), LISTS) == [f"{table.F32} was not measured: it raised"]


def test_lists_that_were_not_asked_are_empty_cells() -> None:
    only = {"single": LISTS["single"]}
    one = outcome("fast, fp32", "openvino", 1.0)
    one.runs = {"single": one.runs["single"]}
    (row,) = table.rows([one], only)
    assert row.cells["batch16_tok_s"] is None
    assert table.failures([row], only) == []


def test_the_document_is_json_with_everything_in_it(rows: list[table.Row]) -> None:
    conditions = report.conditions(2, 3, "a.gguf", outcomes())
    document = json.loads(json.dumps(report.document(rows, outcomes(), conditions, quality=[])))
    assert document["format"] == "bench/1"
    expected = {
        "format",
        "conditions",
        "rows",
        "ratios_to_best_fp32_peer",
        "ratios_to_best_peer",
        "goals",
        "comparisons",
    }
    assert set(document) == expected | {"contestants", "quality"}
    assert document["goals"][0] == {
        "text": document["goals"][0]["text"],
        "wanted": 1.0,
        "reached": 900 / 700,
        "met": True,
    }
    assert document["contestants"]["fast, fp32"]["runs"]["prefill1024"] == [
        {"wall": 2.0, "first": 2.0, "last": 2.0, "foreign_cores": 0.0}
    ]
    assert document["conditions"]["foreign_cores_worst"] == 0.0


def test_the_picture_is_drawn_and_a_wrong_ending_is_refused(rows: list[table.Row], tmp_path: Path) -> None:
    plot(rows, tmp_path / "table.png", "a title")
    assert (tmp_path / "table.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="txt"):
        plot(rows, tmp_path / "table.txt", "a title")


@pytest.mark.parametrize(
    ("number", "shown"), [(None, "-"), (float("nan"), "-"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123")]
)
def test_three_figures(number: float | None, shown: str) -> None:
    assert report.short(number) == shown
