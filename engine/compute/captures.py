"""Which decode shapes are recorded: (rows, width in blocks) pairs, and what a list of them leaves uncovered (rule 12).

The cost of a torch attention step grows with the captured width, not with the context, so the default widths grow by
a half or a third, from one attention tile up to the longest table that a decode step can have, and by the time that
the cost of reading a context matters, a step reads at most half again as much of it as it needs.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.compute.tiles import TILE, tiles_for

Captures = tuple[tuple[int, int], ...]


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
    """``rows`` x ``widths``, ascending and unique, each entry clipped to what can occur; ``None`` is the default list.

    A list that the caller gave is not extended: what it leaves to eager steps is reported by ``captures_gap``. Raises
    ``ValueError`` on an entry below 1.
    """
    most = longest_table(max_model_len, block_size)
    clean_rows = _clean("capture rows", _doubling(1, max_num_seqs) if rows is None else rows, max_num_seqs)
    clean_widths = _clean("capture widths", _default_widths(most, block_size) if widths is None else widths, most)
    return tuple((r, w) for r in clean_rows for w in clean_widths)


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
