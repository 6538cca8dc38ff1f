"""Cache rows: a request's place in the recorded batch.

A row is a label. Moving a request to another row changes one integer here and the row's buffers in compute; its K/V stays
in its blocks. Rows are few (``max_num_seqs``), so every question is answered by a scan in ascending order.
"""

from __future__ import annotations

from collections.abc import Collection


class RowTable:
    def __init__(self, num_rows: int) -> None:
        self.owner: list[int | None] = [None] * num_rows
        self.num_free = num_rows

    def take(self, request: int) -> int:
        """The lowest free row (rule 8). Raises ``RuntimeError`` when none is free: the caller checks first."""
        if self.num_free == 0:
            raise RuntimeError(f"no free row for request {request}: all {len(self.owner)} are taken")
        row = self.owner.index(None)
        self.owner[row] = request
        self.num_free -= 1
        return row

    def release(self, row: int) -> None:
        if self.owner[row] is None:
            raise RuntimeError(f"row {row} is released, but no request holds it")
        self.owner[row] = None
        self.num_free += 1

    def move(self, src: int, dst: int) -> None:
        """Relabels: whoever was in ``dst``, nobody or a request, is in ``src`` afterwards."""
        self.owner[src], self.owner[dst] = self.owner[dst], self.owner[src]

    def misplaced(self, decoding: Collection[int]) -> list[tuple[int, int]]:
        """Pairs (stray row, hole) that bring the decoding rows to 0..d-1, both ascending (rule 7).

        ``decoding`` are the rows of the requests that will decode; d is their number. A hole is a row below d that none of
        them holds; a stray is one of them at d or above. There are always as many strays as holes.
        """
        d = len(decoding)
        holes = [row for row in range(d) if row not in decoding]
        strays = sorted(row for row in decoding if row >= d)
        return list(zip(strays, holes, strict=True))
