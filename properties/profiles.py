"""How hard to search: our own named profiles, chosen by ``LOCKSTEP_PROFILE``, never Hypothesis's automatic ``ci``.

dev     new workloads every time, few of them; failures are remembered in .hypothesis
gate    the same workloads every time, so that a change is judged by itself; the default where CI is set
hunt    many new workloads, for hours
"""

from __future__ import annotations

import os

import attrs
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase


@attrs.frozen
class Profile:
    """``shards`` tests of ``examples`` workloads each; a shard is what one xdist worker can take."""

    name: str
    shards: int
    examples: int
    settings: settings

    def __str__(self) -> str:
        how = "the same every time" if self.settings.derandomize else "new ones every time"
        return f"{self.name}: {self.shards} shards of {self.examples} workloads, {how}"


def _profile(name: str, shards: int, examples: int, *, same: bool, phases: tuple[Phase, ...]) -> Profile:
    made = settings(
        max_examples=examples,
        derandomize=same,
        deadline=None,  # a slow machine is no bug; the driver bounds iterations instead
        phases=phases,
        print_blob=False,  # the saved file is the record
        suppress_health_check=[HealthCheck.too_slow],
        database=None if same else DirectoryBasedExampleDatabase(".hypothesis/examples"),
    )
    settings.register_profile(f"lockstep-{name}", made)
    return Profile(name, shards, examples, made)


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _profile("dev", 4, 50, same=False, phases=tuple(Phase)),
        _profile("gate", 8, 400, same=True, phases=(Phase.explicit, Phase.generate, Phase.shrink)),
        _profile("hunt", 32, 5000, same=False, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)),
    )
}


def current() -> Profile:
    """Raises ``ValueError`` when ``LOCKSTEP_PROFILE`` names no profile."""
    ci = os.environ.get("CI", "").lower() in ("1", "true")
    name = os.environ.get("LOCKSTEP_PROFILE") or ("gate" if ci else "dev")
    if name not in PROFILES:
        raise ValueError(f"LOCKSTEP_PROFILE is {name!r}, but must be one of {', '.join(PROFILES)}")
    return PROFILES[name]
