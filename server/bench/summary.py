"""What a set of answers says: latencies, rates, and how much of it was good enough.

TTFT     time to first token, from when the request was due
ITL      inter-token latency: the gaps between the events of an answer
TPOT     time per output token after the first
goodput  requests per second that met every limit given
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from server.bench.client import Answer

QUANTILES = (50, 90, 99)


@attrs.frozen
class Limits:
    """What counts as good, in milliseconds; None is no limit."""

    ttft: float | None = None
    itl: float | None = None  # of the slowest gap in an answer
    tpot: float | None = None

    def met(self, answer: Answer) -> bool:
        if answer.error is not None:
            return False
        pairs = (
            (self.ttft, answer.ttft),
            (self.itl, max(answer.gaps, default=0.0)),
            (self.tpot, answer.tpot or 0.0),
        )
        return all(limit is None or seconds * 1000 <= limit for limit, seconds in pairs)

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in attrs.astuple(self))


def quantile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank quantile: a value that did occur. NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


@attrs.frozen
class Summary:
    """Seconds and rates; ``latencies`` in milliseconds by name and quantile."""

    name: str
    requests: int
    failed: int
    errors: Mapping[str, int]
    wall: float
    prompt_tokens: int
    output_tokens: int
    latencies: Mapping[str, Mapping[str, float]]
    goodput: float | None

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.wall if self.wall else math.nan

    @property
    def request_rate(self) -> float:
        return (self.requests - self.failed) / self.wall if self.wall else math.nan

    def plain(self) -> dict[str, Any]:
        rates = {"output_tokens_per_s": self.output_rate, "requests_per_s": self.request_rate}
        return {key: _finite(value) for key, value in {**attrs.asdict(self), **rates}.items()}


def _finite(value: Any) -> Any:
    """NaN is no JSON."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarise(name: str, answers: Sequence[Answer], limits: Limits | None = None) -> Summary:
    good = [answer for answer in answers if answer.error is None]
    wall = max((a.end for a in answers), default=0.0) - min((a.due for a in answers), default=0.0)
    series = {
        "ttft": [answer.ttft for answer in good],
        "itl": [gap for answer in good for gap in answer.gaps],
        "tpot": [answer.tpot for answer in good if answer.tpot is not None],
        "e2e": [answer.end - answer.due for answer in good],
    }
    latencies = {
        name: {
            "mean": statistics.fmean(values) * 1000 if values else math.nan,
            **{f"p{percent}": quantile(values, percent) * 1000 for percent in QUANTILES},
        }
        for name, values in series.items()
    }
    met = sum(limits.met(answer) for answer in answers) if limits is not None and limits.given else None
    return Summary(
        name=name,
        requests=len(answers),
        failed=len(answers) - len(good),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
        wall=wall,
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in good),
        output_tokens=sum(answer.output_tokens or 0 for answer in good),
        latencies=latencies,
        goodput=None if met is None else met / wall,
    )
