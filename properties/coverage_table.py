"""How many decode steps replay, for servers of 8 to 256 rows and four mixes of answer lengths, in both batch modes.

Twice as many requests as rows arrive at once in an ample pool, with an unlimited budget, so whoever is admitted decodes in the
next iteration. What must hold then: with the persistent batch every decode step replays, and rows move at most as often as rows
were given back, since nothing but a release makes a hole. Engine and specification run in lockstep for each line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from properties.experiments import UNLIMITED, Experiment, coverage, coverage_workload

ROWS = (8, 16, 32, 64, 256)
MIXES = ((16,), (8, 16), (4, 32), (4, 8, 16, 32))
REQUESTS = 2  # for each row
STORED = Path(__file__).parents[1] / "ci" / "coverage.md"
COMMAND = "python -m properties coverage --table --output ci/coverage.md"


@attrs.frozen
class Mode:
    """Decode steps of one batch mode. ``releases``: rows given back, by requests that ended or were preempted."""

    decode_steps: int
    replayed: int
    scattered: int
    moves: int
    releases: int


@attrs.frozen
class Line:
    rows: int
    lengths: tuple[int, ...]
    free: Mode
    persistent: Mode

    def complaints(self) -> list[str]:
        name = f"{self.rows} rows, lengths {_mix(self.lengths)}"
        said = []
        if self.persistent.moves > self.persistent.releases:
            said.append(
                f"{name}: {self.persistent.moves} moves, but only {self.persistent.releases} rows were given back"
            )
        if self.persistent.replayed != self.persistent.decode_steps:
            said.append(f"{name}: {self.persistent.replayed} of {self.persistent.decode_steps} decode steps replay")
        if self.free.moves:
            said.append(f"{name}: {self.free.moves} moves without the persistent batch")
        if self.free.decode_steps != self.persistent.decode_steps:
            said.append(
                f"{name}: {self.free.decode_steps} decode steps in one mode, {self.persistent.decode_steps} in the other"
            )
        return said


class Differs(AssertionError):
    """Engine and specification differ in a run of the table."""

    def __init__(self, ran: Experiment) -> None:
        assert ran.violated is not None
        super().__init__(
            f"{ran.workload.title}: {ran.violated.check} at {ran.violated.iteration}: {ran.violated.headline}"
        )
        self.ran = ran


def lines(rows: Iterable[int] = ROWS, mixes: Sequence[tuple[int, ...]] = MIXES) -> Iterator[Line]:
    """Raises ``Differs``."""
    for number in rows:
        for mix in mixes:
            yield Line(number, mix, mode(number, mix, persistent_batch=False), mode(number, mix, persistent_batch=True))


def mode(
    rows: int, lengths: Sequence[int], *, persistent_batch: bool, prompt: int = 4, budget: int = UNLIMITED
) -> Mode:
    workload = coverage_workload(
        rows, REQUESTS * rows, lengths, prompt=prompt, budget=budget, persistent_batch=persistent_batch
    )
    ran = coverage(workload)
    if ran.violated is not None:
        raise Differs(ran)
    releases = sum(len(step.step["reaped"]) + len(step.step["preempted"]) for step in ran.outcome.steps)
    figures = {name: int(value) for name, value in ran.figures.items()}
    return Mode(**figures, releases=releases)


def complaints(listed: Iterable[Line]) -> list[str]:
    return [complaint for line in listed for complaint in line.complaints()]


def page(listed: Sequence[Line]) -> str:
    """The whole table, in Markdown."""
    told = [
        "# How many decode steps replay",
        "",
        f"Written by `{COMMAND}`. Two requests for each row arrive at once, prompts of 4 tokens, the lengths of",
        "their answers cycled; an ample pool, an unlimited budget, the prefix cache off, every row count recorded. Engine and",
        "specification ran in lockstep for each line. A step is scattered when its rows are not 0..d-1, and then runs eagerly.",
        "With the persistent batch every step replays, and rows move at most as often as they were given back.",
        "",
        "| rows | lengths | steps | free rows: replayed | scattered | persistent: replayed | scattered | moves | released |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for line in listed:
        free, kept = line.free, line.persistent
        share = f"{free.replayed} ({free.replayed / max(1, free.decode_steps):.0%})"
        cells = [line.rows, _mix(line.lengths), kept.decode_steps, share, free.scattered]
        cells += [kept.replayed, kept.scattered, kept.moves, kept.releases]
        told.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(told) + "\n"


def _mix(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))
