"""The checks, in the order in which a difference is reported: the first one wins, later ones are mostly its echoes.

Each check has an exception class of its own, so that Hypothesis keeps two different bugs apart while it shrinks, and an id
of its own, so that the kill matrix can judge each check alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs


@attrs.frozen
class Fact:
    """One named value as the two sides have it, already written out."""

    name: str
    engine: str
    specification: str


@attrs.frozen
class Finding:
    """``iteration`` counts from 1, in every message, file and option. ``facts`` are the values that differ."""

    check: str
    iteration: int
    headline: str
    facts: tuple[Fact, ...] = ()


class Divergence(AssertionError):
    """The engine is not what the specification says. ``report`` is what a person reads."""

    check: ClassVar[str]

    def __init__(self, finding: Finding, report: str = "") -> None:
        super().__init__(report or f"{finding.check} at iteration {finding.iteration}: {finding.headline}")
        self.finding = finding


class EngineRaised(Divergence):
    """The engine raised where the rules know no exception, or made a plan that cannot be executed."""

    check = "raises"


class AuditFailed(Divergence):
    """The engine broke one of its own invariants (engine.control.audit)."""

    check = "audit"


class DecisionsDiffer(Divergence):
    """Refused, aborted, reaped, grown, preempted, admitted, scheduled, finished: somebody else, or something else."""

    check = "decisions"


class LedgerDiffers(Divergence):
    """Queues, tables, progress, blank stack or references, after commit."""

    check = "ledger"


class RowsDiffer(Divergence):
    """Rows, moves, and the row that every part of the plan names."""

    check = "rows"


class ReplayDiffers(Divergence):
    """Replay or eager, the recorded shape, the padding, the reason."""

    check = "replay"


class WritesDiffer(Divergence):
    """Cache cells changed that were not scheduled, or scheduled ones that do not hold what they must; on rungs with a cache."""

    check = "writes"


class TokensDiffer(Divergence):
    """What the plan hands to compute, what was appended, and, where there is a sampler, what was told beside it."""

    check = "tokens"


class TextDiffers(Divergence):
    """What a caller has been told so far: more or less than is certain, or something else than the same request alone."""

    check = "text"


class StreamDiffers(Divergence):
    """What clients were sent, on the rung that has a server: text, ends, usage, errors; or something of them is left."""

    check = "stream"


class CountersDiffer(Divergence):
    """The engine's totals and per-request facts against the sum of its own records."""

    check = "counters"


class SoloDiffers(Divergence):
    """What a caller was told, against the same request run alone: tokens, reason, stop token, usage."""

    check = "solo"


class NotDrained(Divergence):
    """At the end something is held, queued or still running; or the engine stops while work is left."""

    check = "drain"


CLASSES: dict[str, type[Divergence]] = {
    kind.check: kind
    for kind in (
        EngineRaised,
        AuditFailed,
        DecisionsDiffer,
        LedgerDiffers,
        RowsDiffer,
        ReplayDiffers,
        WritesDiffer,
        TokensDiffer,
        TextDiffers,
        StreamDiffers,
        CountersDiffer,
        SoloDiffers,
        NotDrained,
    )
}
ORDER: tuple[str, ...] = tuple(CLASSES)
ALL: frozenset[str] = frozenset(ORDER)
CACHE_ONLY: frozenset[str] = frozenset({"writes"})  # can fire only on a rung that has a cache
SERVER_ONLY: frozenset[str] = frozenset({"stream"})  # can fire only on the rung that has a server
ON_LEDGER: tuple[str, ...] = tuple(check for check in ORDER if check not in CACHE_ONLY | SERVER_ONLY)


def differing(pairs: list[tuple[str, object, object]]) -> tuple[Fact, ...]:
    """Those of (name, engine's value, specification's value) that are not equal, written out."""
    unequal = [pair for pair in pairs if pair[1] != pair[2]]
    return tuple([Fact(name, *_written(mine, theirs)) for name, mine, theirs in unequal]) if unequal else ()


def _written(mine: object, theirs: object) -> tuple[str, str]:
    """Both as text; of two mappings only the entries that differ."""
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return str(mine), str(theirs)
    keys = [key for key in sorted({*mine, *theirs}, key=str) if mine.get(key) != theirs.get(key)]
    return _entries(mine, keys), _entries(theirs, keys)


def _entries(values: Mapping[object, object], keys: list[object]) -> str:
    return ", ".join(f"{key}: {values.get(key, '-')}" for key in keys)


def finding(check: str, iteration: int, facts: tuple[Fact, ...]) -> Finding | None:
    """A finding that names the differing values, or None when there are none."""
    verb = "differs" if len(facts) == 1 else "differ"
    return Finding(check, iteration, f"{', '.join(f.name for f in facts)} {verb}", facts) if facts else None
