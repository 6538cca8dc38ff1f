"""The graph's key holds every host integer that a recorded step reads: what is frozen differs only where the key does.

Both recorders that run on a CPU are judged: torch's tape and the native one. Nothing is computed: a step is walked through,
and the arguments of its kernel calls are what a recorder would keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.build import assemble
from engine.capture_plan import CALLS
from engine.compute.graphs import Do
from engine.compute.inputs import StaticInputs
from engine.compute.network import Tokens
from engine.compute.recording import OpenShapes, Walk, corners, difference, refuse_open_shapes, walk
from engine.compute.runner import PlanRunner
from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.loading.synthetic import synthetic_model
from engine.native.build import BuildError
from engine.native.runner import library
from server.facts import promises

MODEL = synthetic_model()
SETTINGS: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_model_len": 200}


def made(compute: str, **settings: Any) -> Engine:
    if compute == "native":
        try:
            library()
        except BuildError as error:
            pytest.skip(f"no C++ compiler for the native kernels: {error}")
    return assemble(
        EngineConfig(compute=compute, **SETTINGS | {"threads": 2 if compute == "native" else None} | settings), MODEL
    )


@pytest.fixture(scope="module", params=["torch", "native", "staged"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """``staged``: a step reads its inputs in memory of their own, as on a GPU."""
    with torch.inference_mode():
        made_one = made("torch" if request.param == "staged" else request.param)
        if request.param == "staged":
            runner = made_one.runner
            assert isinstance(runner, PlanRunner)
            rows, width = runner.inputs.host["tables"].shape
            runner.inputs = StaticInputs(rows, width, runner.pool, torch.device("cpu"), staged=True)
        yield made_one


def walked(engine: Engine, shape: tuple[int, int], **values: int) -> Walk:
    """What a recorder keeps of a step of ``shape`` whose inputs hold ``values``."""
    runner = engine.runner
    assert isinstance(runner, PlanRunner)
    for name, buffer in runner.inputs.host.items():
        buffer.fill_(values.get(name, 0))
    runner.inputs.send(*shape)
    tokens, tables = runner.inputs.step(*shape)

    def step(do: Do) -> None:
        runner.network.decode(do, tokens, tables)

    return walk(step)


BASE = (2, 16)
VALUES = {"tokens": 7, "positions": 61, "slots": 9, "tables": 5}  # the longest context follows from positions


def test_the_key_is_every_host_integer_that_a_step_reads(engine: Engine) -> None:
    """Each is varied alone: where the key is another, so is what is frozen; where it is the same, nothing differs."""
    base = walked(engine, BASE)
    assert len(base.calls) > 10
    for rows, width in ((1, 16), (3, 16), (4, 16), (2, 15), (2, 17), (2, 40)):
        assert difference(base, walked(engine, (rows, width))) is not None, (rows, width)
    for name, value in VALUES.items():
        assert difference(base, walked(engine, BASE, **{name: value})) is None, name


def test_recording_again_freezes_the_same(engine: Engine) -> None:
    runner = engine.runner
    assert isinstance(runner, PlanRunner)
    refuse_open_shapes(runner.network, runner.inputs, corners(engine.limits.captures))
    before = runner.recorded
    assert difference(walked(engine, BASE), walked(engine, BASE)) is None
    assert runner.recorded == before  # walking through records nothing


@pytest.mark.parametrize("name", ["tokens", "positions", "slots", "tables"])
def test_a_step_that_reads_a_value_from_the_host_is_refused(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: a network whose step has a loop bound, a size or an index that depends on its inputs."""
    runner = engine.runner
    assert isinstance(runner, PlanRunner)
    honest = runner.network.decode

    def decode(do: Do, step: Tokens, tables: torch.Tensor) -> torch.Tensor:
        values = tables if name == "tables" else getattr(step, name)
        do(len, int(values.max()))  # a host integer that nobody put into the key
        return honest(do, step, tables)

    monkeypatch.setattr(runner.network, "decode", decode)
    with pytest.raises(OpenShapes, match=r"2 rows and 16 blocks records call 0 as len with argument 0 = 0 or as len"):
        refuse_open_shapes(runner.network, runner.inputs, [BASE])


def test_a_step_whose_number_of_calls_depends_on_its_inputs_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.runner
    assert isinstance(runner, PlanRunner)
    monkeypatch.setattr(
        runner.network, "decode", lambda do, step, tables: [do(len) for _ in range(int(step.positions.max()))]
    )
    with pytest.raises(OpenShapes, match=r"0 kernel calls or 2, depending on its inputs"):
        refuse_open_shapes(runner.network, runner.inputs, [BASE])


def test_start_up_refuses_what_would_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole start, with kernels that take the longest context as a number."""
    from engine.compute.transformer import Transformer

    honest = Transformer.decode

    def decode(self: Transformer, do: Do, step: Tokens, tables: torch.Tensor) -> torch.Tensor:
        do(max, int(step.positions.max()), 1)
        return honest(self, do, step, tables)

    monkeypatch.setattr(Transformer, "decode", decode)
    with pytest.raises(OpenShapes, match="no list of graphs would cover it"):
        made("torch")
    assert made("torch", enforce_eager=True).limits.captures == ()  # nothing is recorded, so nothing is open


def test_corners() -> None:
    shapes = [(rows, width) for rows in (1, 2, 8) for width in (4, 6, 9)]
    assert corners(shapes) == [(1, 4), (1, 9), (8, 4), (8, 9)]
    assert corners([(3, 5)]) == [(3, 5)]
    assert corners([]) == []


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_what_was_decided_at_start_is_a_promise(compute: str) -> None:
    engine = made(compute, capture_max_len=100)
    told = promises(engine)["capture"]
    assert told["bound_by"] == "flag"
    assert told["ceiling"] == told["bounds"]["flag"] == 25
    assert told["bounds"]["context"] == 50
    assert told["widths"][-1] == 25
    assert told["graphs"] == len(engine.limits.captures) == len(told["rows"]) * len(told["widths"])
    assert told["seconds"] > 0
    assert 0 < told["bytes"] <= told["estimated_bytes"] < 4 * told["bytes"]  # the budget counts with the most it can be
    assert "block tables longer than 25 blocks" in told["gap"]
    assert "25 blocks, bound by flag" in dict(engine.capacity())["recorded graphs"]


@pytest.mark.parametrize(
    ("settings", "bound"), [({"max_captures": 11}, "graphs"), ({"capture_memory": 1}, "bytes"), ({}, "context")]
)
def test_budgets_lower_the_ceiling_and_say_so(
    settings: dict[str, int], bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine import capture_plan

    monkeypatch.setitem(capture_plan.CALL_BYTES, "cpu", 2**20 // (11 * (CALLS["torch"][0] + 2 * CALLS["torch"][1])))
    engine = made("torch", max_model_len=256, **settings)
    told = promises(engine)["capture"]
    assert told["bound_by"] == bound
    assert (told["gap"] is None) == (bound == "context")


def test_a_budget_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_captures is 2: 3 row buckets need a graph each, but 2 fit") as refused:
        made("torch", max_captures=2)
    assert refused.value.field == "max_captures"


def test_nothing_is_promised_about_graphs_where_none_are_recorded() -> None:
    told = promises(made("torch", enforce_eager=True))["capture"]
    assert (told["graphs"], told["bytes"], told["bound_by"]) == (0, 0, "enforce_eager")
    assert told["gap"] == "nothing is captured, so every decode step runs eagerly"
