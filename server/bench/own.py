"""A server of our own for the time of a benchmark: started, awaited, measured and ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

_READY = "Lockstep is ready on "


class StartFailed(RuntimeError):
    """The server did not come up; the message holds the end of what it printed."""


@attrs.frozen
class Running:
    url: str
    pid: int
    start_seconds: float

    def memory_mib(self) -> float | None:
        """Resident memory; None where /proc does not tell."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return None
        kib = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), None)
        return None if kib is None else kib / 1024


@contextmanager
def served(arguments: Sequence[str], patience: float = 600.0) -> Iterator[Running]:
    """Runs ``python -m server`` with ``arguments`` on a free port until the block is left. Raises ``StartFailed``."""
    began = time.monotonic()
    command = [sys.executable, "-m", "server", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    found = threading.Event()
    url: list[str] = []

    def read() -> None:  # to the end: a pipe that nobody empties would stop the server
        assert process.stdout is not None
        for line in process.stdout:
            del lines[:-50]
            lines.append(line)
            if line.startswith(_READY):
                url.append(line.removeprefix(_READY).strip())
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not found.wait(patience) or not url:
            raise StartFailed("the server did not start:\n" + "".join(lines[-20:]))
        yield Running(url[0], process.pid, time.monotonic() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
