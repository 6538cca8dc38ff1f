"""The command that says where the engine's thread spends a step: its parts are exclusive, add up, and name what grew."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ci.hosttime import PARTS, HostTime, Stopwatch, attach, measure, table
from engine.build import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading.synthetic import synthetic_model

STEPS = 12


def small_engine() -> Engine:
    config = EngineConfig(device="cpu", compute="native", threads=1, num_kv_blocks=64, max_num_seqs=4)
    return assemble(config, synthetic_model())


def test_every_part_of_a_step_is_measured() -> None:
    engine = small_engine()
    watch = attach(engine)
    found = [measure(engine, watch, rows, steps=STEPS) for rows in (1, 4)]
    for one in found:
        assert set(one.parts) == set(PARTS)
        assert all(value > 0 for value in one.parts.values())
        assert one.outside == pytest.approx(sum(one.parts.values()) - one.parts["native"])
    assert [one.rows for one in found] == [1, 4]
    assert table(found).count("\n") == 3
    assert table(found).splitlines()[-1].startswith("| 4 | ")


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("part", ["schedule", "copies", "sample", "commit"])
def test_what_became_slow_is_named(part: str) -> None:
    engine: Any = small_engine()
    owner, name = {
        "schedule": (engine.scheduler, "_compact"),
        "copies": (engine.runner.inputs, "go_on"),
        "sample": (engine.runner.sampler, "_draw_rows"),
        "commit": (engine.scheduler, "_publish"),
    }[part]
    inner = getattr(owner, name)
    setattr(owner, name, lambda *arguments: (burn(0.004), inner(*arguments))[1])
    watch = attach(engine)
    parts = measure(engine, watch, 2, steps=STEPS).parts
    assert parts[part] >= 4.0
    assert max(parts, key=lambda key: parts[key]) == part


def test_a_step_that_did_something_else_is_not_counted() -> None:
    engine = small_engine()
    with pytest.raises(RuntimeError, match="only 0 of 12 steps decoded 5 rows"):
        measure(engine, attach(engine), 5, steps=STEPS)  # the engine has four


def test_parts_are_exclusive() -> None:
    watch = Stopwatch()
    with watch.part("rest"):
        burn(0.002)
        with watch.part("sample"):
            burn(0.006)
    assert 0.006 <= watch.spent["sample"] < 0.006 + watch.spent["rest"]
    assert HostTime(1, dict(watch.spent)).outside == sum(watch.spent.values())
