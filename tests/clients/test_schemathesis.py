"""schemathesis against /openapi.json on the tiny model: what the document allows works, what it forbids is refused in words.

Every answer is held against the document (status, content type, schema), none may be a 5xx or take longer than the
client's patience, and afterwards nothing is left in the engine. The run is seeded. That most calls are not simply refused
is judged at the server's door: of the calls to each POST route, a fifth at least must be answered with 2xx.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.installed import CLIENTS, needs_clients, run
from tests.clients.planted import Plant
from tests.clients.served import Call, Served, serve, tiny_engine

pytestmark = [needs_clients, pytest.mark.timeout(1800)]
POSTS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")
LEAST_SHARE = 0.2
SEED = 20

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,missing_required_header"
)


def fuzz(served: Served, folder: Path, examples: int, *, phases: str, only: str = "", mode: str = "all") -> Any:
    command = [CLIENTS / "python" / "bin" / "st", "run", f"{served.url}/openapi.json", "--phases", phases]
    command += ["-n", str(examples), "--seed", str(SEED), "--checks", CHECKS, "--continue-on-failure", "--mode", mode]
    command += ["--request-timeout", "300", "--wait-for-schema", "60", "--generation-database", "none", "--no-color"]
    command += ["--no-shrink", "--warnings", "off"] + (["--include-path", only] if only else [])
    return run(command, folder, seconds=1500, SCHEMATHESIS_HOOKS="tests.clients.schemathesis_hooks")


def shares(calls: Iterable[Call]) -> dict[str, float]:
    """For each POST route, the part of its POST calls that was answered with 2xx."""
    total: Counter[str] = Counter()
    good: Counter[str] = Counter()
    for call in calls:
        if call.method == "POST" and call.path in POSTS:
            total[call.path] += 1
            good[call.path] += 200 <= call.status < 300
    return {path: good[path] / total[path] if total[path] else 0.0 for path in POSTS}


def judge(served: Served, done: subprocess.CompletedProcess[str], least: int) -> None:
    """Raises ``AssertionError`` with schemathesis' own words."""
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert len(served.calls) >= least
    assert [call for call in served.calls if call.status >= 500 or call.status == 0] == []
    assert {path: share for path, share in shares(served.calls).items() if share < LEAST_SHARE} == {}
    served.wait_idle()


def small_server(**options: Any) -> Any:
    """A context of 128 tokens and a queue of 16: answers are short, and limits are met."""
    return serve(tiny_engine(context=128, max_waiting=16, num_kv_blocks=128), **options)


def tell(served: Served, record_property: Callable[[str, Any], None]) -> None:
    told = ", ".join(f"{path} {share:.0%}" for path, share in shares(served.calls).items())
    record_property("told", f"schemathesis, seed {SEED}: {len(served.calls)} calls, no 5xx; answered with 2xx: {told}")


def test_random_requests(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    """The document's examples, then random bodies that fit it and that do not."""
    with small_server() as served:
        judge(served, fuzz(served, tmp_path, 40, phases="examples,fuzzing"), 150)
        tell(served, record_property)


@pytest.mark.slow
def test_two_thousand_requests(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    """Each bound of each field from either side, most of which have to be refused; then random bodies that fit."""
    with small_server() as served:
        bounds = fuzz(served, tmp_path, 4, phases="examples,coverage")
        assert bounds.returncode == 0, bounds.stdout[-8000:]
        judge(served, fuzz(served, tmp_path, 150, phases="fuzzing", mode="positive"), 2000)
        tell(served, record_property)


@pytest.mark.parametrize(
    "plant",
    [
        Plant("a 500", status=lambda path, status: 500 if path == "/detokenize" and status == 200 else status),
        Plant(
            "an undocumented status",
            status=lambda path, status: 402 if path == "/detokenize" and status == 400 else status,
        ),
        Plant("a wrong field", lambda data, pieces: data.replace(b'"prompt":', b'"promqt":')),
    ],
    ids=lambda plant: plant.name,
)
def test_a_planted_fault_is_seen(plant: Plant, tmp_path: Path) -> None:
    with small_server(between=plant) as served:
        done = fuzz(served, tmp_path, 5, phases="examples,fuzzing", only="/detokenize")
        with pytest.raises(AssertionError):
            judge(served, done, 0)
    assert done.returncode == 1, done.stdout[-4000:]
    assert served.calls


def test_a_server_that_refuses_everything_is_seen() -> None:
    refused = [Call("POST", path, 400, "") for path in POSTS]
    assert set(shares(refused).values()) == {0.0}
    assert shares([*refused, Call("POST", "/generate", 200, "")])["/generate"] == 0.5
