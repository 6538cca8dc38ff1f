"""Each import contract fires: one forbidden import is added to a copy of the sources, and the linter must say which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "model_sim", "properties", "server")
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
}
LINT = "import sys; from importlinter.cli import lint_imports_command as run; sys.exit(run(['--no-cache']))"
# contract, file to spoil, forbidden lines
BREACHES = [
    ("control-is-pure", "engine/control/blocks.py", "import torch"),
    ("control-is-pure", "engine/control/blocks.py", "from engine import trace"),
    ("control-is-pure", "engine/control/blocks.py", "def f():\n    import numpy"),
    ("trace-is-stdlib", "engine/trace.py", "import attrs"),
    ("model-is-stdlib", "model_sim/spoiled.py", "import attrs"),
    ("model-is-stdlib", "model_sim/spoiled.py", "from engine.control import plan"),
    ("engine-knows-nobody", "engine/llm.py", "def f():\n    import model_sim"),
    ("engine-knows-nobody", "engine/llm.py", "import server"),
    ("engine-knows-nobody", "engine/llm.py", "import properties"),
    ("server-only-engine", "server/spoiled.py", "def f():\n    import model_sim"),
    ("server-properties-lazy", "server/spoiled.py", "import properties"),
    (
        "server-properties-lazy",
        "server/spoiled.py",
        "class C:\n    try:\n        import properties\n    finally:\n        pass",
    ),
    ("properties-server-lazy", "properties/spoiled.py", "import server"),
    ("pydantic-at-the-door", "engine/request.py", "from pydantic import BaseModel"),
    ("pydantic-at-the-door", "properties/spoiled.py", "import fastapi"),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in (*PACKAGES, "ci"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=lambda _, names: [n for n in names if n.endswith(".pyc")]
        )
    return tmp_path


def broken(result: subprocess.CompletedProcess[str]) -> set[str]:
    return {identity for identity, name in CONTRACTS.items() if f"{name} BROKEN" in result.stdout}


def test_contracts_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


def test_lazy_imports_are_allowed_where_the_design_says_so(copy: Path) -> None:
    (copy / "server/spoiled.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import properties\ndef f():\n    import properties\n"
    )
    (copy / "properties/spoiled.py").write_text("import engine, model_sim\ndef f():\n    import server\n")
    assert lint(copy).returncode == 0


@pytest.mark.parametrize(("contract", "file", "lines"), BREACHES)
def test_breach_is_seen(copy: Path, contract: str, file: str, lines: str) -> None:
    path = copy / file
    path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + f"\n{lines}\n", encoding="utf-8")
    result = lint(copy)
    assert result.returncode == 1
    assert contract in broken(result), result.stdout
    assert str(path.relative_to(copy).with_suffix("")).replace("/", ".") in result.stdout, "the importer is named"


def test_every_contract_has_a_breach() -> None:
    assert {contract for contract, _, _ in BREACHES} == set(CONTRACTS)
