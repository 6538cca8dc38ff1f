"""schemathesis against /openapi.json on the tiny model: what the document allows works, what it forbids is refused in words.

Every answer is held against the document (status, content type, schema), none may be a 5xx or take longer than the
client's patience, and afterwards nothing is left in the engine. The run is seeded. That most calls are not simply refused
is judged at the server's door: of the calls to each POST route, a fifth at least must be answered with 2xx.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from http.client import HTTPConnection
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
SETTINGS = Path(__file__).with_name("schemathesis.toml")
Documented = Mapping[tuple[str, str], frozenset[int]]


def fuzz(
    served: Served,
    folder: Path,
    examples: int,
    *,
    phases: str,
    only: Sequence[str] = (),
    mode: str = "all",
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Runs schemathesis in ``folder``, where it finds nothing of an earlier run."""
    command: list[str | Path] = [CLIENTS / "python" / "bin" / "st", "--config-file", SETTINGS, "run"]
    command += [f"{served.url}/openapi.json", "--phases", phases, "--mode", mode]
    command += ["-n", str(examples), "--seed", str(SEED)]
    command += [word for path in only for word in ("--include-path", path)]
    command += [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", value)]
    return run(command, folder, seconds=1500, within=folder, SCHEMATHESIS_HOOKS="tests.clients.schemathesis_hooks")


# What was asked and answered ---------------------------------------------------------------------------------------------


def documented(served: Served) -> Documented:
    """The statuses that each (method, path) of the document may be answered with."""
    connection = HTTPConnection("127.0.0.1", served.port)
    connection.request("GET", "/openapi.json")
    paths = json.load(connection.getresponse())["paths"]
    connection.close()
    return {
        (method.upper(), path): frozenset(int(status) for status in operation["responses"])
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


def route_of(call: Call, routes: Documented) -> tuple[str, str] | None:
    """The documented (method, path) that answered; None for what the document does not have."""
    if (call.method, call.path) in routes:
        return call.method, call.path
    for method, path in routes:
        pattern = re.sub(r"\\\{.*?\\\}", ".+", re.escape(path))
        if method == call.method and "{" in path and re.fullmatch(pattern, call.path):
            return method, path
    return None


def table(calls: Iterable[Call], routes: Documented) -> dict[tuple[str, str] | None, Counter[int]]:
    """How often each route was answered with each status."""
    counts: dict[tuple[str, str] | None, Counter[int]] = {route: Counter() for route in sorted(routes)}
    for call in calls:
        if call.path == "/openapi.json":  # the document itself
            continue
        counts.setdefault(route_of(call, routes), Counter())[call.status] += 1
    return counts


def share(statuses: Counter[int]) -> float:
    """The part that was answered with 2xx."""
    return sum(count for status, count in statuses.items() if 200 <= status < 300) / max(1, statuses.total())


def complaints(calls: Sequence[Call], routes: Documented, least: int) -> list[str]:
    """What is wrong with a run, as far as the server's door can tell."""
    counts = table(calls, routes)
    wrong = [] if len(calls) >= least else [f"{len(calls)} calls, but {least} are needed"]
    for route, statuses in counts.items():
        allowed = {404, 405} if route is None else routes[route]
        wrong += [f"{route}: {status} is a failure" for status in statuses if status >= 500]
        wrong += [f"{route}: no answer" for status in statuses if status == 0]
        wrong += [
            f"{route}: {status} is not documented" for status in statuses if 0 < status < 500 and status not in allowed
        ]
        if route is not None and not statuses:
            wrong.append(f"{route}: never called")
    for path in POSTS:
        if (part := share(counts[("POST", path)])) < LEAST_SHARE:
            wrong.append(f"{path}: {part:.1%} of the calls answered with 2xx, but {LEAST_SHARE:.0%} are needed")
    return wrong


def judge(served: Served, done: subprocess.CompletedProcess[str], least: int) -> None:
    """Raises ``AssertionError`` with schemathesis' own words."""
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert complaints(served.calls, documented(served), least) == []
    served.wait_idle()


def tell(name: str, served: Served, record_property: Callable[[str, Any], None]) -> None:
    """For the end of the run: how often each route was answered with each status."""
    counts = table(served.calls, documented(served))
    record_property("told", f"schemathesis, {name}, seed {SEED}: {len(served.calls)} calls, no 5xx")
    for route, statuses in counts.items():
        where = "what the document does not have" if route is None else " ".join(route)
        several = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        record_property(
            "told", f"schemathesis, {name}, {where}: {share(statuses):.0%} of {statuses.total()} 2xx ({several})"
        )


def small_server(**options: Any) -> Any:
    """A context of 128 tokens and a queue of 16: answers are short, and limits are met."""
    return serve(tiny_engine(context=128, max_waiting=16, num_kv_blocks=128), **options)


# The runs ------------------------------------------------------------------------------------------------------------------


def test_random_requests(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    """The document's examples, then random bodies that fit it and that do not."""
    with small_server() as served:
        judge(served, fuzz(served, tmp_path, 25, phases="examples,fuzzing"), 120)
        tell("short", served, record_property)


@pytest.mark.slow
def test_two_thousand_requests(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    """Each bound of each field from either side, most of which have to be refused; then random bodies that fit."""
    with small_server() as served:
        bounds = fuzz(served, tmp_path, 4, phases="examples,coverage")
        assert bounds.returncode == 0, bounds.stdout[-8000:]
        judge(served, fuzz(served, tmp_path, 150, phases="fuzzing", mode="positive"), 2000)
        tell("long", served, record_property)


# The tests' own teeth --------------------------------------------------------------------------------------------------------

PLANTED = {
    "POST /detokenize": (
        Plant("a 500", path="/detokenize", status=lambda path, status: 500 if status == 200 else status),
        "Server error",
    ),
    "POST /tokenize": (
        Plant("an undocumented status", path="/tokenize", status=lambda path, status: 402 if status == 200 else status),
        "Undocumented status code",
    ),
    "GET /v1/models": (
        Plant("a wrong body", lambda data, pieces: data.replace(b'"data":', b'"dota":'), path="/v1/models"),
        "Response violates schema",
    ),
    "GET /version": (Plant("a hang", path="/version", hangs=True), "Read timed out"),
}


def test_planted_faults_are_seen(tmp_path: Path) -> None:
    """One of each kind, each on a route of its own; a route beside them has none."""
    plants = [plant for plant, _ in PLANTED.values()]
    paths = [*(route.split()[1] for route in PLANTED), "/model_info"]
    with small_server(between=lambda app: reduce(lambda inner, plant: plant(inner), plants, app)) as served:
        done = fuzz(served, tmp_path, 3, phases="examples,fuzzing", only=paths, request_timeout="10")
        with pytest.raises(AssertionError):
            judge(served, done, 0)
        seen = complaints(served.calls, documented(served), 0)
    said = sections(done.stdout)
    assert {route: words in said.get(route, "") for route, (_, words) in PLANTED.items()} == dict.fromkeys(
        PLANTED, True
    )
    assert "GET /model_info" not in said
    told = {"'/detokenize'): 500 is a failure", "'/tokenize'): 402 is not documented", "'/version'): no answer"}
    assert {line.partition(" ")[2] for line in seen} >= told


def sections(output: str) -> dict[str, str]:
    """What schemathesis says about each operation that failed."""
    parts = re.split(r"^_+ ((?:GET|POST) \S+) _+$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_each_complaint_is_made() -> None:
    routes: Documented = {("POST", path): frozenset({200, 400, 500}) for path in POSTS}
    routes |= {("GET", "/v1/models/{name}"): frozenset({200, 404})}
    good = [Call(method, path.replace("{name}", "a/b"), 200, "") for method, path in routes]
    assert complaints(good, routes, 6) == []

    def changed(*calls: Call, least: int = 0) -> list[str]:
        return complaints([*good, *calls], routes, least)

    assert changed(least=7) == ["6 calls, but 7 are needed"]
    assert changed(Call("POST", "/tokenize", 500, "")) == ["('POST', '/tokenize'): 500 is a failure"]
    assert changed(Call("POST", "/tokenize", 0, "")) == ["('POST', '/tokenize'): no answer"]
    assert changed(Call("POST", "/tokenize", 402, "")) == ["('POST', '/tokenize'): 402 is not documented"]
    assert changed(Call("GET", "/tokenize", 405, "")) == []
    assert changed(Call("GET", "/tokenize", 200, "")) == ["None: 200 is not documented"]
    assert complaints(good[:-1], routes, 0) == ["('GET', '/v1/models/{name}'): never called"]
    refused = [Call("POST", "/generate", 400, "")] * 4
    assert changed(*refused) == []
    assert changed(*refused, refused[0]) == ["/generate: 16.7% of the calls answered with 2xx, but 20% are needed"]
