"""One mutant against everything that should see it, in a process of its own.

The process is forked before anything of the engine was imported, so ``engine.control`` is made anew in it with the mutant's
text in place of one module, and nothing of it outlives the process. A mutant may loop for ever or eat all memory: processor
time and address space are bounded, and running out of either counts as seen.

The order of what is tried, and the names under which a kill is recorded:

    corpus      every workload of properties/regress, in lockstep         -> the check that fired
    armed       (a mutant of the audit only) the same workloads with their faults armed: the audit must say what it says
                unmutated, since on a healthy engine it has nothing to say
    generated   numbered workloads, in lockstep                           -> the check that fired
    tests       the unit tests of control, for what those left            -> the test that failed
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import attrs

CONTROL = Path("engine/control")
TESTS = ("tests/control",)
SEED = 3  # of the generated workloads: not the hunter's default, and not the mutation sample's
SECONDS_A_WORKLOAD = 10.0  # of processor time; an unmutated workload takes some milliseconds
SECONDS_A_MUTANT = 1800
ADDRESS_SPACE = 4 << 30


@attrs.frozen
class Job:
    """What a process is asked: the text that stands in for one file of engine/control, and how far to go."""

    key: str
    file: str
    text: str
    workloads: int
    tests: bool
    patience: float = SECONDS_A_WORKLOAD
    armed: dict[str, list[str]] | None = None  # what the unmutated audit says; None: a mutant of something else


@attrs.frozen
class Verdict:
    """``by`` is the check, test or end that killed the mutant, None for a survivor; ``where`` names the workload or file.

    ``seconds`` is processor time, interpreter start and imports included.
    """

    key: str
    by: str | None
    where: str = ""
    workloads: int = 0  # generated ones that ran, the killing one included
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.by is not None


class TooLong(BaseException):
    """Out of processor time. No ``Exception``, so that nothing under test takes it for a failure of its own."""


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, f"<mutant of {self._path}>", "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for the one module that is mutated."""

    def __init__(self, file: str, text: str) -> None:
        self._name = f"engine.control.{file.removesuffix('.py')}"
        self._loader = _Loader(CONTROL / file, text)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self._loader)


def work(job: Job, answers: Connection) -> None:
    """The whole life of the process: installs the mutant, tries everything, sends one Verdict."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("engine", "properties", "model_sim")]
    assert not loaded, f"{loaded} were imported before the mutant"
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_A_MUTANT, SECONDS_A_MUTANT + 5))
    sys.meta_path.insert(0, _Finder(job.file, job.text))
    by, where, count = _judge(job)
    answers.send(Verdict(job.key, by, where, count, round(time.process_time(), 2)))
    answers.close()


def _judge(job: Job) -> tuple[str | None, str, int]:
    try:
        with _patience(job.patience):
            from properties import corpus, lockstep
            from properties.hunt import numbered
    except BaseException as error:  # noqa: BLE001 - a mutant that cannot be imported is seen, however it fails
        return "import", type(error).__name__, 0
    for name, saved in corpus.workloads().items():
        if by := _seen(partial(lockstep.run, saved, cpu_seconds=job.patience), job.patience):
            return by, f"corpus {name}", 0
    if job.armed is not None:
        for name, words in job.armed.items():
            if audit_words(name) != words:
                return "audit", f"armed {name}", 0
    if found := _generated(lockstep.run, numbered, job.workloads, job.patience):
        return found
    if job.tests and (failed := _failing_test()):
        return "test", failed, job.workloads
    return None, "", job.workloads


def _generated(
    run: Callable[..., Any], numbered: Callable[[int, int], Any], count: int, patience: float
) -> tuple[str, str, int] | None:
    for number in range(count):
        if by := _seen(partial(run, numbered(SEED, number), cpu_seconds=patience), patience):
            return by, f"workload {SEED}/{number}", number + 1
    return None


def _seen(run: Callable[[], Any], patience: float) -> str | None:
    """The check that fires first, or how else the run ended; None when it holds."""
    try:
        with _patience(patience):
            first = run().first
    except TooLong:
        return "time"
    except MemoryError:
        return "memory"
    except Exception:  # noqa: BLE001 - the engine handed the driver something that it could not even compare
        return "driver"
    if first is None:
        return None
    from properties.guard import overtime

    return "time" if overtime(first) else str(first.check)


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def audit_words(name: str) -> list[str]:
    """What the audit, judged alone, says on a corpus workload with its fault armed: iteration, then every message."""
    from properties import corpus, lockstep
    from properties.faults import armed

    saved = corpus.workloads()[name]
    try:
        with _patience(SECONDS_A_WORKLOAD), armed(saved.fault):
            found = lockstep.run(saved, checks=frozenset({"audit"})).first
    except (TooLong, Exception) as error:  # noqa: BLE001 - whatever the audit raises is what it says
        return [type(error).__name__]
    return [] if found is None else [str(found.iteration), found.headline, *(fact.engine for fact in found.facts)]


def armed_words() -> dict[str, list[str]]:
    """For every corpus workload whose fault the audit must see: what it says. Run in a process of its own."""
    from properties import corpus
    from properties.faults import CATALOGUE

    wanted = [n for n, w in corpus.workloads().items() if w.fault in CATALOGUE and "audit" in CATALOGUE[w.fault].expect]
    return {name: audit_words(name) for name in wanted}


def send_armed_words(answers: Connection) -> None:
    answers.send(armed_words())
    answers.close()


def _failing_test() -> str | None:
    """The first unit test of control that fails on the mutant."""
    import pytest

    class First:
        failed: str | None = None

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and self.failed is None:
                self.failed = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and self.failed is None:
                self.failed = report.nodeid

    first = First()
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([*options, *TESTS], plugins=[first])
    return first.failed or (f"pytest ended with {int(code)}" if int(code) else None)
