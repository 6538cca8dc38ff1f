"""CASES.md is true: every case of its groups stands there, every test that it names exists, and no case test is missing.

Judged from the sources, so that nothing has to be imported or collected.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GROUPS = {
    "a": "B001 B003 B004 B006 B007 B009 B010 B012 B013",
    "b": "B015 B016 B018 B019 B021 B022 B024 B025 B027",
    "c": "B028 B030 B031 B033 B034",
    "d": "B036 B037 B039 B040 B042 B043 B045 B046 B048 B049 B051",
    "e": "B052 B054 B055 B057 B058 B060 B061 B063 B064",
    "f": "B066 B067 B069 B070 B072 B073 B075 B076",
    "g": "B078 B079 B081 B082 B084 B085 B087 B088 B090 B091",
    "h": "B093 B094 B096 B097 B099 B100 B102 B103 B105",
    "i": "B106 B108 B109 B111 B112 B114",
    "j": "B115 B117 B118 B120 B121 B123 B124 B126 B127 B129 B130 B132 B133",
    "k": "B135 B136 B138 B139 B141 B142 B144 B145",
    "l": "B147 B148 B150 B151 B153",
    "m": "B154 B156 B157 B159 B160 B162 B163 B165 B166 B168 B169",
}
IDS = [case for group in GROUPS.values() for case in group.split()]
NODE = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<test>\w+)(?:\[(?P<row>[^\]]+)\])?`")
IMPOSSIBLE = "cannot exist: "


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Case id to (what went wrong, where it is tried). A second line of one id raises ``ValueError``."""
    table: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"B\d{3}", cells[0]):
            if cells[0] in table or len(cells) != 3:
                raise ValueError(f"{cells[0]}: {len(cells)} cells, or a second line")
            table[cells[0]] = (cells[1], cells[2])
    return table


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions) and node.name.startswith("test_"))


def complaints(text: str) -> list[str]:
    """What is wrong with the table."""
    found = []
    table = rows(text)
    found += [f"{case} is missing" for case in IDS if case not in table]
    found += [f"{case} is in no group" for case in table if case not in IDS]
    for case, (what, where) in table.items():
        nodes = list(NODE.finditer(where))
        if not what:
            found.append(f"{case} does not say what went wrong")
        if bool(nodes) == where.startswith(IMPOSSIBLE):
            found.append(f"{case} names no test and no reason, or both")
        if where.count("`") != 2 * len(nodes):
            found.append(f"{case} has a test that is not written as file::test or file::test[row]")
        for node in nodes:
            if not (ROOT / node["file"]).is_file() or node["test"] not in functions_of(node["file"]):
                found.append(f"{case} names {node['file']}::{node['test']}, which does not exist")
            elif node["row"] and node["row"] not in (ROOT / node["file"]).read_text(encoding="utf-8"):
                found.append(f"{case}: {node['row']!r} does not occur in {node['file']}")
    for path in sorted(HERE.glob("test_*.py")):
        for test in sorted(functions_of(f"tests/cases/{path.name}")):
            for case in re.findall(r"_(b\d{3})(?=_)", test):
                if f"::{test}`" not in table.get(case.upper(), ("", ""))[1]:
                    found.append(f"{test} is not named by {case.upper()}")
    return found


def test_the_table_is_true() -> None:
    assert complaints((HERE / "CASES.md").read_text(encoding="utf-8")) == []


def test_every_case_can_exist() -> None:
    """A line that says otherwise must be argued for here: B085 is about a window over penalties, which nobody can set."""
    table = rows((HERE / "CASES.md").read_text(encoding="utf-8"))
    assert [case for case, (_, where) in table.items() if where.startswith(IMPOSSIBLE)] == ["B085"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("| B009 |", "| B008 |", "B009 is missing"),
        ("| B009 |", "| B008 |", "B008 is in no group"),
        ("::test_b013_rows_are", "::test_b013_rows_were", "which does not exist"),
        ("[shard deleted]", "[shard stolen]", "does not occur"),
        (
            "`tests/control/test_prefix_cache.py::test_b010_without_the_cache_no_block_ever_carries_a_hash`",
            "some day",
            "names no test and no reason",
        ),
        ("`tests/control/test_control.py::test_a_rel", "`see test_control.py, test_a_rel", "not written as"),
        ("test_b028_abort_at_every_iteration", "test_leaks_are_seen", "is not named by B028"),
    ],
)
def test_a_false_table_is_seen(old: str, new: str, complaint: str) -> None:
    text = (HERE / "CASES.md").read_text(encoding="utf-8")
    assert old in text
    assert any(complaint in found for found in complaints(text.replace(old, new)))
