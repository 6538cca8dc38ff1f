"""Iterations in lockstep a second on one core: how fast the search is, with plain numbers and with Hypothesis.

CPU time of this process, so that what else the machine does changes little. Every iteration is compared whole; ``without``
leaves checks out, to say what they cost. A figure for people: no test looks at it.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from io import StringIO

import attrs

from engine.trace import Workload
from properties.checks import ALL
from properties.hunt import numbered
from properties.lockstep import run
from properties.rungs import RUNGS, MakeRung

SEED = 1


@attrs.frozen
class Rate:
    rung: str
    source: str  # plain or hypothesis
    without: tuple[str, ...]
    workloads: int
    iterations: int
    seconds: float

    @property
    def iterations_per_second(self) -> float:
        return self.iterations / max(self.seconds, 1e-9)

    def line(self) -> str:
        left_out = f", without {', '.join(self.without)}" if self.without else ""
        return (
            f"{self.rung:7} {self.source + left_out:26} {self.iterations_per_second:9,.0f} iterations/s "
            f"({self.workloads} workloads, {self.iterations} iterations, {self.seconds:.1f} CPU s)"
        )


def plain(rung: str, count: int, without: frozenset[str] = frozenset()) -> Rate:
    """The hunter's own workloads, made and run."""
    make_rung, checks = RUNGS[rung], ALL - without
    run(numbered(SEED, 0), make_rung=make_rung)  # whatever is made once is made now
    start = time.process_time()
    iterations = sum(_run(numbered(SEED, number), make_rung, checks) for number in range(count))
    return Rate(rung, "plain", tuple(sorted(without)), count, iterations, time.process_time() - start)


def with_hypothesis(rung: str, count: int) -> Rate:
    """The same shapes drawn by Hypothesis, which remembers how each was drawn so that it could shrink it."""
    from hypothesis import HealthCheck, Phase, given, settings  # what serving installs has no Hypothesis

    from properties.strategies import workloads

    make_rung = RUNGS[rung]
    ran: list[int] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(w=workloads())
    def property_of(w: Workload) -> None:
        ran.append(_run(w, make_rung, ALL))

    start = time.process_time()
    property_of()
    return Rate(rung, "hypothesis", (), len(ran), sum(ran), time.process_time() - start)


def profile(rung: str, count: int, lines: int) -> str:
    """Where the time goes: cProfile's table by own time, of the plain hunter."""
    profiler = cProfile.Profile()
    profiler.runcall(plain, rung, count)
    out = StringIO()
    pstats.Stats(profiler, stream=out).strip_dirs().sort_stats("tottime").print_stats(lines)
    return out.getvalue()


def _run(workload: Workload, make_rung: MakeRung, checks: frozenset[str]) -> int:
    return len(run(workload, make_rung=make_rung, checks=checks).steps)
