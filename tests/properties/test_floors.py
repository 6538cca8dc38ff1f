"""Coverage floors can fail: on paper, and in a real pytest run with and without xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import properties
from engine.trace import Abort, Event, Shape, Submit, Workload
from properties import generate
from properties.floors import ENOUGH, FLOORS, Boards, Floors, needed
from properties.generate import RandomSource
from properties.lockstep import run

ROOT = Path(properties.__file__).parent.parent
SECTION_2F = (  # the shares that were asked for when the harness was designed
    ("preempted", 0.2),
    ("preempted twice", 0.03),
    ("self-preempted", 0.01),
    ("pool exhausted", 0.25),
    ("aborted while waiting", 0.03),
    ("aborted while prefilling", 0.03),
    ("aborted while decoding", 0.03),
    ("aborted while preempted", 0.03),
    ("refused", 0.02),
    ("chunked", 0.3),
    ("prefix hit", 0.2),
    ("full hit", 0.03),
    ("evicted", 0.05),
    ("replayed", 0.4),
    ("padded", 0.2),
    ("exact replay", 0.05),
    ("scattered", 0.02),
    ("uncaptured", 0.02),
    ("row reused", 0.3),
    ("finished: stop", 0.05),
    ("finished: length", 0.05),
    ("finished: abort", 0.05),
    ("finished: error", 0.05),
    ("failed step", 0.1),
)


def _floors(runs: int, hits: dict[str, int]) -> Floors:
    floors = Floors()
    floors.merge({"runs": runs, "hits": hits})
    return floors


def test_a_run_without_preemption_misses_its_floor() -> None:
    assert _floors(300, {}).missed({"preempted": 0.12}) == ["FLOOR MISSED preempted: 0 of 300 workloads, needs 18"]
    assert _floors(300, {"preempted": 18}).missed({"preempted": 0.12}) == []
    assert len(_floors(20000, {}).missed()) == len(FLOORS)


def test_few_workloads_are_not_judged() -> None:
    assert _floors(ENOUGH - 1, {}).missed() == []
    assert needed(0.005, ENOUGH) == 0  # so rare that its absence says nothing yet


def test_rungs_are_judged_each_alone() -> None:
    boards = Boards()
    boards["ledger"].merge({"runs": 300, "hits": dict.fromkeys(FLOORS, 300)})
    boards["rows"].merge({"runs": 300, "hits": dict.fromkeys(FLOORS, 300) | {"padded": 0}})
    boards["tiny"].merge({"runs": ENOUGH - 1, "hits": {}})
    sent = Boards()
    sent.merge(boards.dump())
    assert sent.missed() == ["FLOOR MISSED padded: 0 of 300 workloads, needs 37 on rows"]


def test_counts_add_up_over_workers() -> None:
    floors = Floors()
    floors.add(Counter({"preempted": 3, "moved": 0}))
    floors.merge(_floors(2, {"preempted": 1}).dump())
    assert floors.runs == 3
    assert floors.hits["preempted"] == 2
    assert floors.hits["moved"] == 0


@cache
def counted(shapes: tuple[str, ...] = generate.SHAPES, spare: int | None = None) -> Floors:
    """What happens in generated workloads, by the specification alone. ``spare``: blocks that every pool has left."""
    floors = Floors()
    for number in range(300):
        drawn = generate.workload(RandomSource(number), shapes)
        if spare is not None:
            drawn = replace(drawn, shape=replace(drawn.shape, blocks=drawn.shape.blocks + spare))
        floors.add(run(drawn, make_rung=None).occurred)
    return floors


def _missed(floors: Floors) -> set[str]:
    return {line.removeprefix("FLOOR MISSED ").split(":")[0] for line in floors.missed()}


def test_the_generator_reaches_every_floor() -> None:
    assert _missed(counted()) == set()


def test_a_generator_whose_pools_are_never_tight_misses_floors() -> None:
    assert {"preempted", "pool exhausted", "evicted", "resumed"} <= _missed(counted(spare=500))


@pytest.mark.parametrize(("kept", "lost"), [("crowd", "refused"), ("family", "self-preempted"), ("churn", "resumed")])
def test_a_generator_that_draws_one_shape_alone_misses_floors(kept: str, lost: str) -> None:
    assert lost in _missed(counted((kept,)))


@pytest.mark.parametrize(("name", "shares"), SECTION_2F)
def test_the_generator_reaches_the_shares_that_were_promised(name: str, shares: float) -> None:
    floors = counted()
    assert FLOORS.get(name, 1.0) >= shares, "the floor itself is at least what was promised"
    assert floors.hits[name] / floors.runs >= shares


def _occurred(shape: Shape, *events: Event) -> Counter[str]:
    return +run(Workload(shape, events)).occurred


def test_what_happened_is_told_by_its_name() -> None:
    two = Submit(0, (("a", 1),), 2, n=2)
    other = _occurred(Shape(2, 1, 2), two)
    assert (other["preempted"], other["self-preempted"], other["resumed"]) == (1, 0, 1)
    itself = _occurred(Shape(3, 1, 2), two)
    assert (itself["preempted"], itself["self-preempted"], itself["resumed"]) == (1, 1, 1)
    aborted = _occurred(Shape(2, 1, 2), two, Abort(2, 1))
    assert aborted["aborted while preempted"] == 1
    waived = _occurred(Shape(4, 1, 2, watermark=2), Submit(0, (("a", 3),), 1))
    assert waived["watermark waived"] == 1
    delayed = _occurred(Shape(4, 1, 2, watermark=2), Submit(0, (("a", 2),), 1, n=2))
    assert delayed["watermark delayed"] == 1
    # r2 finishes its prefill in row 2 while r3 starts in row 1: the next decode step wants r2 in row 1.
    lengths = ((1, 2), (1, 9), (5, 3), (6, 1))
    swapped = _occurred(Shape(9, 4, 3, budget=4), *(Submit(0, (("a", prompt),), most) for prompt, most in lengths))
    assert (swapped["swapped"], swapped["moved"], swapped["chunked"]) == (1, 1, 4)


@pytest.mark.parametrize(
    ("workers", "failing"), [([], False), (["-n", "2"], False), ([], True)], ids=["alone", "xdist", "after a failure"]
)
def test_a_green_run_that_missed_a_floor_fails(tmp_path: Path, workers: list[str], failing: bool) -> None:
    (tmp_path / "test_dull.py").write_text(
        "import pytest\n"
        "from engine.trace import Shape, Submit, Workload\n"
        "DULL = Workload(Shape(4, 4, 2), (Submit(0, (('a', 1),), 1),))\n"
        "@pytest.mark.parametrize('shard', range(4))\n"
        "def test_dull(shard, harness):\n"
        "    for _ in range(75):\n"
        "        harness.judge(DULL, 'dull')\n" + "def test_wrong():\n    assert False\n" * failing
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "properties.conftest",
        "-p",
        "no:cacheprovider",
        *workers,
        ".",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LOCKSTEP_PROFILE": "dev"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert "4 passed" in done.stdout
    assert "rung ledger: 300 workloads, 600 iterations" in done.stdout
    assert ("FLOOR MISSED preempted: 0 of 300 workloads, needs 37 on ledger" in done.stdout) == (not failing)
    assert ("coverage floors are not judged: tests failed" in done.stdout) == failing
    assert done.returncode == 1
