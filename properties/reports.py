"""What a request is told beside its tokens, against the same request alone: logprobs, those of its prompt, digests of its logits.

Compared to the last bit: a report is made from a row of logits, so that of a neighbour, or of another position, is a different
one even where the token happens to be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.control.plan import Logprobs, Sampled
from engine.control.record import StepRecord
from properties.checks import Fact
from properties.diff import Known


class Oracle(Protocol):
    def sample(self, request: int, k: int) -> Sampled | None:
        """All that the k-th token (from 0) of a request that runs alone comes with; None where nothing but it was asked for."""
        ...


class Reports:
    """``happened``: how often there was something to compare."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.happened: Counter[str] = Counter()

    def facts(self, record: StepRecord, known: Mapping[int, Known]) -> tuple[Fact, ...]:
        """``known``: each request with its tokens before this step. A wrong token is told elsewhere, its reports are not."""
        facts: list[Fact] = []
        for request, got in record.sampled:
            caller = known.get(request)
            if caller is None:
                continue
            k = len(caller.tokens) - caller.prompt_len
            alone = self._oracle.sample(request, k)
            if alone is None:
                facts += _differing(request, k, got, Sampled(got.token))
            elif alone.token == got.token:
                self._count(alone)
                facts += _differing(request, k, got, alone)
        return tuple(facts)

    def _count(self, alone: Sampled) -> None:
        self.happened["logprobs compared"] += alone.logprobs is not None
        self.happened["prompt logprobs compared"] += bool(alone.prompt)
        self.happened["logits digests compared"] += alone.digest is not None


def told(
    record: StepRecord, known: Mapping[int, Known], asked: Callable[[int], Mapping[str, bool]]
) -> tuple[Fact, ...]:
    """Whether each request is told what it ``asked`` for and nothing else, where what it says is of no account: who sits in
    somebody's row does not take over what that one wanted."""
    facts = []
    for request, got in record.sampled:
        caller = known.get(request)
        if caller is None:
            continue
        k = len(caller.tokens) - caller.prompt_len
        given = {"logprobs": got.logprobs, "logits digest": got.digest, "prompt logprobs": got.prompt}
        for name, wanted in asked(request).items():
            due = wanted and (k == 0 or name != "prompt logprobs")
            if due != (given[name] is not None):
                said = ("told", "not told") if not due else ("not told", "told")
                facts.append(Fact(f"{name} with token {k} of r{request}", *said))
    return tuple(facts)


def _differing(request: int, k: int, got: Sampled, alone: Sampled) -> list[Fact]:
    pairs = [
        (f"logprobs of token {k} of r{request}", _bits(got.logprobs), _bits(alone.logprobs)),
        (f"logits digest of token {k} of r{request}", str(got.digest), str(alone.digest)),
    ]
    if (got.prompt is None) != (alone.prompt is None):
        pairs.append((f"prompt logprobs with token {k} of r{request}", _told(got), _told(alone)))
    for at, (mine, theirs) in enumerate(zip(got.prompt or (), alone.prompt or (), strict=False), 1):
        pairs.append((f"logprobs of prompt token {at} of r{request}", _bits(mine), _bits(theirs)))
    pairs.append((f"prompt logprobs of r{request}", str(len(got.prompt or ())), str(len(alone.prompt or ()))))
    return [Fact(*pair) for pair in pairs if pair[1] != pair[2]]


def _told(sampled: Sampled) -> str:
    return "none" if sampled.prompt is None else "told"


def _bits(report: Logprobs | None) -> str:
    """Exact: the shortest text that reads as the same number, and -0.0 is not 0.0."""
    return "none" if report is None else f"{report.chosen!r} rank {report.rank} {report.top!r}"
