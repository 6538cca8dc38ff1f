"""Captured shapes: what the default list covers, what a caller's list becomes, what is said about the rest."""

from __future__ import annotations

import pytest

from engine.compute.captures import captures_gap, clean_captures, default_captures, longest_table
from engine.control.plan import Replay
from engine.control.replay import decide


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 16, 33])
@pytest.mark.parametrize(("length", "block_size"), [(1, 4), (2, 4), (64, 4), (65, 4), (100, 7), (2048, 16), (300, 256)])
def test_default_covers_every_decode_step(rows: int, length: int, block_size: int) -> None:
    captures = default_captures(rows, length, block_size)
    assert list(captures) == sorted(set(captures))
    assert captures_gap(captures, max_num_seqs=rows, max_model_len=length, block_size=block_size) is None
    for decoding in range(1, rows + 1):
        for width in range(1, longest_table(length, block_size) + 1):
            launch = decide(range(decoding), width, captures)
            assert isinstance(launch, Replay)
            assert launch.rows < 2 * decoding
            assert launch.width * block_size <= max(1.5 * (width * block_size + 64), 64 + block_size)
    assert max(captures) == (rows, longest_table(length, block_size))


def test_default_of_the_default_model() -> None:
    captures = default_captures(16, 2048, 16)
    assert sorted({rows for rows, _ in captures}) == [1, 2, 4, 8, 16]
    assert sorted({width for _, width in captures}) == [4, 8, 12, 16, 24, 32, 48, 64, 96, 128]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 33])
@pytest.mark.parametrize("given", [(4, 1, 2), (2, 2, 2), (113,), (1, 64, 200, 3)])
def test_callers_rows_are_clipped_sorted_unique(rows: int, given: tuple[int, ...]) -> None:
    """B046."""
    captures = clean_captures(given, (9, 3, 3, 500), max_num_seqs=rows, max_model_len=100, block_size=4)
    assert list(captures) == sorted(set(captures))
    assert {r for r, _ in captures} == {min(r, rows) for r in given}
    assert {w for _, w in captures} == {3, 9, 25}


def test_bad_entries() -> None:
    with pytest.raises(ValueError, match="capture rows hold 0, but every entry must be at least 1"):
        clean_captures((1, 0), None, max_num_seqs=4, max_model_len=100, block_size=4)
    with pytest.raises(ValueError, match="capture widths hold -2"):
        clean_captures(None, (-2,), max_num_seqs=4, max_model_len=100, block_size=4)


@pytest.mark.parametrize(
    ("captures", "said"),
    [
        ((), "nothing is captured"),
        (((2, 25),), "more than 2 rows (max_num_seqs is 4)"),
        (((4, 10),), "block tables longer than 10 blocks (the longest has 25)"),
        (((2, 10),), "more than 2 rows (max_num_seqs is 4) or block tables longer than 10 blocks"),
        (((2, 25), (4, 10)), "4 rows with block tables of 25 blocks"),
        (((4, 25),), None),
    ],
)
def test_gap(captures: tuple[tuple[int, int], ...], said: str | None) -> None:
    gap = captures_gap(captures, max_num_seqs=4, max_model_len=100, block_size=4)
    assert gap is None if said is None else gap is not None and said in gap
