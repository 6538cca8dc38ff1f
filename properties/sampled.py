"""How a workload's requests are sampled, as a value that can be a key, and as what travels to the runner.

It is what ``Engine.submit`` makes of the same request, except that a seed which is not given is settled as 0: a workload
must say all that decides a run.
"""

from __future__ import annotations

import attrs

from engine.engine import choice_seed
from engine.request import SamplingParams, SamplingSpec
from engine.trace import Submit


@attrs.frozen
class Sampling:
    """``masked`` are the ids that cannot be sampled before ``min_tokens``."""

    temperature: float
    seed: int
    min_tokens: int
    masked: tuple[int, ...]

    @property
    def spec(self) -> SamplingSpec:
        params = SamplingParams(temperature=self.temperature, min_tokens=self.min_tokens, ignore_eos=True)
        return SamplingSpec(params, self.seed, self.masked)


def sampling_of(event: Submit, stop_ids: frozenset[int]) -> list[Sampling]:
    """One for each choice of a submission."""
    masked = tuple(sorted(stop_ids)) if event.min_tokens else ()
    return [
        Sampling(event.temperature, choice_seed(event.seed or 0, choice), event.min_tokens, masked)
        for choice in range(event.n)
    ]
