"""The hunt on the rows rung: production code from the plan to the kernels' arguments, the whole cache compared each time."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.trace import Workload
from properties.conftest import Harness
from properties.profiles import current
from properties.shares import ROWS, sampled_workloads, share

SHARE = share(ROWS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARE.shards))
@SHARE.settings(current())
@given(w=sampled_workloads())
def test_rows_are_read_and_written_where_they_must(w: Workload, shard: int, harness: Harness) -> None:
    harness.judge(w, f"rows-{shard}", "rows")


@pytest.mark.parametrize("shard", range(SHARE.shards))
def test_saved_workloads_hold_on_rows(shard: int, harness: Harness) -> None:
    for workload in SHARE.saved(shard):
        harness.judge(workload, f"rows-saved-{shard}", "rows")
