"""Calling what is under test: whatever it raises comes back as one exception with its place, and so does a call without end.

A timer of the CPU time of this process (wall time would judge the machine) ticks while a run lasts; only ticks inside one and
the same guarded call count, so that neither slow checks nor long workloads are taken for an engine that loops. It needs
signals, so it works in the main thread; elsewhere a call may take for ever.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from properties.checks import Finding

CPU_SECONDS = 20.0  # for one call; an iteration of the slowest rung takes hundredths of one
TICKS = 20  # of the timer until a call is given up

_ROOT = Path(__file__).resolve().parent.parent
_OVERTIME = "an iteration took more than"
T = TypeVar("T")


class Overtime(BaseException):
    """Raised inside a call that takes too long. No ``Exception``: what is under test catches those."""


class Guard:
    """Bounds the calls made through it while it is entered. Not reentrant across threads; nested calls share the bound."""

    def __init__(self, seconds: float = CPU_SECONDS) -> None:
        """``seconds`` of CPU time, of all threads of the process, for one call."""
        self.seconds = seconds
        self._ticks = 0
        self._depth = 0
        self._before: Any = None
        self._timer: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGVTALRM, self._tick)
            self._timer = signal.setitimer(signal.ITIMER_VIRTUAL, self.seconds / TICKS, self.seconds / TICKS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, self._before)
            signal.setitimer(signal.ITIMER_VIRTUAL, *self._timer)
            self._timer = None

    def __call__(self, call: Callable[[], T]) -> T:
        """Raises what the call raises, or ``Overtime``, also when the call swallowed that one and returned."""
        if not self._depth:
            self._ticks = 0
        self._depth += 1
        try:
            result = call()
        finally:
            self._depth -= 1
        if self._ticks >= TICKS:
            raise Overtime
        return result

    def _tick(self, number: int, frame: Any) -> None:
        self._ticks += self._depth > 0
        if self._depth and self._ticks >= TICKS:
            raise Overtime  # at every tick from now on, in case somebody swallows it

    def told(self, error: BaseException) -> str:
        """One line: what was raised and where, the place relative to the repository."""
        at = place(error)
        if isinstance(error, Overtime):
            return f"{_OVERTIME} {self.seconds:g} s of CPU time" + (f" (it was at {at})" if at else "")
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"{text} at {at}" if at else text


def overtime(found: Finding) -> bool:
    """Whether running this again takes as long again."""
    return found.check == "raises" and found.headline.startswith(_OVERTIME)


def place(error: BaseException) -> str | None:
    """File and line of the innermost frame that is the repository's own or an armed fault's; None without one."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == __file__:
            continue
        path = Path(frame.filename)
        if frame.filename.endswith(" with a fault>"):
            found = f"{frame.filename}:{frame.lineno}"
        elif path.is_relative_to(_ROOT) and "site-packages" not in path.parts:
            found = f"{path.relative_to(_ROOT)}:{frame.lineno}"
    return found
