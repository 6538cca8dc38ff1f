"""The hunt on the wire rung: the production server in front of all of control, its clients, and what each of them was sent."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.trace import Workload
from properties.conftest import Harness
from properties.profiles import current
from properties.shares import WIRE, share
from properties.strategies import workloads

SHARE = share(WIRE)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARE.shards))
@SHARE.settings(current())
@given(w=workloads())
def test_clients_are_sent_what_they_must_be(w: Workload, shard: int, harness: Harness) -> None:
    harness.judge(w, f"wire-{shard}", "wire")


@pytest.mark.parametrize("shard", range(SHARE.shards))
def test_saved_workloads_hold_on_the_wire(shard: int, harness: Harness) -> None:
    for workload in SHARE.saved(shard):
        harness.judge(workload, f"wire-saved-{shard}", "wire")
