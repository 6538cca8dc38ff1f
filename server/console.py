"""What a person sees at start: progress on stderr, then a table, a command to paste and the ready line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

log = structlog.get_logger("lockstep.start")


class StartProgress:
    """One bar per stage on a terminal; elsewhere one log line per stage. Called from the engine thread."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._shown = console.is_terminal
        self._stages: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._shown,
        )

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._stages:
            self._bars.start()
            self._stages[stage] = self._bars.add_task(stage, total=total)
            if not self._shown:
                log.info("starting", stage=stage)
        self._bars.update(self._stages[stage], completed=done, total=total)

    def stop(self) -> None:
        self._bars.stop()


def print_ready(url: str, capacity: Sequence[tuple[str, str]], names: Sequence[str], chat: bool) -> None:
    """The last line is fixed: scripts and tests wait for it."""
    capacity = [*capacity, ("served as", ", ".join(names)), ("metrics", f"{url}/metrics"), ("page", f"{url}/")]
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
