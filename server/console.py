"""What a person sees at start: at once that it loads, then the stages on stderr, a table, a command to paste and the ready line.

Imports neither torch nor FastAPI, whose own import is the first stage.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine import __version__

log = structlog.get_logger("lockstep.start")


class StartProgress:
    """Where the time of the start goes: a line when it begins and one for each stage that has ended, with its seconds; on a
    terminal also a bar for the one that runs. The engine calls it from its own thread. Lines are log lines where nobody watches.

    A stage may be told when it begins (``done`` is 0), or not before its first piece is done; it then began where the one
    before it ended: at that one's last call, or now, if that one was not done.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._shown = self._console.is_terminal
        self._clock = clock
        self._start = self._ended = clock()
        self._stage: str | None = None  # the one that runs
        self._began = self._start
        self._whole = False  # what was told of it last was its end
        self._lock = threading.Lock()
        self._bar: TaskID | None = None
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._shown,
        )
        if self._shown:
            self._console.print(f"Lockstep {__version__}: loading {what}", markup=False)
        else:
            log.info("loading", version=__version__, model=what)

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            now = self._clock()
            if stage != self._stage:
                self._close(self._ended if self._whole else now)
                self._stage, self._began = stage, now if done == 0 else self._ended
                if not self._shown and done < total:
                    log.info("starting", stage=stage)
                if done < total:
                    self._bars.start()
                    self._bar = self._bars.add_task(stage, total=total)
            self._ended, self._whole = now, done == total
            if self._bar is not None:
                self._bars.update(self._bar, completed=done, total=total)

    def begin(self, stage: str) -> None:
        """A stage whose pieces nobody counts."""
        self(stage, 0, 1)

    def stop(self) -> float:
        """The end of the last stage, or of the start as a whole, whatever became of it; seconds since it began. Twice is once."""
        with self._lock:
            self._close(self._ended if self._whole else self._clock())
            self._bars.stop()
            return self._clock() - self._start

    def _close(self, when: float) -> None:
        stage, self._stage = self._stage, None
        if self._bar is not None:
            self._bars.remove_task(self._bar)
            self._bar = None
        if stage is None:
            return
        self._ended = when
        seconds = round(when - self._began, 1)
        if self._shown:
            self._console.print(f"  {stage:44} {seconds:6.1f} s", markup=False)
        else:
            log.info("done", stage=stage, seconds=seconds)


def print_ready(
    url: str, capacity: Sequence[tuple[str, str]], names: Sequence[str], chat: bool, seconds: float
) -> None:
    """``seconds`` is what the start took. The last line is fixed: scripts and tests wait for it."""
    capacity = [*capacity, ("served as", ", ".join(names)), ("metrics", f"{url}/metrics"), ("page", f"{url}/")]
    capacity.append(("started in", f"{seconds:.1f} s"))
    if sys.stdout.isatty():
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in capacity:
            table.add_row(name, value)
        Console().print(table, markup=False)
    else:  # a log file has no width to fit into
        width = max(len(name) for name, _ in capacity) + 2
        print("\n".join(f"{name:{width}}{value}" for name, value in capacity))
    print(f"\n{curl(url, names[0], chat)}\n\nLockstep is ready on {url}", flush=True)


def curl(url: str, model_name: str, chat: bool) -> str:
    """A request that can be pasted into a shell."""
    body: dict[str, Any] = {"model": model_name}
    if chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The capital of France is"
    body |= {"max_tokens": 32, "temperature": 0}
    data = json.dumps(body).replace("'", "'\\''")
    return f"curl -s {url}{path} -H 'Content-Type: application/json' -d '{data}'"
