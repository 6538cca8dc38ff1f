"""Captured shapes: what the default list covers, what a caller's list becomes, what is said about the rest."""

from __future__ import annotations

from typing import Any

import pytest

from engine.compute.captures import (
    Bounds,
    Room,
    TooMany,
    captures_gap,
    clean_captures,
    default_captures,
    longest_table,
    plan_captures,
)
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


SIZES: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 2049,
    "block_size": 16,
}  # rows 1 2 4 8, ten widths up to 128 blocks


@pytest.mark.parametrize(
    ("bound", "longest", "room", "ceiling", "graphs"),
    [
        ("context", None, Room(), 128, 40),
        ("flag", 1025, Room(), 64, 32),
        ("flag", 500, Room(), 32, 24),
        ("bytes", None, Room(bytes=21_000, each=1000), 24, 20),
        ("graphs", None, Room(graphs=39), 96, 36),
        ("graphs", 1025, Room(bytes=30_000, each=1000, graphs=11), 8, 8),
        ("bytes", 1025, Room(bytes=30_999, each=1000, graphs=1000), 48, 28),
    ],
)
def test_the_ceiling_is_what_the_tightest_bound_allows(
    bound: str, longest: int | None, room: Room, ceiling: int, graphs: int
) -> None:
    listed = plan_captures(None, None, longest=longest, room=room, **SIZES)
    assert (listed.bounds.bound_by, listed.bounds.ceiling, len(listed.shapes)) == (bound, ceiling, graphs)
    assert max(width for _, width in listed.shapes) == ceiling
    assert {rows for rows, _ in listed.shapes} == {1, 2, 4, 8}  # a bound takes widths away, never rows
    assert listed.estimated_bytes == graphs * room.each <= room.bytes
    assert captures_gap(listed.shapes, **SIZES) is None if ceiling == 128 else captures_gap(listed.shapes, **SIZES)


def test_each_bound_is_told_even_where_another_is_tighter() -> None:
    room = Room(bytes=30_999, each=1000, graphs=11)
    assert plan_captures(None, None, longest=1025, room=room, **SIZES).bounds == Bounds(128, 64, 48, 8)


def test_the_callers_widths_are_a_flag() -> None:
    listed = plan_captures((2,), (9, 3, 77), longest=None, room=Room(graphs=2), **SIZES)
    assert listed.bounds == Bounds(context=128, flag=77, bytes=128, graphs=9)
    assert listed.shapes == ((2, 3), (2, 9))
    assert plan_captures((2,), (40,), longest=100, **SIZES).shapes == ((2, 7),)  # nothing of the list is short enough


def test_a_recorder_that_reads_lengths_needs_one_width() -> None:
    listed = plan_captures(None, None, longest=1025, one_width=True, **SIZES)
    assert listed.shapes == ((1, 64), (2, 64), (4, 64), (8, 64))
    assert plan_captures(None, (4, 8), one_width=True, **SIZES).shapes[:2] == ((1, 4), (1, 8))  # asked for, so recorded


@pytest.mark.parametrize(("bound", "room"), [("graphs", Room(graphs=3)), ("bytes", Room(bytes=3999, each=1000))])
def test_what_not_even_one_width_fits_is_refused(bound: str, room: Room) -> None:
    with pytest.raises(TooMany, match="4 row buckets need a graph each, but 3 fit") as refused:
        plan_captures(None, None, room=room, **SIZES)
    assert refused.value.bound == bound
