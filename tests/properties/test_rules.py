"""The rule-based generator: what it records replays unchanged, every rule gets its turn, and a fault in reach becomes a file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.trace import Submit, Workload, load
from properties.conftest import Harness
from properties.floors import Boards
from properties.lockstep import run
from properties.machine import Rules
from properties.trial import Trial

FIXED = settings(
    max_examples=60,
    stateful_step_count=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
RULES = {
    "submit",
    "submit_up_to_a_border",
    "submit_what_is_cached",
    "ask_again",
    "abort_the_one_that_prefills",
    "abort_one_that_was_preempted",
    "abort_one_that_decodes",
    "fail_while_one_prefills",
    "submit_one_that_cannot_go_on",
    "hit_and_not_go_on",
    "wait_for_one_that_cannot_go_on",
}


def test_recorded_events_replay_unchanged_and_every_rule_gets_its_turn() -> None:
    happened: Counter[str] = Counter()

    class Recording(Rules):
        chosen: ClassVar[Counter[str]] = Counter()

        def judge(self, workload: Workload) -> None:
            self.drain()
            outcome = run(workload, make_rung=None)
            assert [step.after for step in outcome.steps] == self.states
            happened.update(+outcome.occurred)

    # Hypothesis draws constants of the modules that happen to be imported, so a few examples differ from run to run.
    run_state_machine_as_test(Recording, settings=settings(FIXED, max_examples=300))
    assert set(Recording.chosen) == RULES
    for name in ("prefilling", "decoding", "preempted"):
        assert happened[f"aborted while {name}"]
    assert happened["full hit"]
    assert happened["duplicate published"]
    assert min(happened["row without a token"], happened["text failed"]) > 5


def test_a_recording_that_waits_too_little_is_noticed() -> None:
    class Hasty(Rules):
        chosen: ClassVar[Counter[str]] = Counter()

        def judge(self, workload: Workload) -> None:
            self.drain()
            assert [step.after for step in run(workload, make_rung=None).steps] == self.states

        def _wait(self) -> int:
            return super()._wait() // 2

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Hasty, settings=settings(FIXED, phases=(Phase.generate,)))


@pytest.mark.parametrize("by", ["sampling", "text"])
def test_a_recording_that_forgets_a_failure_is_noticed(by: str) -> None:
    class Hopeful(Rules):
        chosen: ClassVar[Counter[str]] = Counter()

        def judge(self, workload: Workload) -> None:
            self.drain()
            assert [step.after for step in run(workload, make_rung=None).steps] == self.states

        def _submit(self, name: str, event: Submit) -> None:
            whole = replace(event, fail_at=None) if event.fail_by == by else event
            super()._submit(name, whole)
            self.events[-1] = event

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Hopeful, settings=settings(FIXED, phases=(Phase.generate,)))


def test_a_fault_becomes_a_file_that_replays(tmp_path: Path) -> None:
    harness = Harness("P01", tmp_path, Boards())

    class Armed(Rules):
        chosen: ClassVar[Counter[str]] = Counter()

        def judge(self, workload: Workload) -> None:
            harness.judge(workload, "rules", counts=False)

    with pytest.raises(AssertionError, match="replay: python -m properties replay"):
        run_state_machine_as_test(Armed, settings=FIXED)
    (path,) = tmp_path.glob("rules-*.json")
    saved = load(path)
    assert saved.fault == "P01"
    assert len(saved.events) <= 4, "shrunk"
    assert Trial(fault="P01").run(saved).first is not None
    assert Trial().run(saved).first is None
    assert not list(harness.boards), "its workloads do not count for the floors"


@pytest.mark.parametrize("fault", ["E01", "E05"])
def test_what_goes_wrong_when_one_cannot_go_on_is_in_reach(fault: str) -> None:
    class Armed(Rules):
        chosen: ClassVar[Counter[str]] = Counter()

        def judge(self, workload: Workload) -> None:
            assert Trial(fault=fault).run(workload).first is None

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Armed, settings=settings(FIXED, phases=(Phase.generate,)))
