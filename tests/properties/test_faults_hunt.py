"""Every fault is found in a minute, shrunk to a few lines and replayed: the stored table, a sample of it again, and all of it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from unittest.mock import patch

import attrs
import pytest

from engine.control.blocks import BlockPool
from engine.trace import load
from properties import fault_table, faults
from properties.fault_table import MEDIAN_EVENTS, MOST_EVENTS, Line, complaints, hunt_each, hunt_one, page, stored
from properties.faults import CATALOGUE

STORED = Path(__file__).parents[2] / "ci" / "faults.json"


def sampled(count: int = 3) -> list[str]:
    return random.Random(os.environ.get("LOCKSTEP_SAMPLE", "1")).sample(
        sorted(fault.id for fault in CATALOGUE.values() if fault.rung == "ledger"), count
    )


def test_the_stored_table_holds_for_every_fault() -> None:
    lines = stored(STORED)
    assert {line.fault for line in lines} == set(CATALOGUE)
    assert complaints(lines) == []
    assert STORED.with_suffix(".md").read_text(encoding="utf-8") == page(lines)


@pytest.mark.parametrize("fault", sampled())
def test_a_fault_is_found_shrunk_saved_and_replayed(fault: str, tmp_path: Path) -> None:
    line = hunt_one(fault, tmp_path, seed=int(os.environ.get("LOCKSTEP_SAMPLE", "1")))
    assert line.complaints() == []
    saved = load(tmp_path / f"{fault}.json")
    assert (saved.fault, len(saved.events)) == (fault, line.events)


def test_a_fault_that_does_nothing_is_not_found(tmp_path: Path) -> None:
    harmless = attrs.evolve(CATALOGUE["A05"], change=lambda: (BlockPool, "release", BlockPool.release))
    with patch.dict(faults.CATALOGUE, {"A05": harmless}):
        line = hunt_one("A05", tmp_path, seconds=0.5)
    assert line.events is None
    assert line.complaints()[0].startswith("A05 was not found in ")
    assert not list(tmp_path.iterdir())


def test_the_table_can_fail() -> None:
    good = Line("A05", "ledger", "", 0.1, 3, events=3, check="audit", iteration=1, exit=1, replay=0.4)
    long, held = attrs.evolve(good, events=MOST_EVENTS + 1), attrs.evolve(good, exit=0)
    assert complaints([good]) == []
    assert complaints([held]) == ["A05: the replay of its file exits 0, not 1"]
    assert complaints([long])[0] == "A05: its file has 9 events, but at most 8 are allowed"
    assert "events in the middle" in complaints([attrs.evolve(good, events=MEDIAN_EVENTS + 1)])[0]


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_every_fault_is_found_again(tmp_path: Path) -> None:
    assert complaints(list(hunt_each(CATALOGUE, tmp_path))) == []
    assert fault_table.summary(stored(STORED))
