"""The parent's side of a measurement: a process per contestant, stopped while it is not asked, ended at the end.

A stopped process (SIGSTOP) spins in no barrier and polls nothing, so what one engine leaves running cannot slow another.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import attrs

from server.bench.client import Target
from server.bench.load import closed
from server.bench.offline.contestants import Contestant
from server.bench.own import served
from server.bench.requests import Ask

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 300.0
_TICK = os.sysconf("SC_CLK_TCK")


class WorkerFailed(Exception):
    """A contestant that did not start, raised, or made the wrong number of tokens; the message says what it said."""


class TooSlow(WorkerFailed):
    """It did not answer within the time that it was given; the process is gone."""


@attrs.frozen
class Reading:
    """One run of a list: seconds, see drive.py. ``foreign``: cores that others kept busy meanwhile."""

    wall: float
    first: float
    last: float
    tokens: list[list[int]] = attrs.field(repr=False)
    foreign: float = 0.0


class Worker:
    """Started by ``start``; every other method needs that."""

    def __init__(self, contestant: Contestant, threads: int) -> None:
        self.contestant = contestant
        self.facts: Mapping[str, Any] = {}
        self.start_seconds = 0.0
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log: IO[bytes] | None = None

    def start(self) -> None:
        """Raises ``WorkerFailed``."""
        began = time.perf_counter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process is
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            self.contestant.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(self._threads),
            process_group=0,  # of the same session as the others: kernels may share time by session
        )
        self._reader = threading.Thread(target=_read, args=(self._process, self._lines), daemon=True)
        self._reader.start()
        self.facts = self._next(START_SECONDS)["ready"]
        self.start_seconds = time.perf_counter() - began
        self._signal(signal.SIGSTOP)

    def run(self, asks: Sequence[Ask], patience: float, hits: bool = True) -> Reading:
        """Raises ``WorkerFailed``, and ``TooSlow`` after ``patience`` seconds."""
        requests = [{"prompt": list(ask.prompt), "gen": ask.gen} for ask in asks]
        busy = Busy(self._pid)
        answer = self.ask({"requests": requests, "hits": hits}, patience)
        return Reading(**answer, foreign=busy.foreign())

    def ask(self, value: Mapping[str, Any], patience: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
            answer = self._next(patience)
        except BrokenPipeError:
            raise WorkerFailed(f"{self.contestant.name} ended: {self._said()}") from None
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise WorkerFailed(f"{self.contestant.name}: {answer['error']}")
        return answer

    def memory(self) -> tuple[float, float]:
        """Resident memory now and at its highest, MiB."""
        return memory(self._pid)

    def close(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._reader.join()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _next(self, patience: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            self.close()
            raise TooSlow(f"{self.contestant.name} took more than {patience:.0f} s") from None
        if line is None:
            raise WorkerFailed(f"{self.contestant.name} ended: {self._said()}")
        value: dict[str, Any] = json.loads(line)
        return value

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._pid, number)

    def _said(self) -> str:
        """The last lines of its standard error."""
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-4:]) or "it said nothing"


class HttpWorker(Worker):
    """The same lists against ``python -m server``: one client for each request of a list, all at once."""

    def start(self) -> None:
        self._stack = ExitStack()
        arguments = ["--threads", str(self._threads), "--model", str(self.contestant.model)]
        self._running = self._stack.enter_context(served(arguments))
        self.start_seconds = self._running.start_seconds
        self.facts = {"engine": "lockstep", "transport": "HTTP, streamed"}
        os.kill(self._running.pid, signal.SIGSTOP)

    def run(self, asks: Sequence[Ask], patience: float, hits: bool = True) -> Reading:
        target = Target(self._running.url, "default", "generate")
        busy = Busy(self._running.pid)
        os.kill(self._running.pid, signal.SIGCONT)
        try:
            answers = asyncio.run(asyncio.wait_for(closed(target, asks, len(asks)), patience))
        except TimeoutError:
            raise TooSlow(f"{self.contestant.name} took more than {patience:.0f} s") from None
        foreign = busy.foreign()
        os.kill(self._running.pid, signal.SIGSTOP)
        for answer, ask in zip(answers, asks, strict=True):
            if answer.error is not None or answer.output_tokens != ask.gen:
                told = answer.error or f"{answer.output_tokens} tokens instead of {ask.gen}"
                raise WorkerFailed(f"{self.contestant.name}: {told}")
        begin = min(answer.due for answer in answers)
        lead = answers[0].arrivals
        wall = max(answer.end for answer in answers) - begin
        return Reading(wall, lead[0] - begin, lead[-1] - begin, [], foreign)

    def memory(self) -> tuple[float, float]:
        return memory(self._running.pid)

    def close(self) -> None:
        if hasattr(self, "_running"):
            os.kill(self._running.pid, signal.SIGCONT)
            self._stack.close()


def worker(contestant: Contestant, threads: int) -> Worker:
    return (Worker if contestant.command else HttpWorker)(contestant, threads)


def environment(threads: int) -> dict[str, str]:
    """Of a worker: this code is importable, nothing is fetched, and every library gets the same number of threads."""
    own = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**os.environ, **own, **counts}


def memory(pid: int) -> tuple[float, float]:
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    now, peak = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


class Busy:
    """How many cores others than ``pid`` and this process keep busy, from now until it is asked."""

    def __init__(self, pid: int) -> None:
        self._pids = (pid, os.getpid())
        self._began, self._total, self._own = time.perf_counter(), _busy(), self._theirs()

    def foreign(self) -> float:
        elapsed = time.perf_counter() - self._began
        ticks = (_busy() - self._total) - (self._theirs() - self._own)
        return max(0.0, ticks / _TICK / elapsed) if elapsed > 0 else 0.0

    def _theirs(self) -> int:
        total = 0
        for pid in self._pids:
            after = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(after[11]) + int(after[12])
        return total


def _busy() -> int:
    """Ticks that all cores together spent on anything: user, nice, system, irq, softirq."""
    values = [int(value) for value in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]]
    return values[0] + values[1] + values[2] + values[5] + values[6]


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
