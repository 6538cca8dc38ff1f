"""The hunt on the gpu rung: ``tiny`` on CUDA, with CUDA graphs. Without a device it is collected and reported as not run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from engine.trace import Workload
from properties.conftest import Harness
from properties.profiles import current
from properties.shares import GPU, sampled_workloads, share

SHARE = share(GPU)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARE.shards))
@SHARE.settings(current())
@given(w=sampled_workloads())
def test_tokens_are_those_of_the_request_alone_on_cuda(w: Workload, shard: int, harness: Harness) -> None:
    harness.judge(w, f"gpu-{shard}", "gpu")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(SHARE.shards))
def test_saved_workloads_hold_on_gpu(shard: int, harness: Harness) -> None:
    for workload in SHARE.saved(shard):
        harness.judge(workload, f"gpu-saved-{shard}", "gpu")
