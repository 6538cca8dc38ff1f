"""The check ``writes`` has teeth: one cell of the cache changed behind its back, in every way that matters, on both caches.

And the division of labour: what is wrong between plan and kernels is seen on ``rows`` or ``tiny``, and never on ``ledger``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.control.plan import Plan
from engine.trace import Shape, Submit, Workload
from properties import corpus
from properties.checks import Finding
from properties.compute_rung import ComputeRung, Watch
from properties.faults import CATALOGUE, armed
from properties.lockstep import run
from properties.rungs import RUNGS

SHAPE = Shape(
    blocks=6, block_size=2, rows=4, max_model_len=12, capture_rows=(2, 4), capture_widths=(6,), prefix_cache=True
)
WORK = Workload(SHAPE, (Submit(0, (("a", 3),), 5), Submit(1, (("b", 2),), 3)))
BEFORE, AFTER = "before", "after"
FREE, FIRST, TRASH = 5, 0, 6  # blocks: never used, r0's first, the trash block


def tampered(rung: str, iteration: int, tamper: Callable[[Any], None], when: str = AFTER) -> Finding | None:
    """The first finding of ``writes`` alone, when the cache is changed around one forward. The last block is never used."""

    def make(shape: Shape) -> Any:
        made: Any = RUNGS[rung](shape)
        execute = made.runner.execute
        seen = iter(range(1, 1000))

        def around(plan: Plan) -> Any:
            now = next(seen) == iteration
            if now and when == BEFORE:
                tamper(made)
            sampled = execute(plan)
            if now and when == AFTER:
                tamper(made)
            return sampled

        made.runner.execute = around
        return made

    return run(WORK, make_rung=make, checks=frozenset({"writes"})).first


def write(rung: str, block: int, offset: int = 0) -> Callable[[Any], None]:
    def tamper(made: Any) -> None:
        if rung == "rows":
            made.network.pool.rows[block * SHAPE.block_size + offset] = torch.tensor([7, made.network.stamp])
        else:
            made.network.pool.layers[1][0, block, 0, offset, 3] = 0.25

    return tamper


@pytest.mark.parametrize("rung", ["rows", "tiny"])
def test_an_undisturbed_run_writes_what_it_must(rung: str) -> None:
    assert tampered(rung, 2, lambda made: None) is None
    assert run(WORK).occurred["padded"] > 0
    assert run(WORK).occurred["exact replay"] > 0


@pytest.mark.parametrize("rung", ["rows", "tiny"])
@pytest.mark.parametrize(
    ("block", "offset", "said"),
    [(FREE, 1, "block 5 offset 1 differs"), (FIRST, 0, "block 0 offset 0 differs"), (TRASH, 0, "trash block differs")],
)
def test_a_write_that_was_not_scheduled_is_named(rung: str, block: int, offset: int, said: str) -> None:
    """Into a block that nobody owns, into a computed position, into the trash block of a step that pads nothing."""
    iteration = 1  # prefill only
    if block == FIRST:
        iteration = 2
    found = tampered(rung, iteration, write(rung, block, offset))
    assert found is not None
    assert (found.iteration, found.headline) == (iteration, said)


@pytest.mark.parametrize("rung", ["rows", "tiny"])
def test_a_scheduled_cell_that_keeps_what_it_held_is_named(rung: str) -> None:
    kept: list[torch.Tensor] = []

    def cache(made: Any) -> torch.Tensor:
        return made.network.pool.rows[2:3] if rung == "rows" else made.network.pool.layers[1][:, 1, :, 0]

    def make(shape: Shape) -> Any:
        made: Any = RUNGS[rung](shape)
        execute = made.runner.execute

        def around(plan: Plan) -> Any:
            kept.append(cache(made).clone())
            sampled = execute(plan)
            cache(made).copy_(kept[-1])  # r0's position 2 lies here, computed in the first step
            return sampled

        made.runner.execute = around
        return made

    found = run(WORK, make_rung=make, checks=frozenset({"writes"})).first
    assert found is not None
    assert (found.iteration, found.headline) == (1, "block 1 offset 0 (r0's position 2) differs")


def test_the_zero_block_must_stay_zero() -> None:
    found = tampered("tiny", 2, write("tiny", 7))
    assert found is not None
    assert found.headline == "zero block differs"


@pytest.mark.parametrize("rung", ["rows", "tiny"])
def test_what_nobody_owns_is_poisoned_before_the_forward_and_not_what_somebody_owns(rung: str) -> None:
    seen: list[list[bool]] = []

    def look(made: Any) -> None:
        if rung == "rows":
            poisoned = made.network.pool.rows[:12, 1] == -1
        else:
            poisoned = made.network.pool.layers[0][0, :6, 0, :, 0].isnan().flatten()
        seen.append(poisoned.tolist())

    assert tampered(rung, 3, look, BEFORE) is None
    # r0 has computed 4 of its tokens, r1 both of its prompt; block 1 and 2 are theirs up to there.
    (owned,) = ([cell for cell, poisoned in enumerate(cells) if not poisoned] for cells in seen)
    assert owned == [0, 1, 2, 3, 4, 5]


WITNESSES = {
    name: workload
    for name, workload in corpus.workloads().items()
    if workload.fault is not None and name.startswith("N")
}


def test_most_compute_faults_have_a_witness() -> None:
    faults = {name for name, fault in CATALOGUE.items() if name.startswith("N")}
    assert len(faults) >= 25
    assert len(faults & {workload.fault for workload in WITNESSES.values()}) >= 20


@pytest.mark.parametrize("name", WITNESSES)
def test_a_compute_fault_is_seen_on_its_rung_and_not_on_the_ledger(name: str) -> None:
    witness = WITNESSES[name]
    entry = CATALOGUE[str(witness.fault)]
    with armed(entry.id):
        assert run(witness).findings == ()
        seen = {found.check for found in run(witness, make_rung=RUNGS[entry.rung], judge_all=True).findings}
    assert seen & set(entry.expect), f"{seen} holds none of {entry.expect}"


def test_the_watch_stands_between_engine_and_runner() -> None:
    rung: Any = RUNGS["rows"](SHAPE)
    assert isinstance(rung, ComputeRung)
    assert isinstance(rung._engine.runner, Watch)
