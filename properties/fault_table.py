"""Every fault hunted as a person would: armed, searched on its rung, shrunk, saved, and replayed by the command line.

What must hold for each: found within a minute, a file of at most eight events (four in the middle), and a replay of that file
that exits with 1. The replay is a fresh process, so its time is what waiting for it costs, imports included.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs

from properties.faults import CATALOGUE
from properties.finds import keep
from properties.killing import first_kill, outcome, reduced
from properties.trial import Trial

SECONDS = 60.0  # until a hunt counts as failed
MOST_EVENTS = 8
MEDIAN_EVENTS = 4

Progress = Callable[[int, int, str], None]


@attrs.frozen
class Line:
    """One hunt. ``events`` and what follows are None where nothing was found; ``replay``: seconds of the whole command."""

    fault: str
    rung: str
    title: str
    seconds: float
    workloads: int
    events: int | None = None
    check: str | None = None
    iteration: int | None = None
    exit: int | None = None
    replay: float | None = None

    def complaints(self) -> list[str]:
        if self.events is None:
            return [f"{self.fault} was not found in {self.seconds:.0f} s ({self.workloads} workloads)"]
        said = []
        if self.events > MOST_EVENTS:
            said.append(f"{self.fault}: its file has {self.events} events, but at most {MOST_EVENTS} are allowed")
        if self.exit != 1:
            said.append(f"{self.fault}: the replay of its file exits {self.exit}, not 1")
        return said


def hunt_each(
    faults: Iterable[str], folder: Path, *, seed: int = 1, seconds: float = SECONDS, progress: Progress | None = None
) -> Iterator[Line]:
    """One line a fault, as soon as it is known; the files go to ``folder``."""
    listed = list(faults)
    for number, fault in enumerate(listed, 1):
        if progress is not None:
            progress(number, len(listed), fault)
        yield hunt_one(fault, folder, seed=seed, seconds=seconds)


def hunt_one(fault: str, folder: Path, *, seed: int = 1, seconds: float = SECONDS) -> Line:
    entry = CATALOGUE[fault]
    kill = first_kill(fault, seed, seconds=seconds)
    if kill is None:
        return Line(fault, entry.rung, entry.title, seconds, 0)
    small, found, _ = reduced(kill, fault)
    path = folder / f"{fault}.json"
    trial = Trial(entry.rung, fault)
    keep(small, outcome(small, fault), found, path, by={"by": "faults", "seed": seed}, trial=trial)
    started = time.monotonic()
    command = [sys.executable, "-m", "properties", "replay", str(path), "--rung", entry.rung, "--arm", fault]
    code = subprocess.run(command, capture_output=True, check=False).returncode
    spent = time.monotonic() - started
    return Line(
        fault,
        entry.rung,
        entry.title,
        round(kill.seconds, 2),
        kill.workloads,
        len(small.events),
        found.check,
        found.iteration,
        code,
        round(spent, 2),
    )


def complaints(lines: list[Line]) -> list[str]:
    """Why the table fails; empty when it holds."""
    said = [complaint for line in lines for complaint in line.complaints()]
    events = [line.events for line in lines if line.events is not None]
    if events and statistics.median(events) > MEDIAN_EVENTS:
        said.append(
            f"the files have {statistics.median(events):g} events in the middle, at most {MEDIAN_EVENTS} are allowed"
        )
    return said


def stored(path: Path) -> list[Line]:
    return [Line(**line) for line in json.loads(path.read_text(encoding="utf-8"))]


def write(lines: list[Line], folder: Path) -> None:
    """faults.json, one line a fault, and faults.md."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = sorted(lines, key=lambda line: line.fault)
    rows = ",\n ".join(json.dumps(attrs.asdict(line)) for line in listed)
    (folder / "faults.json").write_text(f"[{rows}]\n", encoding="utf-8")
    (folder / "faults.md").write_text(page(listed), encoding="utf-8")


def page(lines: list[Line]) -> str:
    return "\n".join(_page(lines)) + "\n"


def summary(lines: list[Line]) -> str:
    found = [line for line in lines if line.events is not None]
    if not found:
        return f"0 of {len(lines)} faults found"
    events = sorted(line.events for line in found if line.events is not None)
    times = sorted(line.seconds for line in found)
    return (
        f"{len(found)} of {len(lines)} faults found, in {statistics.median(times):g} s in the middle and at most {times[-1]:g}; "
        f"files of {statistics.median(events):g} events in the middle and {events[-1]} at most; "
        f"{sum(line.exit == 1 for line in found)} replays exit 1"
    )


def _page(lines: list[Line]) -> Iterator[str]:
    yield "# Every fault, hunted"
    yield ""
    yield "Written by `python -m properties faults`. Each fault is armed alone and hunted with generated workloads on its rung;"
    yield "what fails is shrunk, saved and replayed by a fresh process. Seconds are wall time on a busy machine of two cores."
    yield ""
    yield summary(lines) + "."
    yield ""
    yield "| fault | what is wrong | rung | seconds | workloads | events | check | replay exits | replay seconds |"
    yield "|---|---|---|--:|--:|--:|---|--:|--:|"
    for line in lines:
        events = "" if line.events is None else line.events
        replay = "" if line.replay is None else f"{line.replay:.2f}"
        told = [
            line.seconds,
            line.workloads,
            events,
            line.check or "not found",
            "" if line.exit is None else line.exit,
            replay,
        ]
        yield f"| {line.fault} | {line.title} | {line.rung} | " + " | ".join(map(str, told)) + " |"
