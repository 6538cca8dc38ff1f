"""What a test run says about the tests that did not run, and why in CI such a test fails the run.

Every run closes with the list of skipped tests and of deselected slow ones. With CI=true a skip for any reason but a
missing GPU makes the run fail: what CI does not run, nobody runs. Works with and without xdist: each worker
sends home what it left out when it ends. Before that come the lines that tests tell about their run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Triton settles on its interpreter when it is first imported, which another test module's library may do while it is collected.
if not any(Path("/dev").glob("nvidia*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

ALLOWED_IN_CI = "no CUDA device"


class NotRun:
    """Collects what was left out: ``skipped`` maps a test to its reason, ``deselected`` holds node ids."""

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self.deselected: set[str] = set()

    def forbidden(self) -> dict[str, str]:
        """The skips that may not happen in CI."""
        return {test: reason for test, reason in self.skipped.items() if ALLOWED_IN_CI not in reason}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid] = _reason(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = _reason(report)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self.deselected |= {item.nodeid for item in items if item.get_closest_marker("slow")}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        worker_output = getattr(session.config, "workeroutput", None)
        if worker_output is not None:
            worker_output["not_run"] = {"skipped": self.skipped, "deselected": sorted(self.deselected)}
        elif (
            self.forbidden()
            and in_ci()
            and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        not_run = getattr(node, "workeroutput", {}).get("not_run", {})
        self.skipped |= not_run.get("skipped", {})
        self.deselected |= set(not_run.get("deselected", ()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.deselected:
            terminalreporter.section("not run: marked slow (make full runs them)")
            for test in sorted(self.deselected):
                terminalreporter.line(test)
        if in_ci() and (forbidden := self.forbidden()):
            terminalreporter.section("skipped in CI, so the run fails", red=True)
            for test, reason in sorted(forbidden.items()):
                terminalreporter.line(f"{test}: {reason}")


class Told:
    """Prints at the end what tests say about their run by ``record_property("told", line)``: counts of calls, rates."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":  # once a test, with xdist also
            self.lines += [str(value) for name, value in report.user_properties if name == "told"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.lines:
            terminalreporter.section("told by the tests")
            for line in sorted(self.lines):
                terminalreporter.line(line)


def in_ci() -> bool:
    """CI sets CI=true; on a developer's machine a skip is only listed."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NotRun(), "what-did-not-run")
    config.pluginmanager.register(Told(), "told-by-tests")
    # Hypothesis's default allows an example 200 ms; on a machine that is busy with other tests that judges the machine.
    if settings.default is not None and settings.default.deadline is not None:
        settings.register_profile("unhurried", settings.default, deadline=None)
        settings.load_profile("unhurried")
