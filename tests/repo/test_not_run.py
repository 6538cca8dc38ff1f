"""The report on tests that did not run: what it lists, and that in CI a skip without a GPU's absence fails the run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason="{reason}")
def test_skips():
    pass

@pytest.mark.slow
def test_takes_long():
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n    slow: takes long\n")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # what the inner runs do not need only makes them slow
    return pytester


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n1"]], ids=["one process", "xdist"])
@pytest.mark.parametrize(
    ("ci", "reason", "status"),
    [
        ("", "no compiler here", 0),
        ("true", "no compiler here", 1),
        ("true", "no CUDA device", 0),
    ],
)
def test_skip(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: list[str], ci: str, reason: str, status: int
) -> None:
    monkeypatch.setenv("CI", ci)
    run.makepyfile(SUITE.format(reason=reason))
    result = run.runpytest_subprocess(*workers, "-m", "not slow")
    assert result.ret == status
    blamed = [line for line in result.outlines if line.endswith(f"test_skips: {reason}")]
    assert len(blamed) == status
    assert " passed" in result.outlines[-1], "pytest's closing line comes last"
    result.stdout.fnmatch_lines(["*not run: marked slow*", "*::test_takes_long"])


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n1"]], ids=["one process", "xdist"])
def test_module_skipped_while_collecting(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: list[str]
) -> None:
    monkeypatch.setenv("CI", "true")
    run.makepyfile(
        test_whole="import pytest\npytest.skip('not today', allow_module_level=True)",
        test_other="def test_runs(): pass",
    )
    result = run.runpytest_subprocess(*workers)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*skipped in CI*", "*test_whole.py: not today"])


def test_expected_failure_is_no_skip(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    run.makepyfile("import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert False")
    assert run.runpytest_subprocess().ret == 0


def test_a_failure_stays_a_failure(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    run.makepyfile("def test_it(): assert False")
    assert run.runpytest_subprocess().ret == 1


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n1"]], ids=["one process", "xdist"])
def test_what_a_test_tells_is_printed_once(run: pytest.Pytester, workers: list[str]) -> None:
    run.makepyfile(
        "def test_a(record_property):\n    record_property('told', '7 calls')\n    record_property('x', 'no')"
    )
    result = run.runpytest_subprocess(*workers)
    assert result.outlines.count("7 calls") == 1
    assert "no" not in result.outlines
