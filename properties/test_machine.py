"""The rule-based generator on the ledger rung: its workloads go through the same driver, and fail into the same files."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.trace import Workload
from properties.conftest import Harness
from properties.machine import Rules
from properties.profiles import current

PROFILE = current()


@pytest.mark.timeout(1800)
def test_rules_that_look_at_the_run(harness: Harness) -> None:
    class Judged(Rules):
        chosen: ClassVar[Counter[str]] = Counter()

        def judge(self, workload: Workload) -> None:
            harness.judge(workload, "rules", counts=False)  # the floors are those of the shaped workloads

    quick = settings(
        PROFILE.settings,
        max_examples=max(20, PROFILE.examples // 4),
        stateful_step_count=25,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],  # preconditions are its point
    )
    run_state_machine_as_test(Judged, settings=quick)
