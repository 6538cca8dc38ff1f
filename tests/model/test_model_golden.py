"""Golden traces: whole observation sequences, written by hand from SPEC.md, that the model must reproduce.

The traces in golden/ are never regenerated. A step lists what it does; what is not listed did not happen. Each expected
line, the door's answer to a submission included, cites the clauses it follows from. The token of a request's k-th sampling
is 10 * request + k throughout, but for what `dead` names: that sampling of that request has none. `published` is the step's,
`content` the state's `published`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import model_sim
from model_sim import Model, Refused

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))
SPEC = (Path(model_sim.__file__).parent / "SPEC.md").read_text()
CLAUSES = set(re.findall(r"^- (\d+\.\d+) ", SPEC, re.MULTILINE))
LISTS = ("aborted", "reaped", "grown", "preempted", "moves", "admitted", "chunks", "decodes", "sampled", "finished")
CACHE_LISTS = ("hits", "evicted", "published")
# Clauses that no trace of the model can show.
UNTRACED = {
    "1.7": "what a server makes of a request",
    "9.1": "refused at start, before there is a trace: test_model_door.py",
    "12.6": "what compute and start-up do",
    "13.4": "text",
    "13.6": "text",
    "14.2": "the sampler",
}
NOTHING: dict[str, Any] = {**{key: [] for key in LISTS}, "launch": None, "error": False}


def token(request: int, k: int) -> int:
    return 10 * request + k


def submit(model: Model, text: str) -> None:
    arguments, wanted = text.partition("#")[0].strip().split(" -> ")
    prompt, max_tokens, options = ast.literal_eval(arguments)
    try:
        got = str(model.submit(prompt, max_tokens, **options))
    except Refused as refusal:
        got = refusal.reason
    assert got == wanted, text


def check_step(model: Model, seen: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Compare one whole step, and of the state what the trace names."""
    state = model.state()
    nothing = {**NOTHING, "iteration": seen["iteration"]}
    if model.prefix_cache:
        state["content"] = state.pop("published")
        nothing |= {key: [] for key in CACHE_LISTS}
        assert "cached" in wanted, f"{where}: every step states the cached blocks"
    assert "blank" in wanted, f"{where}: every step states the blank stack"
    steps = nothing | {k: v for k, v in wanted.items() if k not in state}
    assert seen == steps, where
    named = {k: v for k, v in wanted.items() if k in state}
    assert {k: state[k] for k in named} == named, where


def play(lines: list[str]) -> int:
    """Run one trace; returns its number of steps."""
    model = Model(**ast.literal_eval(next(x for x in lines if x.startswith("model ")).removeprefix("model ")))
    dead: set[tuple[int, int]] = set()
    steps = 0
    at = 0
    while at < len(lines):
        word, _, rest = lines[at].partition(" ")
        at += 1
        if word == "submit":
            submit(model, rest)
        elif word == "abort":
            model.abort(int(rest))
        elif word == "dead":
            request, k = rest.split()
            dead.add((int(request), int(k)))
        elif word == "idle":
            assert not model.has_work
        elif word == "step":
            wanted = {}
            while at < len(lines) and lines[at].startswith("  "):
                key, _, value = lines[at].split("#")[0].strip().partition(" ")
                wanted[key] = ast.literal_eval(value.strip())
                at += 1
            seen = model.step(lambda r, k: None if (r, k) in dead else token(r, k), fails=rest == "fails")
            assert seen["iteration"] == steps
            check_step(model, seen, wanted, f"iteration {steps}")
            steps += 1
        else:
            assert word in ("model", "#", ""), f"unknown line {lines[at - 1]!r}"
    return steps


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_trace(path: Path) -> None:
    assert play(path.read_text().splitlines()) > 0


def citations(text: str) -> Iterator[tuple[str, set[str]]]:
    """Every line of a trace that expects something, with the clauses that it cites."""
    for line in text.splitlines():
        if line.startswith(("  ", "submit ")):
            expected, _, cited = line.partition("#")
            yield expected.strip(), set(cited.split())


def uncited(texts: Iterable[str]) -> set[str]:
    """Clauses of SPEC.md that no expected line follows from."""
    return CLAUSES - {clause for text in texts for _, cited in citations(text) for clause in cited}


def test_every_expected_line_cites_clauses_that_exist() -> None:
    assert len(GOLDEN) == 20
    for path in GOLDEN:
        for line, cited in citations(path.read_text()):
            assert cited, f"{path.name}: {line} cites nothing"
            assert cited <= CLAUSES, f"{path.name}: {line}"


def test_every_clause_is_cited_by_a_trace_or_is_none_of_the_models() -> None:
    assert uncited(path.read_text() for path in GOLDEN) == set(UNTRACED)


def test_a_clause_without_a_trace_is_noticed() -> None:
    texts = [path.read_text().replace("# 6.4", "# 6.1") for path in GOLDEN]
    assert uncited(texts) - set(UNTRACED) == {"6.4"}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("swap", "moves [(1, 0)]  ", "moves [(0, 1)]  "),
        ("self_preemption", "preempted [1]", "preempted [0]"),
        ("free_order", "blank [3, 2, 4]", "blank [2, 3, 4]"),
        ("free_order", 'finished [(1, "length")]', "finished []"),
        ("door_abort_error", "-> pool", "-> max_model_len"),
        ("cache_shared", "hits [(1, 2)]", "hits [(1, 1)]"),
        ("cache_eviction", "evicted [2, 1]", "evicted [0, 2]"),
        ("cache_eviction", "cached [3, 2, 0]", "cached [3, 0, 2]"),
        ("cache_salt", '(2, ("a", (1, 2)))', "(2, (None, (1, 2)))"),
        ("cache_choices", "hits [(3, 0)]", "hits [(3, 1)]"),
        ("door_choices", "aborted [7, 4]", "aborted [4, 7]"),
        ("row_fails", 'finished [(0, "error"), (1, "error")]', 'finished [(0, "error"), (1, "error"), (2, "error")]'),
        ("row_fails", "published [(2,", "published [(1, (None, (1, 2, 3, 0))), (2,"),
        ("door_choices", "launch None", 'launch ("eager", "uncaptured")'),
    ],
)
def test_a_wrong_trace_is_noticed(name: str, old: str, new: str) -> None:
    text = next(p for p in GOLDEN if p.stem == name).read_text()
    assert old in text
    with pytest.raises(AssertionError):
        play(text.replace(old, new, 1).splitlines())
