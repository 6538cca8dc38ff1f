"""The attention tile: every sum over the context is cut at multiples of TILE positions, counted from position 0.

It is a number of positions, not of blocks, and belongs to the meaning of the result: two steps that see the same
context under different block sizes, table widths or batch shapes cut it in the same places and so add the same numbers
in the same order.
"""

TILE = 64


def tiles_for(positions: int) -> int:
    """Tiles that hold positions ``0 .. positions - 1``."""
    return -(-positions // TILE)
