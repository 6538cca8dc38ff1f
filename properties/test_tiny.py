"""The hunt on the tiny rung: real attention, sampler and recorded graphs; every token is that of the request alone."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.trace import Workload
from properties.conftest import Harness
from properties.profiles import current
from properties.shares import TINY, sampled_workloads, share

SHARE = share(TINY)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARE.shards))
@SHARE.settings(current())
@given(w=sampled_workloads())
def test_tokens_are_those_of_the_request_alone(w: Workload, shard: int, harness: Harness) -> None:
    harness.judge(w, f"tiny-{shard}", "tiny")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(SHARE.shards))
def test_saved_workloads_hold_on_tiny(shard: int, harness: Harness) -> None:
    for workload in SHARE.saved(shard):
        harness.judge(workload, f"tiny-saved-{shard}", "tiny")
