"""Which cells of the cache an iteration may touch, by the specification alone. A cell is one position of one block.

    owned      before the forward: positions computed earlier of requests that hold blocks, and all of published blocks
    scheduled  what the forward writes
    trash      written when a replay pads, and only then

Everything else is nobody's: the harness may put what it likes there, and nobody may change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.bool_]  # [blocks, block_size]


@attrs.frozen(eq=False)
class Touched:
    """``scheduled[cell] = (request, position)``, a cell being ``block * block_size + offset``."""

    owned: Cells
    scheduled: Mapping[int, tuple[int, int]]
    padded: bool
    failed: bool


def touched(step: Mapping[str, Any], after: Mapping[str, Any], blocks: int, block_size: int) -> Touched:
    """Of one iteration: ``step`` is what the specification did, ``after`` what it holds at the observation point."""
    owned = np.zeros(blocks * block_size, dtype=np.bool_)
    tables, computed = after["tables"], after["computed"]
    for request, table in tables.items():
        full, part = divmod(computed[request], block_size)
        for block in table[:full]:
            owned[block * block_size : (block + 1) * block_size] = True
        if part:
            owned[table[full] * block_size : table[full] * block_size + part] = True
    for block in after.get("published", ()):
        owned[block * block_size : (block + 1) * block_size] = True
    scheduled = {}
    work = [(request, at, count) for request, _, at, count, _ in step["chunks"]]
    work += [(request, at, 1) for request, _, at in step["decodes"]]
    for request, at, count in work:
        table = tables[request]
        for position in range(at, at + count):
            scheduled[table[position // block_size] * block_size + position % block_size] = (request, position)
    owned[list(scheduled)] = False
    launch = step["launch"]
    padded = launch is not None and launch[0] == "replay" and launch[3] > 0
    return Touched(owned.reshape(blocks, block_size), scheduled, padded, bool(step["error"]))


def place(cell: int, block_size: int, owner: tuple[int, int] | None) -> str:
    """A cell as a person reads it."""
    whose = "" if owner is None else f" (r{owner[0]}'s position {owner[1]})"
    return f"block {cell // block_size} offset {cell % block_size}{whose}"
