"""Totals since start. Readings for people and metrics; no decision ever looks at them."""

from __future__ import annotations

from collections import Counter

import attrs


@attrs.define
class Counters:
    iterations: int = 0
    forward_iterations: int = 0  # iterations whose plan had tokens to compute
    forward_tokens: int = 0  # every position computed
    prefill_tokens: int = 0
    decode_rows: Counter[int] = attrs.field(factory=Counter, eq=dict)  # decode steps by the number of rows that decoded
    replays: Counter[tuple[int, int]] = attrs.field(factory=Counter, eq=dict)  # by (rows, width)
    eager: Counter[str] = attrs.field(factory=Counter, eq=dict)  # by reason
    padded_rows: int = 0
    row_moves: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # all tokens computed in the prefill of a request that was preempted before
    sampled_tokens: int = 0
    prefix_hit_tokens: int = 0  # tokens that admissions found in the prefix cache, resumed requests included
    submitted: int = 0
    refused: Counter[str] = attrs.field(factory=Counter, eq=dict)  # by reason of the door
    finished: Counter[str] = attrs.field(factory=Counter, eq=dict)  # by finish reason
    failed_steps: int = 0

    @property
    def decode_steps(self) -> int:
        """Iterations in which at least one row decoded."""
        return sum(self.decode_rows.values())

    @property
    def replayed(self) -> int:
        return sum(self.replays.values())
