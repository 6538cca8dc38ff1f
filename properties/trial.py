"""How a workload is run: on which rung of our engine, with which fault armed, or against whose scheduler.

Plain names only, so that a hunt can hand it to its processes and a saved failure can be replayed by what stands on one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from engine.trace import Shape, Workload
from properties.checks import Finding
from properties.faults import armed
from properties.floors import floors_of
from properties.lockstep import Run, run
from properties.rungs import RUNGS


@attrs.frozen
class Trial:
    """``subject`` is MODULE:FUNCTION; with it, rung and fault, which are of our engine, do not count."""

    rung: str = "ledger"
    fault: str | None = None
    subject: str | None = None

    def run(self, workload: Workload, *, until: int | None = None) -> Run:
        """Raises ``ValueError`` when there is no such subject."""
        if self.subject is not None:
            from properties.subject import find
            from properties.subject_run import run_subject

            return run_subject(workload, find(self.subject), until=until)
        with armed(self.fault):
            return run(workload, make_rung=RUNGS[self.rung], until=until)

    def floors(self, shape: Shape) -> Mapping[str, float]:
        """What must have happened in a hunt that found nothing; ``shape`` is one of those that it ran."""
        if self.subject is None:
            return floors_of(self.rung)
        from properties.subject import find
        from properties.subject_run import floors_for

        return floors_for(find(self.subject), shape)

    def flags(self) -> str:
        """As they stand on the command line, each with a space before it."""
        if self.subject is not None:
            return f" --subject {self.subject}"
        rung = "" if self.rung == "ledger" else f" --rung {self.rung}"
        return rung + (f" --arm {self.fault}" if self.fault else "")

    def command(self, path: Path, found: Finding | None) -> str:
        """What replays a file, up to the finding."""
        until = "" if found is None else f" --until {found.iteration}"
        return f"python -m properties replay {path}{self.flags()}{until}"
