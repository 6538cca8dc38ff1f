"""The hunt on the ledger rung: real control, stub runner, every workload in lockstep with the specification.

One property, in shards, because one property keeps only one worker busy; the shards draw different workloads. The corpus
runs first, as explicit examples, each in one of the shards.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given

from engine.trace import Workload
from properties import corpus
from properties.conftest import Harness
from properties.profiles import current
from properties.strategies import workloads

PROFILE = current()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(PROFILE.shards))
@PROFILE.settings
@given(w=workloads())
def test_the_engine_follows_the_specification(w: Workload, shard: int, harness: Harness) -> None:
    if not w.title or int(w.digest(), 16) % PROFILE.shards == shard:
        harness.judge(w, f"ledger-{shard}")


for _name, _workload in corpus.workloads().items():
    test_the_engine_follows_the_specification = example(w=_workload).via(_name)(
        test_the_engine_follows_the_specification
    )
