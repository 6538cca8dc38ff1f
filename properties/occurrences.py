"""What happened in one run, by name, seen from the specification's side: what the coverage floors count.

A name says the event and not the line (``preempted while prefilling``), so that it means the same after any refactoring, and
so that a catalogue fault can say which of them it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from engine.trace import Shape, Submit, prompt_tokens
from properties import diff

State = Mapping[str, Any]


class Occurrences:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._seen: Counter[str] = Counter()
        self._preempted: Counter[int] = Counter()
        self._used_rows: set[int] = set()
        self._salts: set[str] = set()

    def counts(self) -> Counter[str]:
        return self._seen

    def accepted(self, event: Submit) -> None:
        self._salts.add(event.salt)
        self._seen["asked for no hits"] += self.shape.prefix_cache and not event.takes_hits
        self._seen["four salts"] += self.shape.prefix_cache and len(self._salts) >= 4
        self._seen["priority beyond 1"] += abs(event.priority) > 1

    def refused(self, reason: str, event: Submit) -> None:
        self._seen["refused"] += 1
        self._seen[f"refused: {reason}"] += 1
        self._seen["refused: id below 0"] += reason == "token_out_of_range" and min(prompt_tokens(event.prompt)) < 0

    def abort(self, request: int, status: str) -> None:
        if status == "waiting" and self._preempted[request]:
            status = "preempted"
        self._seen[f"aborted while {status}"] += 1

    def happened(self, name: str) -> None:
        """Something that the specification's own step does not show: of text and of clients."""
        self._seen[name] += 1

    def step(self, step: State, before: State, after: State) -> None:
        """``before`` and ``after`` are the specification's states around the step."""
        if step["preempted"]:
            self._preemptions(step, before)
        if step["admitted"]:
            self._admissions(step, before)
        if after["waiting"] and len(after["rows"]) < self.shape.rows:
            self._head(after["waiting"][0], step, after)
        if step["moves"]:
            self._moves(step, before)
        if step["launch"] is not None:
            self._launch(step["launch"])
        if self.shape.prefix_cache:
            self._cache(step, before, after)
        if step["chunks"]:
            self._seen["chunked"] += not all(samples for *_, samples in step["chunks"])
            self._seen["mixed step"] += bool(step["decodes"])
        if step["error"] and step["finished"]:
            self._seen["failed step"] += 1
        elif step["finished"]:
            self._failures(step)
        if step["aborted"]:
            self._seen["finished: abort"] += 1
        for _, reason in step["finished"]:
            self._seen[f"finished: {reason}"] += 1

    def _failures(self, step: State) -> None:
        """SPEC 13.7 and 13.8, and whether anybody was there to be hurt."""
        sampled = {request for request, _ in step["sampled"]}
        failed = {request for request, reason in step["finished"] if reason == "error"}
        self._seen["row without a token"] += len(failed - sampled)
        self._seen["text failed"] += len(failed & sampled)
        self._seen["went on beside a failure"] += bool(failed and sampled - failed)

    def _preemptions(self, step: State, before: State) -> None:
        victims = step["preempted"]
        self._seen["pool exhausted"] += 1
        self._seen["readmitted at once"] += len(set(victims) & {request for request, *_ in step["admitted"]})
        for request in victims:
            self._preempted[request] += 1
            self._seen["preempted"] += 1
            self._seen["preempted twice"] += self._preempted[request] == 2
            self._seen["preempted while prefilling"] += before["status"][request] == "prefilling"
        if not self.shape.prefix_cache:
            # A victim that was preempted for another lost a block to it; one that asked itself did not.
            tables = before["tables"]
            freed = sum(len(tables.get(request, ())) for request in (*step["reaped"], *victims[:-1]))
            self._seen["self-preempted"] += len(before["blank"]) + freed == len(step["grown"])

    def _admissions(self, step: State, before: State) -> None:
        admitted = [request for request, *_ in step["admitted"]]
        for request, row, blocks in step["admitted"]:
            self._seen["resumed"] += self._preempted[request] > 0
            self._seen["row reused"] += row in self._used_rows
            self._seen["watermark waived"] += len(blocks) > self.shape.blocks - self.shape.watermark
            self._seen["overtook by priority"] += any(
                other < request for other in before["waiting"] if other not in admitted
            )
            self._used_rows.add(row)

    def _head(self, head: int, step: State, after: State) -> None:
        """Why the head of the queue still waits although a row is free."""
        spent = sum(count for _, _, _, count, _ in step["chunks"]) + len(step["decodes"])
        if spent >= self.shape.budget:
            self._seen["budget exhausted"] += 1
            return
        short = -(-after["num_tokens"][head] // self.shape.block_size) > len(after["blank"])
        if self.shape.prefix_cache:  # hits and blocks that are about to be published have a say, too
            self._seen["head held back with the cache on"] += 1
        else:
            self._seen["pool exhausted" if short else "watermark delayed"] += 1

    def _moves(self, step: State, before: State) -> None:
        old = before["rows"]
        vacated = [old[request] for request in (*step["reaped"], *step["preempted"]) if request in old]
        for _, _, swap in diff.moves(step, old, vacated):
            self._seen["swapped" if swap else "moved"] += 1

    def _launch(self, launch: tuple[Any, ...]) -> None:
        if launch[0] == "replay":
            self._seen["replayed"] += 1
            self._seen["padded" if launch[3] else "exact replay"] += 1
        else:
            self._seen[launch[1]] += 1

    def _cache(self, step: State, before: State, after: State) -> None:
        for (request, hits), (_, _, table) in zip(step["hits"], step["admitted"], strict=True):
            if hits:
                self._hits(request, table[:hits], table, step, before, after)
        if step["evicted"]:
            self._seen["evicted"] += 1
        if not step["error"]:
            size = self.shape.block_size
            full = sum([(at + count) // size - at // size for _, _, at, count, _ in step["chunks"]])
            full += sum([not (at + 1) % size for _, _, at in step["decodes"]])
            self._seen["duplicate published"] += full > len(step["published"])  # the first stays (SPEC 11.4)
        if len(after["references"]) < sum(after["references"].values()):
            self._seen["shared"] += 1

    def _hits(
        self, request: int, taken: tuple[int, ...], table: tuple[int, ...], step: State, before: State, after: State
    ) -> None:
        self._seen["prefix hit"] += 1
        self._seen["resumed on own blocks"] += self._preempted[request] > 0
        self._seen["unowned hit"] += not set(taken).isdisjoint(before["cached"])
        sampled = request in [number for number, _ in step["sampled"]]
        num_tokens = after["num_tokens"][request] - sampled
        self._seen["full hit"] += len(taken) == len(table) - 1 and num_tokens % self.shape.block_size == 0
