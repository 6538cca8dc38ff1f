"""Which decode shapes are recorded: (rows, width in blocks) pairs, and what a list of them leaves uncovered (rule 12).

    row buckets x width buckets, up to a ceiling of blocks, which is the least of what four bounds allow

    context   the longest block table that a decode step can have
    flag      the longest context, or the widest width, that the caller wants recorded
    bytes     what the recorded graphs may hold
    graphs    how many there may be

The cost of a torch attention step grows with the captured width, not with the context, so the default widths grow by
a half or a third, from one attention tile up to the longest table that a decode step can have, and by the time that
the cost of reading a context matters, a step reads at most half again as much of it as it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from engine.compute.tiles import TILE, tiles_for

Captures = tuple[tuple[int, int], ...]

MOST_GRAPHS = 1024  # unless told otherwise


class TooMany(ValueError):
    """Not even the narrowest graph of each row bucket fits. ``bound``: ``bytes`` or ``graphs``."""

    def __init__(self, bound: str, message: str) -> None:
        super().__init__(message)
        self.bound = bound


@attrs.frozen
class Bounds:
    """The widest block table, in blocks, that each bound alone would have recorded."""

    context: int
    flag: int
    bytes: int
    graphs: int

    @property
    def ceiling(self) -> int:
        return min(self.context, self.flag, self.bytes, self.graphs)

    @property
    def bound_by(self) -> str:
        """The bound that is the ceiling; the first of them, if several are."""
        return next(name for name, blocks in attrs.asdict(self).items() if blocks == self.ceiling)


@attrs.frozen
class Room:
    """How much may be recorded: ``bytes`` in all, ``each`` the estimate for one graph, and ``graphs`` in number."""

    bytes: int = 2**62
    each: int = 0
    graphs: int = MOST_GRAPHS

    def fit(self, count: int) -> bool:
        return count <= self.graphs and count * self.each <= self.bytes

    @property
    def most(self) -> int:
        """Graphs that fit."""
        return min(self.graphs, self.bytes // self.each if self.each else self.graphs)


@attrs.frozen
class CaptureList:
    """``shapes`` ascending and unique; ``estimated_bytes`` is what they are expected to hold."""

    shapes: Captures
    bounds: Bounds
    estimated_bytes: int


def plan_captures(
    rows: Iterable[int] | None,
    widths: Iterable[int] | None,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    longest: int | None = None,
    room: Room | None = None,
    one_width: bool = False,
) -> CaptureList:
    """``rows`` x ``widths`` as far as the bounds allow; ``None`` is the default list.

    ``longest``: tokens of the longest context to record. ``one_width``: the recorder reads lengths when it replays, so it
    needs the widest alone. A list that the caller gave is clipped to what can occur and never extended; what it leaves to
    eager steps is reported by ``captures_gap``. Raises ``ValueError`` on an entry below 1, and ``TooMany``.
    """
    space = room or Room()
    context = longest_table(max_model_len, block_size)
    flag = context if longest is None else min(context, longest_table(longest, block_size))
    clean_rows = _clean("capture rows", _doubling(1, max_num_seqs) if rows is None else rows, max_num_seqs)
    candidates = _clean("capture widths", _default_widths(flag, block_size) if widths is None else widths, context)
    if widths is not None:
        flag = min(flag, candidates[-1])
    candidates = [width for width in candidates if width <= flag] or [flag]
    if one_width and widths is None:
        candidates = candidates[-1:]
    for name, alone in (("bytes", Room(space.bytes, space.each)), ("graphs", Room(graphs=space.graphs))):
        if not alone.fit(len(clean_rows)):
            raise TooMany(name, f"{len(clean_rows)} row buckets need a graph each, but {alone.most} fit")
    bounds = Bounds(
        context=context,
        flag=flag,
        bytes=_widest(clean_rows, candidates, Room(space.bytes, space.each, graphs=2**62), context),
        graphs=_widest(clean_rows, candidates, Room(graphs=space.graphs), context),
    )
    shapes = tuple((r, w) for r in clean_rows for w in candidates if w <= bounds.ceiling)
    return CaptureList(shapes, bounds, len(shapes) * space.each)


def _widest(rows: Sequence[int], widths: Sequence[int], room: Room, context: int) -> int:
    """The widest of ``widths`` up to which all fit; the context where all of them do."""
    kept = room.most // len(rows)
    return context if kept >= len(widths) else widths[kept - 1]


def longest_table(max_model_len: int, block_size: int) -> int:
    """Blocks of the longest table in a decode step: the last token of a sequence is sampled, but never computed."""
    return max(1, -(-(max_model_len - 1) // block_size))


def default_captures(max_num_seqs: int, max_model_len: int, block_size: int) -> Captures:
    """Rows 1, 2, 4, ... ``max_num_seqs`` times widths of 1, 2, 3, 4, 6, 8, 12, ... tiles; covers every decode step."""
    return clean_captures(None, None, max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)


def clean_captures(
    rows: Iterable[int] | None,
    widths: Iterable[int] | None,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> Captures:
    """The shapes of ``plan_captures`` without bounds but the context."""
    return plan_captures(
        rows, widths, max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size
    ).shapes


def captures_gap(captures: Captures, *, max_num_seqs: int, max_model_len: int, block_size: int) -> str | None:
    """Which decode steps would run eagerly for want of a captured shape, in one sentence; ``None`` if none would."""
    most = longest_table(max_model_len, block_size)
    if not captures:
        return "nothing is captured, so every decode step runs eagerly"
    if any(rows >= max_num_seqs and width >= most for rows, width in captures):
        return None
    top_rows, top_width = max(rows for rows, _ in captures), max(width for _, width in captures)
    missing = []
    if top_rows < max_num_seqs:
        missing.append(f"more than {top_rows} rows (max_num_seqs is {max_num_seqs})")
    if top_width < most:
        missing.append(f"block tables longer than {top_width} blocks (the longest has {most})")
    if not missing:
        missing.append(f"{max_num_seqs} rows with block tables of {most} blocks")
    return f"decode steps with {' or '.join(missing)} run eagerly, since no captured shape covers them"


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... below ``last``, then ``last``."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def _default_widths(most: int, block_size: int) -> list[int]:
    tiles = _doubling(1, tiles_for(most * block_size))
    tiles += [count * 3 // 2 for count in tiles if count > 1]
    return [min(most, -(-count * TILE // block_size)) for count in tiles]


def _clean(name: str, values: Iterable[int], most: int) -> list[int]:
    listed = list(values)
    for value in listed:
        if value < 1:
            raise ValueError(f"{name} hold {value}, but every entry must be at least 1")
    return sorted({min(value, most) for value in listed})
