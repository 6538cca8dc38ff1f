"""Coverage floors: a run of workloads in which the interesting things did not happen proves nothing, so it fails.

``FLOORS`` says in which share of the workloads each thing must happen, on every rung on which enough of them ran. A share
is at most two thirds of what the generator's mean was measured to be, so that noise cannot miss a floor and a generator that
lost its way must. Every catalogue fault needs some of these events, so a fault that survives because its place was never
reached is told apart from one that was reached and not seen. There is no floor for copy-on-write because there is no
copy-on-write: a shared block is full, and full blocks are never written (SPEC 11.8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ENOUGH = 200  # workloads; below this, shares are noise and nothing is judged

FLOORS: Mapping[str, float] = {
    # preemption
    "preempted": 0.2,
    "preempted twice": 0.04,
    "preempted while prefilling": 0.02,
    "self-preempted": 0.05,
    "resumed": 0.2,
    "readmitted at once": 0.02,
    "pool exhausted": 0.25,
    # aborts, by what the request was doing; over: it had ended, or was being aborted
    "aborted while waiting": 0.2,
    "aborted while prefilling": 0.03,
    "aborted while decoding": 0.12,
    "aborted while preempted": 0.03,
    "aborted while over": 0.25,
    # admission
    "chunked": 0.3,
    "mixed step": 0.3,
    "budget exhausted": 0.2,
    "watermark delayed": 0.01,
    "watermark waived": 0.025,
    "overtook by priority": 0.15,
    "head held back with the cache on": 0.2,
    # rows and launches
    "row reused": 0.5,
    "moved": 0.2,
    "swapped": 0.015,
    "replayed": 0.4,
    "exact replay": 0.3,
    "padded": 0.2,
    "scattered": 0.05,
    "uncaptured": 0.2,
    # the prefix cache
    "prefix hit": 0.2,
    "full hit": 0.15,
    "unowned hit": 0.15,
    "shared": 0.15,
    "duplicate published": 0.15,
    "evicted": 0.2,
    "resumed on own blocks": 0.06,
    # ends
    "finished: stop": 0.2,
    "finished: length": 0.5,
    "finished: abort": 0.25,
    "finished: error": 0.1,
    "failed step": 0.1,
    "shutdown": 0.015,
    "left at once": 0.04,
    # what is rare
    "row without a token": 0.018,
    "text failed": 0.012,
    "went on beside a failure": 0.018,
    "asked for no hits": 0.012,
    "four salts": 0.01,
    "priority beyond 1": 0.03,
    # text
    "stopped by a string": 0.05,
    "text held back": 0.4,
    "character told as U+FFFD": 0.4,
    # the door
    "refused": 0.08,
    "refused: empty_prompt": 0.03,
    "refused: token_out_of_range": 0.03,
    "refused: id below 0": 0.01,
    "refused: max_tokens": 0.02,
    "refused: max_model_len": 0.04,
    "refused: pool": 0.01,
    "refused: queue_full": 0.004,
}


_REPORTS = {"logprobs compared": 0.25, "prompt logprobs compared": 0.1, "logits digests compared": 0.22}
ON_RUNG: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(("tiny", "native", "gpu"), _REPORTS),
    "wire": {
        "deliveries merged": 0.35,
        "deliveries merged with an end": 0.2,
        "deliveries merged with stop strings": 0.05,
    },
}
"""What one rung alone can see, as ``Rung.happened`` tells it."""


def floors_of(rung: str) -> Mapping[str, float]:
    return {**FLOORS, **ON_RUNG.get(rung, {})}


def needed(share: float, runs: int) -> int:
    """Workloads in which it must have happened: the share, less three standard deviations of so rare an event."""
    expected = share * runs
    return max(0, math.ceil(expected - 3 * math.sqrt(expected)))


class Floors:
    """How many workloads ran on a rung, and in how many of them each thing happened. Plain numbers: workers send them."""

    def __init__(self, rung: str = "ledger") -> None:
        self.rung = rung
        self.runs = 0
        self.iterations = 0
        self.hits: Counter[str] = Counter()

    def add(self, occurred: Counter[str], iterations: int = 0) -> None:
        self.runs += 1
        self.iterations += iterations
        for name, times in occurred.items():
            self.hits[name] += times > 0

    def merge(self, other: Mapping[str, Any]) -> None:
        self.runs += other["runs"]
        self.iterations += other.get("iterations", 0)
        self.hits.update(other["hits"])

    def dump(self) -> dict[str, Any]:
        return {"rung": self.rung, "runs": self.runs, "iterations": self.iterations, "hits": dict(self.hits)}

    def missed(self, floors: Mapping[str, float] | None = None) -> list[str]:
        """One line for each floor of its rung that was not reached; empty when all were, or when too few workloads ran to
        judge."""
        if self.runs < ENOUGH:
            return []
        floors = floors_of(self.rung) if floors is None else floors
        return [
            f"FLOOR MISSED {name}: {self.hits[name]} of {self.runs} workloads, needs {needed(share, self.runs)}"
            for name, share in floors.items()
            if self.hits[name] < needed(share, self.runs)
        ]

    def lines(self) -> Iterable[str]:
        """The whole table, for people."""
        floors = floors_of(self.rung)
        judged = "" if self.runs >= ENOUGH else f", too few to judge: that takes {ENOUGH}"
        yield f"rung {self.rung}: {self.runs} workloads, {self.iterations} iterations{judged}"
        for name in sorted({*floors, *self.hits}):
            floor = floors.get(name, 0.0)
            share = self.hits[name] / max(1, self.runs)
            yield f"  {name:34} {self.hits[name]:7} {share:7.1%}   floor {floor:6.1%}, needs {needed(floor, self.runs)}"


class Boards:
    """The floors of every rung that ran."""

    def __init__(self) -> None:
        self._floors: dict[str, Floors] = {}

    def __getitem__(self, rung: str) -> Floors:
        return self._floors.setdefault(rung, Floors(rung))

    def __iter__(self) -> Iterator[Floors]:
        return iter(self._floors.values())

    def merge(self, dumps: Iterable[Mapping[str, Any]]) -> None:
        for dump in dumps:
            self[dump["rung"]].merge(dump)

    def dump(self) -> list[dict[str, Any]]:
        return [floors.dump() for floors in self]

    def missed(self) -> list[str]:
        return [f"{line} on {floors.rung}" for floors in self for line in floors.missed()]
