"""graphbench between real servers: an honest pair is equal, and a graph replayed over the wrong rows is seen in a crowd only.

Both arms are uvicorns on loopback over the engine with real compute on a small model, in this process, so that a fault
can be armed in one of them. The planted bug: rule 12 forgets to ask whether the rows are 0..d-1, in a batch that nothing
compacts; a recorded step, which reads the block tables from row zero on, then answers with a neighbour's continuation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from engine.compute.weights import Weights, load_weights
from engine.loading.synthetic import synthetic_model
from properties.faults import armed
from server.bench.own import Running
from server.graphbench.run import Arm, Plan, run_arm
from server.graphbench.verdict import ArmRun, Tolerance, judge
from tests.crowd.crowd import make_engine, serving

MODEL = synthetic_model(vocab_size=512)
ROWS = 4
PLAN = Plan(clients=10, rates=(), seed=3, alone=True, prompt=(4, 20), tokens=(3, 12))


@pytest.fixture(scope="module")
def weights() -> Weights:
    with torch.inference_mode():
        return load_weights(MODEL, torch.device("cpu"), torch.float32)


def arm_run(weights: Weights, arm: Arm, fault: str | None = None, plan: Plan = PLAN) -> ArmRun:
    settings: dict[str, Any] = {"max_num_seqs": ROWS, "num_kv_blocks": 64, "block_size": 4, "max_model_len": 64}
    settings["enforce_eager"] = "--enforce-eager" in arm.options
    settings["persistent_batch"] = "--no-persistent-batch" not in arm.options

    @contextmanager
    def open_arm(arm: Arm) -> Iterator[Running]:
        began = time.monotonic()
        with serving(make_engine(MODEL, weights, **settings)) as served:
            yield Running(served.url, os.getpid(), time.monotonic() - began)

    with armed(fault) if fault else nullcontext():
        return run_arm(arm, plan, open_arm, lambda text: None)


GRAPHS, EAGER = Arm("graphs", ()), Arm("eager", ("--enforce-eager",))
FREE = Arm("free-rows", ("--no-persistent-batch",))


@pytest.fixture(scope="module")
def eager(weights: Weights) -> ArmRun:
    return arm_run(weights, EAGER)


def checks(graphs: ArmRun, other: ArmRun) -> set[str]:
    return {complaint.check for complaint in judge(graphs, other, Tolerance())}


def test_recorded_graphs_answer_as_eager_steps_do(weights: Weights, eager: ArmRun) -> None:
    graphs = arm_run(weights, GRAPHS)
    assert [complaint.text for complaint in judge(graphs, eager, Tolerance())] == []
    happened = graphs.crowd_happened
    assert happened.peak_rows == ROWS
    assert happened.replay_share == 1.0
    assert happened.padded_rows > 0
    assert happened.row_moves > 0
    assert eager.crowd_happened.replayed == 0
    assert graphs.promises["captures"]
    assert not eager.promises["captures"]


def test_free_rows_answer_the_same_but_do_not_replay_every_step(weights: Weights, eager: ArmRun) -> None:
    free = arm_run(weights, FREE)
    assert checks(free, eager) == {"not every step replayed"}
    assert 0 < free.crowd_happened.replay_share < 1
    assert free.crowd_happened.eager.keys() == {"scattered"}


def test_a_replay_over_scattered_rows_is_seen_in_the_crowd_and_not_alone(weights: Weights, eager: ArmRun) -> None:
    planted = arm_run(weights, FREE, fault="G02")
    assert {"answers differ", "crowd differs from alone"} <= checks(planted, eager)
    assert planted.alone == eager.alone
    assert planted.crowd != eager.crowd


def test_an_open_loop_has_latencies_and_readings_of_its_own(weights: Weights) -> None:
    plan = Plan(clients=4, rates=(40.0,), seconds=0.5, seed=3, prompt=(4, 20), tokens=(3, 12))
    run = arm_run(weights, GRAPHS, plan=plan)
    (paced,) = run.paced
    assert paced.summary.requests == 20
    assert paced.summary.failed == 0
    assert paced.happened.sampled_tokens == paced.summary.output_tokens
    assert 0 < paced.samples <= paced.summary.output_tokens - 20
