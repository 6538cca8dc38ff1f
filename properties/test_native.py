"""The hunt on the native rung: ``tiny`` on the kernels and the tape that serve by default on a CPU."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.native.build import BuildError
from engine.native.runner import library
from engine.trace import Workload
from properties.conftest import Harness
from properties.profiles import current
from properties.shares import NATIVE, sampled_workloads, share

SHARE = share(NATIVE)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        library()
    except BuildError as error:
        pytest.skip(f"no C++ compiler for the native kernels: {error}")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARE.shards))
@SHARE.settings(current())
@given(w=sampled_workloads())
def test_tokens_are_those_of_the_request_alone_on_native_kernels(w: Workload, shard: int, harness: Harness) -> None:
    harness.judge(w, f"native-{shard}", "native")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(SHARE.shards))
def test_saved_workloads_hold_on_native(shard: int, harness: Harness) -> None:
    for workload in SHARE.saved(shard):
        harness.judge(workload, f"native-saved-{shard}", "native")
