"""The rungs that compute, from the command line: hunt, replay, soak, shrink; and what a machine without CUDA is told."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.trace import Shape, Submit, Workload, load, save
from properties import corpus
from properties import hunt as hunter
from properties.__main__ import main
from properties.hunt import numbered
from properties.lockstep import run
from properties.rungs import RUNGS
from properties.sampled import for_rung, with_sampling
from properties.trial import Trial

SOAK = "soak --prompts 4,4,4,4 --max-tokens 8 --rows 3 --blocks 8 --block-size 4"


def answer(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, Any]:
    status = main(shlex.split(f"{command} --json"))
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("rung", ["rows", "staged", "tiny"])
def test_a_fault_is_hunted_saved_and_replayed_on_its_rung(
    rung: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fault = {"rows": "N04", "staged": "N65", "tiny": "N41"}[rung]
    small = Workload(Shape(blocks=8, block_size=2, rows=2, capture_rows=(1, 2), capture_widths=(6,)), TWO)
    path = tmp_path / "two.json"
    save(small, path)
    status, told = answer(capsys, f"replay {path} --rung {rung} --arm {fault}")
    assert (status, told["holds"]) == (1, False)
    assert told["check"] in ("writes", "tokens")
    assert answer(capsys, f"replay {path} --rung {rung}")[0] == 0
    assert answer(capsys, f"replay {path} --rung ledger --arm {fault}")[0] == 0  # nothing is computed there
    status, told = answer(capsys, f"shrink {path} --rung {rung} --arm {fault} --found {tmp_path}")
    assert status == 1
    assert len(load(Path(told["file"])).events) == 1


TWO = (Submit(0, (("a", 3),), 5), Submit(1, (("b", 4),), 4))


@pytest.mark.parametrize("rung", ["rows", "tiny"])
def test_soak_gives_the_same_table_on_every_rung(rung: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All figures are control's but one: the text is what the rung computed."""
    status, ledger = answer(capsys, SOAK)
    assert status == 0
    status, told = answer(capsys, f"{SOAK} --rung {rung}")
    assert status == 0
    assert {**told, "text": None} == {**ledger, "text": None}
    assert told["text"] != ledger["text"]


def test_the_hunter_s_workloads_say_how_they_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = numbered(3, 4)
    assert for_rung(plain, "ledger") == plain
    warm = for_rung(plain, "rows")
    assert {event.temperature for event in warm.events if isinstance(event, Submit)} > {0.0}
    assert with_sampling(warm) == warm
    monkeypatch.setattr(hunter, "BATCH", 6)
    ran = hunter.batch(3, 0, Trial("rows"))
    assert (ran["failed"], ran["floors"]["runs"]) == ([], 6)
    assert ran["iterations"] > 60


def test_a_replay_on_rows_takes_less_than_a_second_after_imports() -> None:
    saved = max(corpus.workloads().values(), key=lambda workload: len(workload.events))
    run(numbered(0, 0), make_rung=RUNGS["rows"])  # imports
    start = time.process_time()
    assert run(saved, make_rung=RUNGS["rows"]).first is None
    assert time.process_time() - start < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_the_gpu_rung_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    saved = corpus.files()[0]
    assert main(["replay", str(saved), "--rung", "gpu"]) == 2
    assert capsys.readouterr().err == "properties: no CUDA device\n"
