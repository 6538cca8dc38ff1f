"""Replay or eager: a pure function of who decodes where (rule 12)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.control.plan import Eager, Replay

SCATTERED = "scattered"  # the decoding rows are not exactly 0..d-1
UNCAPTURED = "uncaptured"  # no captured shape is large enough


def decide(rows: Sequence[int], longest: int, captures: Sequence[tuple[int, int]]) -> Replay | Eager | None:
    """How the decode rows of one iteration are launched.

    ``rows`` are the decoding rows in ascending order, ``longest`` the length in blocks of their longest block table,
    ``captures`` the recorded (rows, width) shapes in ascending order. Returns ``None`` when nothing decodes. A graph is
    only ever chosen with ``width >= longest``: a narrower one would read past the end of somebody's table.
    """
    d = len(rows)
    if d == 0:
        return None
    if rows[-1] != d - 1:  # ascending and distinct, so this alone says whether they are 0..d-1
        return Eager(SCATTERED)
    for captured_rows, width in captures[bisect_left(captures, (d, 0)) :]:
        if width >= longest:
            return Replay(rows=captured_rows, width=width, padding=captured_rows - d)
    return Eager(UNCAPTURED)
