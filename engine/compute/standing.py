"""What stands in the static inputs after a replayed step, so that the next one writes no more than what differs.

    written whole   other rows, another shape, a row given, taken or moved since, a position that is not the next one
    gone on         otherwise: tokens and positions; slots one further; tables where a block was appended

Nothing else decides it, and what is not known to be the same is written anew: after a step that raised, nothing stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from engine.compute.graphs import Shape


@attrs.frozen(eq=False)
class Standing:
    """One step as it was written. ``epoch`` is ``RowState.epoch`` of that time, ``positions`` are those of ``rows``."""

    shape: Shape
    rows: Sequence[int]
    epoch: int
    positions: Sequence[int]

    def precedes(self, then: Standing) -> bool:
        """Whether step ``then`` has the same rows, with the same requests on the same blocks, each one position further."""
        return (
            then.epoch == self.epoch
            and then.shape == self.shape
            and then.rows == self.rows
            and then.positions == [position + 1 for position in self.positions]
        )
