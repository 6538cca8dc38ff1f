"""pytest for the hunt: the profile in the header, where failures go, which fault is armed, and the coverage floors.

Floors survive xdist: each worker sends its counts home when it ends, and the controller adds up and judges.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from properties.checks import Divergence
from properties.faults import CATALOGUE
from properties.finds import keep
from properties.floors import Boards
from properties.profiles import current
from properties.trial import Trial

_BOARDS = pytest.StashKey[Boards]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lockstep")
    group.addoption("--arm", metavar="FAULT", choices=sorted(CATALOGUE), help="search with this fault armed")
    group.addoption("--found", metavar="DIR", default="found", help="where failing workloads are written")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BOARDS] = Boards()


def pytest_report_header(config: pytest.Config) -> str:
    fault = config.getoption("--arm")
    return f"lockstep profile {current()}" + (f", armed: {fault}" if fault else "")


@attrs.frozen
class Harness:
    """What a property needs from the run: the armed fault, the folder for failures, the counts of each rung."""

    fault: str | None
    found: Path
    boards: Boards

    def judge(self, workload: Any, name: str, rung: str = "ledger", *, counts: bool = True) -> None:
        """Runs a workload; a difference becomes a file and is raised. ``counts``: for the floors of its rung.

        Saved workloads never count for the floors, and are left out while a fault is armed: what the generator
        would find is then the question, and its witness would answer at once.
        """
        if self.fault and workload.title:
            return
        trial = Trial(rung, self.fault)
        outcome = trial.run(workload)
        if counts and not workload.title:
            self.boards[rung].add(outcome.occurred, len(outcome.steps))
        if outcome.first is not None:
            path = self.found / f"{name}-{outcome.first.check}.json"
            raise keep(workload, outcome, outcome.first, path, by={"by": name}, trial=trial)


@pytest.fixture(scope="session")
def harness(pytestconfig: pytest.Config) -> Harness:
    return Harness(
        pytestconfig.getoption("--arm"), Path(pytestconfig.getoption("--found")), pytestconfig.stash[_BOARDS]
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    boards = session.config.stash[_BOARDS]
    worker_output = getattr(session.config, "workeroutput", None)
    if worker_output is not None:
        worker_output["lockstep_boards"] = boards.dump()
    elif boards.missed() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_BOARDS].merge(getattr(node, "workeroutput", {}).get("lockstep_boards", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    boards = config.stash[_BOARDS]
    missed = [] if config.getoption("--arm") else boards.missed()  # an armed hunt ends in shrinking, which skews shares
    for floors in boards:
        terminalreporter.section("what happened, in how many workloads")
        for line in floors.lines():
            terminalreporter.line(line)
    if missed and any(terminalreporter.stats.get(kind) for kind in ("failed", "error")):
        terminalreporter.section("coverage floors are not judged: tests failed, and shrinking skews what happened")
    elif missed:
        terminalreporter.section("coverage floors missed, so the run fails", red=True)
        for line in missed:
            terminalreporter.line(line)


def pytest_exception_interact(call: pytest.CallInfo[Any], report: Any) -> None:
    """A divergence is read, not debugged: its report replaces the traceback."""
    text = divergences(call.excinfo.value) if call.excinfo is not None else None
    if text is not None:
        report.longrepr = text


def divergences(error: BaseException) -> str | None:
    """The reports of one divergence, or of several that Hypothesis found in one run; None for any other exception."""
    if isinstance(error, Divergence):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        texts = [divergences(inner) for inner in error.exceptions]
        if all(text is not None for text in texts):
            return "\n\n".join(str(text) for text in texts)
    return None
