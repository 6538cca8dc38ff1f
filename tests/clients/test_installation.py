"""What ci/clients.sh installs: exact pins, the clients that are promised, no torch, and no index's address in a lock file."""

from __future__ import annotations

import json
import re

from tests.clients.installed import ROOT

PROMISED = {"openai", "schemathesis", "llm", "langchain-openai", "llm-comply", "lm-eval"}


def faults(pins: str, lock: str) -> list[str]:
    """What must not be in the two lists."""
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    loose = [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", line)]
    heavy = [line for line in lines if re.match(r"torch|triton|nvidia|cuda|vllm|sglang", line)]
    absent = sorted(PROMISED - {line.partition("==")[0] for line in lines})
    packages = json.loads(lock)["packages"]
    addressed = [name for name, package in packages.items() if "resolved" in package]
    unhashed = [name for name, package in packages.items() if name and "integrity" not in package]
    return [*loose, *heavy, *absent, *addressed, *unhashed]


def test_lists_are_exact_and_light() -> None:
    pins = (ROOT / "ci" / "clients.txt").read_text(encoding="utf-8")
    lock = (ROOT / "tests" / "clients" / "node" / "package-lock.json").read_text(encoding="utf-8")
    assert faults(pins, lock) == []


def test_what_must_not_be_there_is_seen() -> None:
    good = "\n".join(f"{name}==1.0" for name in sorted(PROMISED))
    assert faults(good, '{"packages": {"": {}, "a": {"integrity": "x"}}}') == []
    assert faults(f"{good}\ntorch==2.13.0", '{"packages": {}}') == ["torch==2.13.0"]
    assert faults(f"{good}\nx>=1", '{"packages": {"a": {"resolved": "x"}}}') == ["x>=1", "a", "a"]
    assert faults(good.replace("llm==1.0\n", ""), '{"packages": {}}') == ["llm"]


def test_node_client_is_pinned() -> None:
    package = json.loads((ROOT / "tests" / "clients" / "node" / "package.json").read_text(encoding="utf-8"))
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in package["dependencies"].values())
