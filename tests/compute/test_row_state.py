"""Row operations: each one, in the plan's order, and nothing left behind."""

from __future__ import annotations

import numpy as np

from engine.compute.row_state import RowState, RowView
from engine.control.plan import Grow, Move, Plan, Seat
from tests.compute.driver import Spy

TRASH = 99


def seat(request: int, row: int, *table: int) -> Seat:
    return Seat(request, row, (1, 2), 2, table, None)


def state(*seats: Seat) -> RowState:
    rows = RowState(4, 5, TRASH)
    rows.apply(Plan(0, seated=seats), Spy())
    return rows


def test_seat_clears_what_was_there() -> None:
    rows = state(seat(1, 0, 5, 6, 7))
    rows.apply(Plan(1, seated=(seat(2, 0, 8),)), Spy())
    assert rows.view() == (RowView(0, 2, (8,)),)
    assert rows.tables[0].tolist() == [8, TRASH, TRASH, TRASH, TRASH]


def test_vacate_grow_move_seat_in_this_order() -> None:
    rows, spy = state(seat(1, 0, 5), seat(2, 1, 6), seat(3, 3, 7)), Spy()
    plan = Plan(
        1,
        vacated=(0,),
        grown=(Grow(3, 3, 9),),  # the row as it was before the moves
        moves=(Move(3, 3, 0, False),),
        seated=(seat(4, 3, 5, 2),),
    )
    rows.apply(plan, spy)
    assert rows.view() == (RowView(0, 3, (7, 9)), RowView(1, 2, (6,)), RowView(3, 4, (5, 2)))
    assert spy.events == [("vacate", 0), Move(3, 3, 0, False), ("seat", 3)]


def test_a_vacated_row_points_at_trash() -> None:
    rows = state(seat(1, 2, 5, 6))
    rows.apply(Plan(1, vacated=(2,)), Spy())
    assert (rows.tables == TRASH).all()
    assert not any(rows.lengths)


def test_move_leaves_its_source_empty_and_swap_exchanges() -> None:
    rows = state(seat(1, 0, 5), seat(2, 3, 6, 7))
    rows.apply(Plan(1, moves=(Move(2, 3, 1, False),)), Spy())
    assert rows.view() == (RowView(0, 1, (5,)), RowView(1, 2, (6, 7)))
    assert (rows.tables[3] == TRASH).all()
    rows.apply(Plan(2, moves=(Move(2, 1, 0, True),)), Spy())
    assert rows.view() == (RowView(0, 2, (6, 7)), RowView(1, 1, (5,)))
    assert rows.tables[1].tolist() == [5, TRASH, TRASH, TRASH, TRASH]


def test_tables_are_copies() -> None:
    rows = state(seat(1, 0, 5), seat(2, 1, 6))
    rows.apply(Plan(1, moves=(Move(1, 0, 1, True),)), Spy())
    rows.apply(Plan(2, grown=(Grow(1, 1, 8),)), Spy())
    assert np.array_equal(rows.tables[:2, :2], [[6, TRASH], [5, 8]])
