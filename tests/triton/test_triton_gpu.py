"""What only a GPU can show: no hidden wait in the decode loop, one copy in and one out a step, graphs that equal eager steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.build import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading.synthetic import synthetic_model
from engine.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),
]
STYLES = (
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, top_k=5, frequency_penalty=0.5, max_tokens=24, ignore_eos=True),
)


def engine(dtype: torch.dtype = torch.float32, **settings: Any) -> Engine:
    usual: dict[str, Any] = {
        "num_kv_blocks": 64,
        "max_num_seqs": 4,
        "max_model_len": 128,
        "capture_rows": (2, 4),
        "seed": 0,
    }
    return assemble(EngineConfig(**(usual | settings)), synthetic_model(), "cuda", dtype)


def answers(running: Engine, requests: list[tuple[list[int], SamplingParams]]) -> dict[int, list[int]]:
    """Tokens by place in ``requests``."""
    found: dict[int, list[int]] = {}
    for prompt, params in requests:
        running.submit(prompt, params)
    while running.has_work:
        for request, sampled in running.step().sampled:
            found.setdefault(request, []).append(sampled.token)
    return found


CROWD = [([5 + i, 6, 7 + i, 8] * (1 + 3 * i), STYLES[i % 3]) for i in range(4)]


@pytest.fixture
def _no_hidden_wait() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_hidden_wait")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_step_waits_for_the_device_but_for_its_answer(dtype: torch.dtype, eager: bool) -> None:
    """CUDA raises on every wait but the one on an event: prefill, mixed and decode steps, greedy and sampled."""
    running = engine(dtype, enforce_eager=eager)
    answers(running, CROWD[:1])  # what is set up lazily
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.zeros(1, device="cuda").item()  # the mode bites
    found = answers(running, CROWD)
    assert {len(tokens) for tokens in found.values()} == {24}


def test_one_copy_in_and_one_out() -> None:
    running = engine()
    runner: Any = running.runner
    answers(running, CROWD[:1])
    for prompt, params in CROWD:
        running.submit(prompt, params)
    seen = 0
    while running.has_work:
        before = runner.inputs._upload.copies, runner.sampler._readback.copies
        record = running.step()
        if record.plan.decodes and not record.plan.chunks:
            copies = runner.inputs._upload.copies - before[0], runner.sampler._readback.copies - before[1]
            assert copies == (1, 1)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_crowd_answers_as_each_request_alone_does(dtype: torch.dtype) -> None:
    """Replayed and eager, together and alone: the same tokens, batch-invariant as the mode says."""
    alone = [answers(engine(dtype, enforce_eager=True), [one])[0] for one in CROWD]
    for eager in (False, True):
        crowd = answers(engine(dtype, enforce_eager=eager), CROWD)
        assert [crowd[i] for i in range(len(CROWD))] == alone, eager


def test_graphs_are_recorded_into_one_pool() -> None:
    running = engine()
    graphs: Any = running.runner.network.graphs  # type: ignore[attr-defined]
    assert len(graphs._graphs) >= 2
    assert len({graph.pool() for graph in graphs._graphs.values()}) == 1
