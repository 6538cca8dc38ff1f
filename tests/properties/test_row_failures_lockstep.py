"""Requests that cannot go on (SPEC 13.7, 13.8), in workloads: how they are written down, that every rung carries them out, and
that the harness would see it if it did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine.trace import FAILURES, FailStep, FormatError, Shape, Submit, Workload, dumps, loads
from properties import row_failures
from properties.lockstep import Run, run
from properties.row_failures import KINDS, RowFailed, spoil
from properties.rung_ledger import StubRunner
from properties.rungs import RUNGS, Unavailable
from properties.sampled import for_rung
from properties.shrink import shrink

SHAPE = Shape(12, 2, 4, capture_rows=(1, 2, 3, 4), capture_widths=(8,), prefix_cache=True, max_model_len=32)
BESIDE = (Submit(0, (("b", 4),), 6), Submit(1, (("a", 3),), 5))
HERE = ("ledger", "rows", "tiny", "native", "wire")


def failing(at: int, by: str, **rest: Any) -> Workload:
    return Workload(SHAPE, (Submit(0, (("a", 3),), 6, fail_at=at, fail_by=by, **rest), *BESIDE))


def ran(workload: Workload, rung: str) -> Run:
    try:
        return run(for_rung(workload, rung), make_rung=RUNGS[rung])
    except Unavailable as missing:
        pytest.skip(f"missing optional system tool: {missing}")


# The language -----------------------------------------------------------------------------------------------------


def test_a_failure_is_written_down_and_read_again() -> None:
    workload = failing(3, "text", stop_text=2)
    text = dumps(workload)
    assert '"fail_at": 3, "fail_by": "text"' in text
    assert loads(text) == workload
    assert '"fail_at": 2}' in dumps(failing(2, "sampling"))
    assert "fail" not in dumps(Workload(SHAPE, BESIDE))  # what older readers read stays as it was


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('"fail_at": 0', "submit.fail_at is 0, but must be an integer in 1"),
        ('"fail_at": true', "submit.fail_at is True"),
        ('"fail_by": "chance"', "submit.fail_by is 'chance', but must be one of sampling, text"),
        ('"fail_on": 2', "submit has the unknown key 'fail_on'"),
    ],
)
def test_a_wrong_failure_is_refused(given: str, said: str) -> None:
    text = dumps(failing(2, "sampling")).replace('"fail_at": 2', given)
    with pytest.raises(FormatError, match=said):
        loads(text)


def test_a_failure_is_left_out_or_made_earlier_by_the_reducer() -> None:
    def fails(candidate: Workload) -> bool:
        return any(isinstance(event, Submit) and event.fails("text") for event in candidate.events)

    kept, _ = shrink(failing(5, "text", n=2, stop_text=2), fails)
    (event,) = kept.events
    assert isinstance(event, Submit)
    assert (event.fail_at, event.fail_by, event.n, event.stop_text) == (1, "text", 1, None)


# The rungs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", HERE)
@pytest.mark.parametrize("by", FAILURES)
def test_every_rung_carries_it_out(rung: str, by: str) -> None:
    """At the first token and later, of one choice of several, with stop strings, and where it never comes to it."""
    name = {"sampling": "row without a token", "text": "text failed"}[by]
    for at, rest in (
        (1, {}),
        (3, {"n": 2}),
        (2, {"stop_text": 6}),
        (2, {"client": "whole"}),
        (6, {"client": "stalls"}),
    ):
        outcome = ran(failing(at, by, **rest), rung)
        assert outcome.first is None
        assert (outcome.occurred[name], outcome.occurred["went on beside a failure"]) == (1, 1)
        ends = [end.reason for caller in outcome.callers.values() for end in caller.ends]
        assert ends.count("error") == 1
        assert set(ends) <= {"error", "stop", "length"} | ({"abort"} if rung == "wire" else set())
    assert ran(failing(7, by, seed=1), rung).occurred[name] == 0


def test_a_preempted_request_fails_at_the_same_token() -> None:
    """k counts the tokens generated so far, so being computed again changes nothing (SPEC 14.1)."""
    tight = replace(SHAPE, blocks=6, prefix_cache=False)
    events = tuple(Submit(0, ((name, 3),), 6, fail_at=6, fail_by="sampling") for name in "abc")
    for rung in ("ledger", "rows", "native"):
        outcome = ran(Workload(tight, events), rung)
        assert outcome.first is None
        assert outcome.occurred["preempted"]
        assert outcome.occurred["row without a token"] >= 1
        for caller in outcome.callers.values():
            assert [end.reason for end in caller.ends] == ["error"]
            assert len(caller.delivered) == 5


def test_a_failed_step_and_a_failed_row_are_told_apart() -> None:
    outcome = run(Workload(SHAPE, (*failing(2, "sampling").events, FailStep(1))))
    assert outcome.first is None
    assert outcome.occurred["failed step"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_really_spoiled(kind: str) -> None:
    logits, peaks = torch.zeros(40), torch.zeros(3)
    spoil(logits, peaks, kind)
    assert not torch.isfinite(logits.max())
    assert bool(peaks.isnan().any())
    for panel in range(3):
        finite = bool(logits[16 * panel : 16 * panel + 16].isfinite().all())
        assert bool(peaks[panel].isnan()) is not finite


# What would be seen -----------------------------------------------------------------------------------------------


def unharmed(runner: StubRunner, entry: Any, sample: Callable[..., Any] = StubRunner._sample) -> Any:
    dead, runner.dead = runner.dead, {}
    try:
        return sample(runner, entry)
    finally:
        runner.dead = dead


@pytest.mark.parametrize("rung", ["ledger", "wire"])
def test_a_row_that_does_not_fail_is_seen(rung: str) -> None:
    with patch.object(StubRunner, "_sample", unharmed):
        found = ran(failing(2, "sampling"), rung).first
    assert found is not None
    assert found.check == "decisions"


@pytest.mark.parametrize("rung", ["rows", "tiny", "native"])
def test_logits_that_are_not_spoiled_are_seen(rung: str) -> None:
    with patch("properties.compute_rung.spoil", lambda *_: None):
        found = ran(failing(2, "sampling"), rung).first
    assert found is not None
    assert found.check == "decisions"


@pytest.mark.parametrize("rung", ["ledger", "rows", "wire"])
def test_a_text_that_does_not_fail_is_seen(rung: str) -> None:
    with patch.object(row_failures.BrokenText, "push", lambda self, *args: self._text.push(*args)):
        found = ran(failing(2, "text"), rung).first
    assert found is not None
    assert found.check == "decisions"


def test_an_end_in_error_that_nothing_called_for_is_seen_by_solo_alone() -> None:
    with patch.object(StubRunner, "_sample", lambda runner, entry: _dead_at(runner, entry, 3)):
        seen = run(Workload(SHAPE, BESIDE), checks=frozenset({"solo"})).first
    assert seen is not None
    assert "error" in str(seen)


def _dead_at(runner: StubRunner, entry: Any, position: int) -> Any:
    runner.dead = {entry.request: position}
    return _SAMPLE(runner, entry)


_SAMPLE = StubRunner._sample


def test_a_text_says_that_it_was_told_to_fail() -> None:
    (text,) = row_failures.spoken((_Silent(),), Submit(0, (("a", 1),), 3, fail_at=2, fail_by="text"))
    assert text.push(1) is False
    with pytest.raises(RowFailed, match="injected by the workload"):
        text.push(2)


class _Silent:
    matched = None

    def push(self, token: int, may_stop: bool = True, last: bool = False) -> bool:
        return False
