"""Coverage floors: a run of workloads in which the interesting things did not happen proves nothing, so it fails.

``Occurrences`` watches one run from the specification's side and notes what happened. ``FLOORS`` says in which share of the
workloads each must happen: half of what the generator's mean was measured to be, so that noise cannot miss a floor and a
generator that lost its way must. Every catalogue fault needs some of these events, so a fault that survives because its
place was never reached is told apart from one that was reached and not seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from engine.trace import Shape
from properties import diff

ENOUGH = 200  # workloads; below this, shares are noise and nothing is judged

FLOORS: Mapping[str, float] = {
    "preempted": 0.12,
    "preempted twice": 0.02,
    "preempted while prefilling": 0.02,
    "self-preempted": 0.04,
    "resumed": 0.12,
    "aborted while waiting": 0.06,
    "aborted while prefilling": 0.01,
    "aborted while decoding": 0.06,
    "aborted while preempted": 0.005,
    "aborted while over": 0.15,
    "chunked": 0.2,
    "mixed step": 0.2,
    "budget exhausted": 0.14,
    "pool exhausted": 0.1,
    "watermark delayed": 0.045,
    "watermark waived": 0.03,
    "overtook by priority": 0.14,
    "row reused": 0.38,
    "moved": 0.13,
    "swapped": 0.025,
    "exact replay": 0.24,
    "padded": 0.14,
    "scattered": 0.06,
    "uncaptured": 0.17,
    "failed step": 0.06,
    "prefix hit": 0.15,
    "shared": 0.1,
    "evicted": 0.15,
    "resumed on own blocks": 0.055,
    "readmitted at once": 0.009,
    "head held back with the cache on": 0.13,
    "finished: stop": 0.2,
    "stopped by a string": 0.08,
    "text held back": 0.4,
    "character told as U+FFFD": 0.4,
    "left at once": 0.08,
    "shutdown": 0.03,
    "finished: length": 0.42,
    "refused: empty_prompt": 0.065,
    "refused: token_out_of_range": 0.06,
    "refused: max_tokens": 0.065,
    "refused: max_model_len": 0.09,
    "refused: pool": 0.018,
    "refused: queue_full": 0.016,
}


def needed(share: float, runs: int) -> int:
    """Workloads in which it must have happened: the share, less three standard deviations of so rare an event."""
    expected = share * runs
    return max(0, math.ceil(expected - 3 * math.sqrt(expected)))


class Occurrences:
    """What happened in one run, by name."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._seen: Counter[str] = Counter()
        self._preempted: Counter[int] = Counter()
        self._used_rows: set[int] = set()

    def counts(self) -> Counter[str]:
        return self._seen

    def refused(self, reason: str) -> None:
        self._seen[f"refused: {reason}"] += 1

    def abort(self, request: int, status: str) -> None:
        if status == "waiting" and self._preempted[request]:
            status = "preempted"
        self._seen[f"aborted while {status}"] += 1

    def happened(self, name: str) -> None:
        """Something that the specification's own step does not show: of text and of clients."""
        self._seen[name] += 1

    def step(self, step: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """``before`` and ``after`` are the specification's states around the step."""
        self._preemptions(step, before)
        self._admissions(step, before, after)
        self._rows(step, before)
        self._launch(step["launch"])
        self._cache(step, after)
        self._seen["chunked"] += sum(not samples for *_, samples in step["chunks"])
        self._seen["mixed step"] += bool(step["chunks"] and step["decodes"])
        self._seen["failed step"] += bool(step["error"] and step["finished"])
        for _, reason in step["finished"]:
            self._seen[f"finished: {reason}"] += 1

    def _cache(self, step: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        taken = {request: hits for request, hits in step.get("hits", ()) if hits}
        self._seen["prefix hit"] += len(taken)
        self._seen["resumed on own blocks"] += sum(self._preempted[request] > 0 for request in taken)
        self._seen["evicted"] += len(step.get("evicted", ()))
        self._seen["shared"] += any(times > 1 for times in after.get("references", {}).values())
        self._seen["readmitted at once"] += len(set(step["preempted"]) & {request for request, *_ in step["admitted"]})

    def _preemptions(self, step: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        victims = step["preempted"]
        for request in victims:
            self._preempted[request] += 1
            self._seen["preempted"] += 1
            self._seen["preempted twice"] += self._preempted[request] == 2
            self._seen["preempted while prefilling"] += before["status"][request] == "prefilling"
        if victims and not self.shape.prefix_cache:
            # A victim that was preempted for another lost a block to it; one that asked itself did not.
            tables = before["tables"]
            freed = sum(len(tables.get(request, ())) for request in (*step["reaped"], *victims[:-1]))
            self._seen["self-preempted"] += len(before["blank"]) + freed == len(step["grown"])

    def _admissions(self, step: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        admitted = [request for request, *_ in step["admitted"]]
        for request, row, blocks in step["admitted"]:
            self._seen["resumed"] += self._preempted[request] > 0
            self._seen["row reused"] += row in self._used_rows
            self._seen["watermark waived"] += len(blocks) > self.shape.blocks - self.shape.watermark
            self._seen["overtook by priority"] += any(
                other < request for other in before["waiting"] if other not in admitted
            )
            self._used_rows.add(row)
        if after["waiting"] and len(after["rows"]) < self.shape.rows:
            self._head(after["waiting"][0], step, after)

    def _head(self, head: int, step: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Why the head of the queue still waits although a row is free."""
        spent = sum(count for _, _, _, count, _ in step["chunks"]) + len(step["decodes"])
        if spent >= self.shape.budget:
            self._seen["budget exhausted"] += 1
            return
        if self.shape.prefix_cache:  # hits and blocks that are about to be published have a say, too
            self._seen["head held back with the cache on"] += 1
            return
        need = -(-after["num_tokens"][head] // self.shape.block_size)
        self._seen["pool exhausted" if need > len(after["blank"]) else "watermark delayed"] += 1

    def _rows(self, step: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        old = before["rows"]
        vacated = [old[request] for request in (*step["reaped"], *step["preempted"]) if request in old]
        for _, _, swap in diff.moves(step, old, vacated):
            self._seen["swapped" if swap else "moved"] += 1

    def _launch(self, launch: tuple[Any, ...] | None) -> None:
        if launch is None:
            return
        if launch[0] == "replay":
            self._seen["padded" if launch[3] else "exact replay"] += 1
        else:
            self._seen[launch[1]] += 1


class Floors:
    """How many workloads ran, and in how many of them each thing happened. Plain numbers, so that workers can send them."""

    def __init__(self) -> None:
        self.runs = 0
        self.hits: Counter[str] = Counter()

    def add(self, occurred: Counter[str]) -> None:
        self.runs += 1
        for name, times in occurred.items():
            self.hits[name] += times > 0

    def merge(self, other: Mapping[str, Any]) -> None:
        self.runs += other["runs"]
        self.hits.update(other["hits"])

    def dump(self) -> dict[str, Any]:
        return {"runs": self.runs, "hits": dict(self.hits)}

    def missed(self, floors: Mapping[str, float] = FLOORS) -> list[str]:
        """One line for each floor that was not reached; empty when all were, or when too few workloads ran to judge."""
        if self.runs < ENOUGH:
            return []
        return [
            f"FLOOR MISSED {name}: {self.hits[name]} of {self.runs} workloads, needs {needed(share, self.runs)}"
            for name, share in floors.items()
            if self.hits[name] < needed(share, self.runs)
        ]

    def lines(self, floors: Mapping[str, float] = FLOORS) -> Iterable[str]:
        """The whole table, for people."""
        for name in sorted({*floors, *self.hits}):
            share = self.hits[name] / max(1, self.runs)
            yield f"{name:28} {self.hits[name]:7} {share:7.1%}   needs {needed(floors.get(name, 0.0), self.runs)}"
