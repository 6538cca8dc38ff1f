"""ci/constraints.txt against the project: exact, complete, and within what pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ci import lock
from engine.loading import load

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared() -> list[Requirement]:
    """Every requirement of the project, extras included."""
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]


def pinned(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def malformed(text: str) -> list[str]:
    """Lines that are no exact public pin: ranges, local version tags, hashes, editable installs, direct references."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", line)]


def unpinned(pins: Iterable[str], requirements: Iterable[Requirement]) -> set[str]:
    """Installed distributions that the requirements need, directly or not, and that have no pin."""
    todo, seen = [(requirement, extra) for requirement in requirements for extra in (requirement.extras or {""})], set()
    while todo:
        requirement, extra = todo.pop()
        name = lock.canonical(requirement.name)
        if (name, extra) in seen or lock._CUDA.match(name):
            continue
        try:
            needs = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue  # an extra that is not installed here, or what another platform needs
        seen.add((name, extra))
        live = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
        todo += [(need, inner) for need in live for inner in ("", *need.extras)]
    return {name for name, _ in seen} - set(pins)


LOCK = (ROOT / lock.LOCK).read_text(encoding="utf-8")


def test_every_line_is_an_exact_public_pin() -> None:
    assert malformed(LOCK) == []


@pytest.mark.parametrize(
    "line", ["torch==2.13.0+cpu", "torch>=2.13", "-e .", "torch @ file:wheel", "numpy==2.0 --hash=x"]
)
def test_a_malformed_line_is_seen(line: str) -> None:
    assert malformed(LOCK + line + "\n") == [line]


def test_all_that_the_project_needs_is_pinned() -> None:
    assert unpinned(pinned(LOCK), declared()) == set()


@pytest.mark.parametrize("name", ["torch", "starlette", "markupsafe"])
def test_a_missing_pin_is_seen(name: str) -> None:
    pins = pinned(LOCK)
    del pins[name]
    assert unpinned(pins, declared()) == {name}


def test_pins_are_within_the_declared_ranges() -> None:
    pins = pinned(LOCK)
    outside = [str(one) for one in declared() if not one.specifier.contains(pins[lock.canonical(one.name)])]
    assert outside == []


def test_lock_drops_local_tags_cuda_and_the_project() -> None:
    found = [
        ("torch", "2.13.0+cpu"),
        ("Jinja2", "3.1.6"),
        ("nvidia_cublas", "1"),
        ("cuda_bindings", "13"),
        ("triton", "3.7.1"),
        ("lockstep-engine", "0"),
    ]
    assert lock.pins(found) == ["jinja2==3.1.6", "torch==2.13.0", "triton==3.7.1"]


def test_torch_and_the_model_are_pinned_as_tested() -> None:
    pins = pinned(LOCK)
    name, _, version = lock.MODEL.partition("==")
    assert (pins["torch"], pins["triton"], pins[name]) == (lock.TORCH, lock.TRITON, version)
    assert (name, version) == (load.DEFAULT_PACKAGE, load.DEFAULT_VERSION)
    assert f"MODEL={name}\n" in (ROOT / "ci/setup.sh").read_text(encoding="utf-8")
