"""A recording met again: whether each iteration decides today what the live engine decided then (engine/digest.py)."""

from __future__ import annotations

from engine.digest import digest
from engine.trace import Workload
from properties.checks import Fact, Finding
from properties.lockstep import Run


def compare(workload: Workload, outcome: Run) -> Finding | None:
    """The first iteration that differs from the recording; None when all are met, or when nothing was recorded."""
    met = [digest(step.record) for step in outcome.steps if step.record is not None]
    for number, (now, then) in enumerate(zip(met, workload.digests, strict=False), 1):
        if now != then:
            fact = Fact("digest of the decisions", now, then)
            return Finding("recording", number, "this iteration was decided otherwise when it was recorded", (fact,))
    return None
