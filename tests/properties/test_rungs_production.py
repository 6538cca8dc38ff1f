"""``rows`` and ``tiny`` run production code from the plan to the kernels: every function on that way was called, by name.

A function that a rung does not reach is listed here with its reason, or the test fails.
"""

from __future__ import annotations

import functools

import pytest

from properties.hunt import numbered
from properties.lockstep import run
from properties.rungs import RUNGS
from properties.sampled import with_sampling
from tests.properties.production_calls import calls, defined

NETWORK = ("graphs.graphs_for",)  # chosen by the network, which on rows is the harness's
ON_BOTH = ("runner", "row_state", "inputs", "standing", "graphs", "sampler")
ON_BOTH += ("sampling_choice", "sampling_noise", "sampling_row")
ON_TINY = ("transformer", "decoder", "attention", "kernels", "linear", "kv", "arena", "tiles", "rope")

ELSEWHERE = {
    "a model's files and start, not a plan": (
        "runner.ModelRunner.__init__",
        "runner.ModelRunner.probe_summary",
        "runner.ModelRunner.weight_bytes",
        "runner.PlanRunner.kv_bytes",
        "runner.PlanRunner.rows_state",
        "row_state.RowState.view",
        "kv.kv_bytes_per_block",
        "kv.KVPool.nbytes",
        "arena.Arena.nbytes",
        "graphs.TapeGraphs.nbytes",
        "linear.can_pack",
        "linear.pack",
        "linear.plain_product",
        "linear._probe_linear",
        "linear._probe_linear.product",
        "linear.Linears.__init__",
        "linear.Linears._choose",
        "linear.Linears.ladders",
        "linear.Linears.make",
    ),
    "only with CUDA": (
        "graphs.CudaGraphs.__init__",
        "graphs.CudaGraphs.record",
        "graphs.CudaGraphs.replay",
        "graphs.CudaGraphs.__contains__",
    ),
    "bodies of protocols": (
        "graphs.Graphs.nbytes",
        "graphs.Graphs.record",
        "graphs.Graphs.replay",
        "graphs.Graphs.__contains__",
        "sampler.Draw.__call__",
        "row_state.RowOwner.vacate",
        "row_state.RowOwner.move",
        "row_state.RowOwner.seat",
        "attention.Take.__call__",
    ),
    "only on native kernels, hence on the rung native": ("sampler.Sampler._draw_rows", "arena.Arena.pack"),
    "logits of a prompt position that are no numbers; workloads spoil sampled rows, tests/sampling has these": (
        "sampling_row.RowState.spoil",
    ),
    "other types and models than fp32 and plain rotary positions; tests/conformance has them": (
        "kernels.copy",
        "rope._original_length",
        "rope._yarn_attention_factor",
        "rope._yarn_attention_factor.temperature",
        "rope._llama3",
        "rope._yarn",
        "rope._yarn.dimension_turning",
    ),
}
EXEMPT = {name for names in ELSEWHERE.values() for name in names}
MOST = {"rows": 200, "tiny": 60}  # workloads; a few dozen are enough


@functools.cache
def wanted(rung: str) -> frozenset[str]:
    modules = ON_BOTH if rung == "rows" else ON_BOTH + ON_TINY
    left_to_the_harness = NETWORK if rung == "rows" else ()
    return frozenset().union(*(defined(module) for module in modules)) - EXEMPT - set(left_to_the_harness)


@functools.cache
def reached(rung: str) -> frozenset[str]:
    """What generated workloads reach, as many as it takes. What is made once per process may have been made before."""
    run(numbered(0, 0), make_rung=RUNGS[rung])
    seen: set[str] = set()
    for number in range(MOST[rung]):
        with calls() as called:
            outcome = run(with_sampling(numbered(11, number)), make_rung=RUNGS[rung])
        assert outcome.first is None
        seen |= called
        if wanted(rung) <= seen:
            break
    return frozenset(seen)


@pytest.mark.parametrize("rung", ["rows", "tiny"])
def test_every_production_function_between_plan_and_kernel_ran(rung: str) -> None:
    left_out = sorted(wanted(rung) - reached(rung))
    assert left_out == [], f"{rung} does not reach {', '.join(left_out)}"
    assert len(wanted(rung)) > {"rows": 50, "tiny": 90}[rung]  # and the list is not empty


def test_what_is_exempt_exists_and_is_not_reached() -> None:
    known = frozenset().union(*(defined(module) for module in ON_BOTH + ON_TINY))
    assert sorted(EXEMPT - known) == []
    made_once = {name for name in EXEMPT if name.startswith("linear.")}  # when the first runner of a process is made
    assert sorted((EXEMPT - made_once) & (reached("rows") | reached("tiny"))) == []


def test_a_function_that_is_left_out_is_told() -> None:
    assert {"runner.PlanRunner._decode", "runner.PlanRunner._record.step"} <= defined("runner")
    with calls() as seen:
        RUNGS["rows"](numbered(0, 0).shape)
    assert "runner.PlanRunner.__init__" in seen
    assert "runner.PlanRunner._decode" not in seen
