"""The table of replayed decode steps: what it claims holds, each claim can fail, and the stored table is what a run gives."""

from __future__ import annotations

import json
import shlex

import attrs
import pytest

from properties import coverage_table
from properties.__main__ import main
from properties.coverage_table import MIXES, ROWS, STORED, Differs, Line, Mode, complaints, lines, mode, page
from properties.faults import armed

FREE = Mode(decode_steps=47, replayed=12, scattered=35, moves=0, releases=16)
KEPT = Mode(decode_steps=47, replayed=47, scattered=0, moves=8, releases=16)
GOOD = Line(8, (4, 8, 16, 32), FREE, KEPT)


def stored_rows(rows: int) -> list[str]:
    return [line for line in STORED.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {rows} |")]


def test_the_smallest_servers_are_as_stored() -> None:
    made = list(lines(rows=(8,)))
    assert complaints(made) == []
    assert made[-1] == GOOD
    assert page(made).splitlines()[-4:] == stored_rows(8)
    assert all(line.free.scattered > 0 for line in made if len(set(line.lengths)) > 1)
    assert {rows: len(stored_rows(rows)) for rows in ROWS} == dict.fromkeys(ROWS, len(MIXES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_table_is_what_a_run_gives() -> None:
    made = list(lines())
    assert complaints(made) == []
    assert page(made) == STORED.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (attrs.evolve(GOOD, persistent=attrs.evolve(KEPT, moves=17)), "17 moves, but only 16 rows were given back"),
        (attrs.evolve(GOOD, persistent=attrs.evolve(KEPT, replayed=46)), "46 of 47 decode steps replay"),
        (attrs.evolve(GOOD, free=attrs.evolve(FREE, moves=1)), "1 moves without the persistent batch"),
        (attrs.evolve(GOOD, free=attrs.evolve(FREE, decode_steps=48)), "48 decode steps in one mode, 47 in the other"),
    ],
)
def test_each_claim_can_fail(line: Line, says: str) -> None:
    (said,) = line.complaints()
    assert said.startswith("8 rows, lengths 4, 8, 16, 32: ")
    assert said.endswith(says)


def test_with_a_bounded_budget_rows_move_more_often_than_they_are_given_back() -> None:
    """Why the claim says "unlimited": a request that is still prefilling in a low row is displaced, and once more later."""
    bounded = mode(6, (2, 7, 3), persistent_batch=True, prompt=5, budget=6)
    assert (bounded.moves, bounded.releases) == (14, 12)
    unlimited = mode(6, (2, 7, 3), persistent_batch=True, prompt=5)
    assert unlimited.moves <= unlimited.releases == 12
    free = mode(6, (2, 7, 3), persistent_batch=False, prompt=5, budget=6)
    assert "14 moves, but only 12 rows were given back" in Line(6, (2, 7, 3), free, bounded).complaints()[0]


def test_a_difference_from_the_specification_ends_the_table() -> None:
    with armed("G02"), pytest.raises(Differs, match="coverage of 16 requests in 8 rows: replay at "):
        list(lines(rows=(8,)))


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_table, "lines", lambda: [GOOD])
    assert main(["coverage", "--table"]) == 0
    assert capsys.readouterr().out == page([GOOD])
    monkeypatch.setattr(coverage_table, "lines", lambda: [attrs.evolve(GOOD, persistent=attrs.evolve(KEPT, moves=17))])
    assert main(["coverage", "--table", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["holds"], len(told["complaints"]), told["lines"][0]["persistent"]["moves"]) == (False, 1, 17)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("coverage --table --rows 4", "--table has lines of its own, so --rows cannot be chosen"),
        ("coverage --rows 4", "the following arguments are required: --requests, --lengths"),
    ],
)
def test_misuse(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 2
    assert says in capsys.readouterr().err
