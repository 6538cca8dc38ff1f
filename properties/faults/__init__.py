"""The fault catalogue: single mistakes, each armed from outside, each with the checks that must see it.

One file for each idea; ids are kept for ever, numbers leave gaps. Letters: A block pool, S scheduler, P preemption, T and M
rows and tokens, C prefix cache, G replay, K what people are told, N between plan and kernels, L sampler, D text, V streaming,
E requests that cannot go on.
Z00, the canary, proves the plumbing.

A rule of SPEC.md without a fault is a finding; so is a fault that no workload reaches (``needs``). Which public report is
which fault, and which kinds of report cannot exist here, is told in ci/public_faults.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from properties.arming import Faded, Fault, arm, instead
from properties.faults import (
    allocator,
    compute,
    compute_native,
    door,
    graph_replay,
    outsider,
    preemption,
    prefix_cache,
    row_failures,
    rows,
    sampler,
    scheduler,
    streaming,
    text,
)

__all__ = ["CANARY", "CATALOGUE", "Faded", "Fault", "armed"]

CANARY = "Z00"


@contextmanager
def armed(fault_id: str | None) -> Iterator[None]:
    """Arms a fault of the catalogue for one run; None arms nothing. Raises ``KeyError`` for an unknown id."""
    if fault_id is None:
        yield
        return
    with arm(CATALOGUE[fault_id].change()):
        yield


_FAULTS = (
    *allocator.FAULTS,
    *door.FAULTS,
    *scheduler.FAULTS,
    *preemption.FAULTS,
    *rows.FAULTS,
    *prefix_cache.FAULTS,
    *graph_replay.FAULTS,
    *compute.FAULTS,
    *compute_native.FAULTS,
    *sampler.FAULTS,
    *text.FAULTS,
    *streaming.FAULTS,
    *row_failures.FAULTS,
    *outsider.FAULTS,
    Fault(
        CANARY,
        "canary: every audit complains",
        ("audit",),
        instead("engine.engine", "audit", lambda _: lambda scheduler: ["canary"]),
        area="plumbing",
    ),
)
CATALOGUE: dict[str, Fault] = {fault.id: fault for fault in sorted(_FAULTS, key=lambda fault: fault.id)}
if len(CATALOGUE) < len(_FAULTS):
    raise ValueError("two faults share an id")
