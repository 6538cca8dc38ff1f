"""A few workloads on the GPU's kernels, in Triton's interpreter: lockstep, write set, poison and solo runs as on ``tiny``.

The interpreter is too slow to hunt in, so the workloads are written down, each for what a kernel or its inputs can get wrong,
and each says what must have happened in it. The hunt itself is the rung ``gpu``'s, where there is a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.trace import loads
from properties.lockstep import run
from properties.rungs import RUNGS

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton

SMALL = """{"format": "workload/1", "title": "%s",
 "shape": {"blocks": %d, "block_size": 4, "rows": 3, "budget": %d, "watermark": 0, "max_model_len": %d,
           "capture_rows": [1, 3], "capture_widths": [%d], "persistent_batch": %s, "prefix_cache": %s, "max_waiting": 8},
 "events": [%s]}"""

CROWD = SMALL % (
    "short blocks: preempted, readmitted, moved, replayed with padding",
    6, 8, 16, 4, "true", "false",
    """
  {"wait": 0, "submit": {"prompt": [["a", 5]], "max_tokens": 4}},
  {"wait": 0, "submit": {"prompt": [["b", 7]], "max_tokens": 6, "temperature": 0.8, "seed": 1}},
  {"wait": 0, "submit": {"prompt": [["c", 4]], "max_tokens": 6}}""",
)  # fmt: skip
LONG = SMALL % (
    "a context of two splits, whose beginning is a hit for the next request, while rows are scattered",
    44, 40, 80, 20, "false", "true",
    """
  {"wait": 0, "submit": {"prompt": [["a", 3]], "max_tokens": 5}},
  {"wait": 0, "submit": {"prompt": [["a", 62]], "max_tokens": 5}},
  {"wait": 3, "submit": {"prompt": [["a", 60], ["b", 3]], "max_tokens": 3}}""",
)  # fmt: skip
WORKLOADS = {
    "crowd": (CROWD, ("preempted", "padded", "chunked", "moved")),
    "long": (LONG, ("prefix hit", "scattered")),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["crowd", pytest.param("long", marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_request_alone_on_interpreted_kernels(name: str) -> None:
    text, needed = WORKLOADS[name]
    ran = run(loads(text), make_rung=RUNGS["triton"])
    assert ran.first is None, ran.first
    assert [event for event in needed if not ran.occurred[event]] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_kernel_that_reads_its_neighbours_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the check: the tables that kernels get belong to the next row, as in a replay beside its rows."""
    from engine.cuda.kernels import Kernels

    usual = Kernels.attend_decode

    def shifted(self: Any, qkv: Tensor, cache: Tensor, tables: Tensor, *rest: Any) -> None:
        usual(self, qkv, cache, tables.roll(1, 0), *rest)

    monkeypatch.setattr(Kernels, "attend_decode", shifted)
    ran = run(loads(CROWD), make_rung=RUNGS["triton"])
    assert ran.first is not None
    # Poison that is read is written on, or leaves logits that are no numbers, which end the request, or the answer is another.
    assert ran.first.check in ("writes", "decisions", "tokens")
