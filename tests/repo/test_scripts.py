"""Every script of ci/ that is run by hand is named where somebody would look for it, and the smallest of them runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import bench_audit
from engine.engine import Engine
from tests.server.stub import stub_engine

ROOT = Path(__file__).parents[2]
PLACES = (
    "Makefile",
    "README.md",
    ".ci/run",
    "pyproject.toml",
    *(f"ci/{path.name}" for path in (ROOT / "ci").glob("*.md")),
)


def unnamed(scripts: list[str], texts: list[str]) -> list[str]:
    return [name for name in scripts if not any(f"ci/{name}.py" in text or f"ci.{name}" in text for text in texts)]


def test_every_script_is_named_somewhere() -> None:
    scripts = [path.stem for path in (ROOT / "ci").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    shells = [path.read_text(encoding="utf-8") for path in (ROOT / "ci").glob("*.sh")]
    texts = [(ROOT / place).read_text(encoding="utf-8") for place in PLACES] + shells
    assert len(scripts) > 10
    assert unnamed(scripts, texts) == []
    assert unnamed(["one", "two"], ["python -m ci.two"]) == ["one"]


def test_what_the_audit_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORKLOADS": 2, "ROUNDS": 1, "PROMPT": 4, "ANSWER": 3}.items():
        monkeypatch.setattr(bench_audit, name, value)
    assert bench_audit.on_the_rung("ledger") > 0
    assert bench_audit.on_the_model(stub_engine(), 3) > 1


def test_a_broken_engine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_audit, "PROMPT", 4)
    monkeypatch.setattr(bench_audit, "ANSWER", 3)
    monkeypatch.setattr(Engine, "audit", lambda self: ["block 2 is lost"])
    with pytest.raises(RuntimeError, match=r"[1-9]\d* violations in \d+ audits"):
        bench_audit.on_the_model(stub_engine(), 1)
