"""A decode step that goes on from the one before has the inputs that writing them anew would give: byte for byte, on every
step of generated workloads, staged and not. And each condition for going on is needed."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from engine.compute.inputs import StaticInputs
from engine.compute.runner import PlanRunner
from engine.compute.standing import Standing
from engine.control.plan import Plan, Replay
from properties.hunt import numbered
from properties.lockstep import run
from properties.rung_rows import RowsRung, StagedRung
from properties.sampled import with_sampling
from tests.compute.driver import Driver, shared_weights, text

HERE = Standing((4, 8), [0, 1], 3, [5, 7])
NEXT = attrs.evolve(HERE, positions=[6, 8])
WORKLOADS = 30


def test_the_next_step_is_preceded() -> None:
    assert HERE.precedes(NEXT)


@pytest.mark.parametrize(
    "other",
    [
        attrs.evolve(NEXT, shape=(4, 16)),
        attrs.evolve(NEXT, shape=(8, 8)),
        attrs.evolve(NEXT, rows=[0, 2]),
        attrs.evolve(NEXT, epoch=4),
        attrs.evolve(NEXT, positions=[6, 7]),
        attrs.evolve(NEXT, positions=[5, 7]),
        attrs.evolve(NEXT, rows=[0], positions=[6]),
        attrs.evolve(NEXT, rows=[0, 1, 2], positions=[6, 8, 9]),
    ],
)
def test_no_other_step_is(other: Standing) -> None:
    assert not HERE.precedes(other)


def held(inputs: StaticInputs, shape: tuple[int, int]) -> list[list[Any]]:
    """What a step of this shape reads."""
    tokens, tables = inputs.step(*shape)
    return [part.tolist() for part in (tokens.tokens, tokens.positions, tokens.slots, tables)]


@pytest.mark.parametrize("rung", [RowsRung, StagedRung])
def test_what_went_on_is_what_would_be_written_anew(monkeypatch: pytest.MonkeyPatch, rung: type[RowsRung]) -> None:
    go_on, seen = PlanRunner._go_on, {"went on": 0, "entered a block": 0, "padded": 0, "several rows": 0}

    def both(runner: PlanRunner, plan: Plan, now: Standing) -> None:
        go_on(runner, plan, now)
        shown = held(runner.inputs, now.shape)
        runner._fill(plan.decodes, runner.rows.tables[: len(now.rows)], now.shape)
        assert shown == held(runner.inputs, now.shape)
        seen["went on"] += 1
        seen["entered a block"] += bool(plan.grown)
        seen["padded"] += now.shape[0] > len(now.rows)
        seen["several rows"] += len(now.rows) > 1

    monkeypatch.setattr(PlanRunner, "_go_on", both)
    for number in range(WORKLOADS):
        outcome = run(with_sampling(numbered(5, number)), make_rung=rung)
        assert outcome.first is None, outcome.first
    assert min(seen.values()) > 10, seen


def test_nothing_stands_after_a_step_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was written by then, the next step writes all of it."""
    driver = Driver(shared_weights("llama"), rows=2, captures=((2, 40),))
    driver.start({0: text(0, 13)})
    driver.decode({0: (13, 5)}, Replay(2, 40, 1))
    inputs, written = driver.runner.inputs, []
    fill = inputs.fill

    def noted(*arguments: Any) -> None:
        written.append("all")
        fill(*arguments)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("a broken copy")

    with monkeypatch.context() as patched:
        patched.setattr(inputs, "go_on", broken)
        with pytest.raises(RuntimeError, match="a broken copy"):
            driver.decode({0: (14, 6)}, Replay(2, 40, 1))
    monkeypatch.setattr(inputs, "fill", noted)
    driver.decode({0: (14, 6)}, Replay(2, 40, 1))
    assert written == ["all"]
    driver.decode({0: (15, 7)}, Replay(2, 40, 1))
    assert written == ["all"]  # and from there it goes on


def test_going_on_writes_no_more_than_it_says() -> None:
    pool = Driver(shared_weights("llama"), rows=1).runner.pool
    inputs = StaticInputs(4, 4, pool, torch.device("cpu"))
    one = np.array([5])
    inputs.fill({"tokens": one, "positions": one, "slots": one, "tables": np.array([[3, 1, 0, 0]])}, 2, 4)
    trash = [pool.trash_slot, [pool.trash_block] * 4]
    assert held(inputs, (2, 4)) == [[5, 0], [5, 0], [5, trash[0]], [[3, 1, 0, 0], trash[1]]]
    inputs.go_on([9], [6], {}, {}, 2, 4)
    assert held(inputs, (2, 4)) == [[9, 0], [6, 0], [6, trash[0]], [[3, 1, 0, 0], trash[1]]]
    inputs.go_on([9], [8], {0: 40}, {0: np.array([3, 1, 2, 0])}, 2, 4)
    assert held(inputs, (2, 4)) == [[9, 0], [8, 0], [40, trash[0]], [[3, 1, 2, 0], trash[1]]]
