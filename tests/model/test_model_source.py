"""What the model is allowed to be: short, and made of the standard library alone."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import model_sim

FOLDER = Path(model_sim.__file__).parent
SOURCES = sorted(FOLDER.glob("**/*.py"))
LINE_BUDGET = 340


def foreign_imports(source: str) -> list[str]:
    """Modules that a source text imports from outside the standard library and the package itself."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    own = {"model_sim", *sys.stdlib_module_names}
    return [name for name in names if name.split(".")[0] not in own]


def code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment alone; docstrings count."""
    return sum(1 for line in source.splitlines() if line.strip() and not line.strip().startswith("#"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_imports_only_the_standard_library(path: Path) -> None:
    assert foreign_imports(path.read_text()) == []


def test_a_foreign_import_is_noticed() -> None:
    assert foreign_imports(
        "def f():\n    import attrs.setters\n    from engine.control import plan\n    import json"
    ) == [
        "attrs.setters",
        "engine.control",
    ]
    assert foreign_imports("from . import model") == ["."]


def test_line_budget() -> None:
    assert sum(code_lines(path.read_text()) for path in SOURCES) <= LINE_BUDGET


def test_lines_are_counted() -> None:
    assert code_lines('"""Doc."""\n\n# why\nx = 1  # this\n    # that\ny = 2\n') == 3


def test_every_number_cited_in_the_code_is_a_clause() -> None:
    clauses = set(re.findall(r"^- (\d+\.\d+) ", (FOLDER / "SPEC.md").read_text(), re.MULTILINE))
    cited = {
        number
        for path in SOURCES
        for comment in re.findall(r"(?:#|\((?=\d)).*", path.read_text())
        for number in re.findall(r"\b\d+\.\d+\b", comment)
    }
    assert len(cited) > 25
    assert cited <= clauses
