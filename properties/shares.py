"""How much of the hunt runs on the rungs that compute or serve: the same workloads cost more there, so there are fewer of them.

``pytest properties`` runs every rung. The shares keep the whole within a few minutes on two cores in the profiles dev and gate.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from hypothesis import settings
from hypothesis.strategies import SearchStrategy

from engine.trace import Workload
from properties import corpus
from properties.profiles import Profile, current
from properties.sampled import with_sampling
from properties.strategies import workloads


@attrs.frozen
class Share:
    """``shards`` tests of ``examples`` workloads each."""

    shards: int
    examples: int

    def settings(self, profile: Profile) -> settings:
        return settings(profile.settings, max_examples=self.examples)

    def saved(self, shard: int) -> list[Workload]:
        """This shard's part of the corpus. Every saved workload holds on every rung, whichever it was found on."""
        return [with_sampling(workload) for workload in list(corpus.workloads().values())[shard :: self.shards]]


ROWS: Mapping[str, Share] = {"dev": Share(2, 60), "gate": Share(4, 150), "hunt": Share(32, 2000)}
STAGED: Mapping[str, Share] = {"dev": Share(1, 30), "gate": Share(2, 120), "hunt": Share(32, 2000)}
TINY: Mapping[str, Share] = {"dev": Share(2, 15), "gate": Share(4, 60), "hunt": Share(32, 400)}
NATIVE: Mapping[str, Share] = {"dev": Share(2, 25), "gate": Share(4, 80), "hunt": Share(32, 1000)}
GPU: Mapping[str, Share] = {"dev": Share(1, 15), "gate": Share(1, 100), "hunt": Share(4, 1000)}
WIRE: Mapping[str, Share] = {"dev": Share(2, 40), "gate": Share(3, 80), "hunt": Share(32, 2000)}


def share(of: Mapping[str, Share]) -> Share:
    return of[current().name]


def sampled_workloads() -> SearchStrategy[Workload]:
    """Generated workloads with temperatures and seeds."""
    return workloads().map(with_sampling)
