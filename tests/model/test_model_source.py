"""What the model is allowed to be: short, and made of the standard library alone; and who cites its rules."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import model_sim

ROOT = Path(__file__).parents[2]
FOLDER = Path(model_sim.__file__).parent
SOURCES = sorted(FOLDER.glob("**/*.py"))
LINE_BUDGET = 350


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


def test_the_model_is_a_fraction_of_what_it_specifies() -> None:
    control = sum(code_lines(path.read_text(encoding="utf-8")) for path in (ROOT / "engine/control").glob("*.py"))
    assert sum(code_lines(path.read_text()) for path in SOURCES) < 0.4 * control


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


# Where the engine does what a rule says: the whole file, or functions of it.
IMPLEMENTED: dict[int, tuple[tuple[str, str], ...]] = {
    1: (("control/door.py", ""), ("control/scheduler.py", "Scheduler.submit")),
    2: (("control/request.py", "Request.order"),),
    3: (("control/scheduler.py", ""), ("control/scheduler.py", "Scheduler.has_work"), ("engine.py", "Engine.step")),
    4: (("control/scheduler.py", "Scheduler._reap"), ("control/scheduler.py", "Scheduler.abort")),
    5: (("control/limits.py", "Limits.blocks_for"),),
    6: (("control/scheduler.py", "Scheduler._grow"), ("control/scheduler.py", "Scheduler._preempt")),
    7: (("control/scheduler.py", "Scheduler._compact"), ("control/rows.py", "RowTable.misplaced")),
    8: (("control/scheduler.py", "Scheduler._admit"), ("control/scheduler.py", "Scheduler._fits")),
    9: (("control/scheduler.py", "Scheduler._continue_prefills"), ("control/limits.py", "")),
    10: (("control/blocks.py", ""),),
    11: (("control/prefix.py", ""), ("control/blocks.py", ""), ("control/scheduler.py", "")),
    12: (("control/replay.py", ""), ("compute/captures.py", "")),
    13: (("control/scheduler.py", "Scheduler._append"), ("text/stops.py", "")),
    14: (("compute/sampling_choice.py", ""), ("compute/sampling_noise.py", "")),
}
CITATION = re.compile(r"\brules? (\d+(?:\.\d+)?)((?:(?:,| and) \d+(?:\.\d+)?)*)", re.IGNORECASE)


def cited_in(text: str) -> set[str]:
    """``rule 6``, ``rules 4, 8 and 10``: the numbers, clauses with their point."""
    return {number for first, rest in CITATION.findall(text) for number in (first, *re.findall(r"[\d.]+", rest))}


def part(source: str, scope: str) -> str:
    """The text of one function or method, or the whole."""
    node: ast.AST = ast.parse(source)
    for name in scope.split(".") if scope else ():
        kinds = ast.FunctionDef | ast.ClassDef
        node = next(n for n in ast.iter_child_nodes(node) if isinstance(n, kinds) and n.name == name)
    return (ast.get_source_segment(source, node) or "") if scope else source


def uncited_rules(read: Callable[[str], str]) -> list[str]:
    return [
        f"rule {rule}: {file} {scope}".strip()
        for rule, places in IMPLEMENTED.items()
        for file, scope in places
        if str(rule) not in {number.partition(".")[0] for number in cited_in(part(read(file), scope))}
    ]


def read(file: str) -> str:
    return (ROOT / "engine" / file).read_text(encoding="utf-8")


def test_the_engine_cites_every_rule_where_it_follows_it() -> None:
    rules = set(re.findall(r"^## (\d+) ", (FOLDER / "SPEC.md").read_text(), re.MULTILINE))
    assert {str(rule) for rule in IMPLEMENTED} == rules
    assert uncited_rules(read) == []


def test_a_rule_that_is_no_longer_cited_is_noticed() -> None:
    def changed(file: str) -> str:
        return read(file).replace("Rule 7.", "").replace("(rule 10)", "")

    assert uncited_rules(changed) == ["rule 7: control/scheduler.py Scheduler._compact", "rule 10: control/blocks.py"]


def test_every_rule_that_is_cited_anywhere_exists() -> None:
    spec = (FOLDER / "SPEC.md").read_text()
    known = set(re.findall(r"^## (\d+) ", spec, re.MULTILINE)) | set(re.findall(r"^- (\d+\.\d+) ", spec, re.MULTILINE))
    for package in ("engine", "properties", "server"):
        for path in (ROOT / package).rglob("*.py"):
            assert cited_in(path.read_text(encoding="utf-8")) <= known, path
    assert cited_in("Rule 3, rules 4, 8 and 10.2; unruly 7") == {"3", "4", "8", "10.2"}
