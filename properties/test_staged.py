"""The hunt on the staged rung: ``rows`` with what a step reads copied to other memory first, as on a GPU, and read there."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.trace import Workload
from properties.conftest import Harness
from properties.profiles import current
from properties.shares import STAGED, sampled_workloads, share

SHARE = share(STAGED)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARE.shards))
@SHARE.settings(current())
@given(w=sampled_workloads())
def test_what_a_step_reads_is_sent_to_the_device(w: Workload, shard: int, harness: Harness) -> None:
    harness.judge(w, f"staged-{shard}", "staged")


@pytest.mark.parametrize("shard", range(SHARE.shards))
def test_saved_workloads_hold_on_staged(shard: int, harness: Harness) -> None:
    for workload in SHARE.saved(shard):
        harness.judge(workload, f"staged-saved-{shard}", "staged")
