"""A hunt that ends after so many workloads, or with the find that is asked for: the clock, and so the machine, has no say."""

from __future__ import annotations

import math

from properties import hunt
from properties.trial import Trial


def counted_hunt(trial: Trial, *, seed: int, workloads: int, check: str | None = None) -> hunt.Hunted:
    """What ``hunt`` would return. ``check``: None ends with the first find, whatever saw it."""
    hunted = hunt.Hunted(seed)
    for start in range(0, workloads, hunt.BATCH):
        hunt._take(hunted, hunt.batch(seed, start, trial), trial, math.inf)
        if any(check in (None, find.finding.check) for find in hunted.finds):
            break
    return hunted
