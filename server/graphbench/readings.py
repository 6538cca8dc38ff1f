"""What a server says about itself at one moment, and what happened between two such moments.

Every claim about a run is the difference of two readings of ``/health``: one before the first request, one when the
engine is idle again. A difference below zero means that the server was restarted in between, and is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs


class Backwards(RuntimeError):
    """A total went down between two readings: they are not of one and the same run."""


@attrs.frozen
class Happened:
    """Between two readings. ``decode_rows[n]``: decode steps with n decoding rows; ``replays``: steps by shape."""

    decode_steps: int
    decode_rows: Mapping[int, int]
    replays: Mapping[str, int]
    eager: Mapping[str, int]  # steps by reason
    recorded: int  # graphs
    sampled_tokens: int
    prefill_tokens: int
    padded_rows: int
    row_moves: int
    preemptions: int

    @property
    def replayed(self) -> int:
        return sum(self.replays.values())

    @property
    def replay_share(self) -> float:
        return self.replayed / self.decode_steps if self.decode_steps else 0.0

    @property
    def peak_rows(self) -> int:
        """The most requests that decoded in one step, by the engine's own count: a poll could miss it."""
        return max(self.decode_rows, default=0)


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Happened:
    """``before`` and ``after`` are the ``readings`` of ``/health``. Raises ``Backwards``."""

    def plain(name: str) -> int:
        return _difference(name, int(before[name]), int(after[name]))

    def by_key(name: str) -> dict[str, int]:
        keys = sorted({*before[name], *after[name]})
        counts = {key: _difference(f"{name}[{key}]", before[name].get(key, 0), after[name].get(key, 0)) for key in keys}
        return {key: count for key, count in counts.items() if count}

    return Happened(
        decode_steps=plain("decode_steps"),
        decode_rows={int(rows): count for rows, count in by_key("decode_rows").items()},
        replays=by_key("replays"),
        eager=by_key("eager_steps"),
        recorded=plain("recorded_graphs"),
        sampled_tokens=plain("sampled_tokens"),
        prefill_tokens=plain("prefill_tokens"),
        padded_rows=plain("padded_rows"),
        row_moves=plain("row_moves"),
        preemptions=plain("preemptions"),
    )


def total(parts: Sequence[Happened]) -> Happened:
    """What happened in several stretches of one run, together."""

    def added(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], int):
            return sum(values)
        counts: Counter[Any] = Counter()
        for value in values:
            counts.update(value)
        return dict(counts)

    return Happened(**{field.name: added(field.name) for field in attrs.fields(Happened)})


def _difference(name: str, before: int, after: int) -> int:
    if after < before:
        raise Backwards(f"{name} went from {before} to {after}: these two readings are not of one run")
    return after - before
