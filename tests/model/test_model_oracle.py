"""The published figures of these rules, every row of them, reproduced by the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import pytest

from model_sim import Model

# rows, requests, generation lengths in turn; decode steps; free rows: replayed, scattered; persistent: replayed, moves
COVERAGE = [
    (4, 8, (16,), 30, 30, 0, 30, 0),
    (4, 8, (8, 16), 31, 21, 10, 31, 3),
    (4, 8, (4, 32), 43, 36, 7, 43, 5),
    (8, 16, (16,), 30, 30, 0, 30, 0),
    (8, 16, (8, 16), 31, 14, 17, 31, 6),
    (8, 16, (4, 32), 47, 35, 12, 47, 11),
    (8, 16, (4, 8, 16, 32), 47, 12, 35, 47, 8),
    (16, 32, (4, 32), 51, 34, 17, 51, 23),
]
HARD_PROMPTS = [4] * 10
SWEEP_PROMPTS = [3, 2, 4, 2, 5, 3]
SWEEP = [(64, 0, 0, 0.0), (16, 0, 0, 0.0), (8, 2, 1, 0.235), (5, 5, 2, 0.386)]  # blocks, evictions, most, share
LEAK_PROMPTS = [4] * 12


@dataclass
class Totals:
    """What the figures count, over a whole run."""

    steps: int = 0
    forward_iterations: int = 0
    forward_tokens: int = 0
    recomputed_tokens: int = 0
    moves: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[int] = field(default_factory=Counter)
    finished: dict[int, str] = field(default_factory=dict)
    text: dict[int, list[int]] = field(default_factory=dict)
    blank_at_end: int = 0

    @property
    def evictions(self) -> int:
        return self.preemptions.total()

    @property
    def recompute_share(self) -> float:
        return round(self.recomputed_tokens / self.forward_tokens, 3)


def run(prompts: list[int], lengths: list[int], **limits: Any) -> Totals:
    """All requests at once, an unlimited budget, no stop token; drain, the last reaping iteration included."""
    model = Model(**{"block_size": 4, "budget": 10**6, "max_model_len": 1000, "vocab": 1000} | limits)
    for prompt, length in zip(prompts, lengths, strict=True):
        model.submit((1,) * prompt, length)
    totals = Totals()
    while model.has_work:
        seen = model.step(lambda request, k: 100 * request + k)
        count(totals, seen)
    totals.blank_at_end = len(model.state()["blank"])
    return totals


def count(totals: Totals, seen: dict[str, Any]) -> None:
    totals.steps += 1
    totals.forward_iterations += bool(seen["chunks"] or seen["decodes"])
    totals.moves += len(seen["moves"])
    totals.preemptions.update(seen["preempted"])
    totals.finished.update(seen["finished"])
    totals.forward_tokens += len(seen["decodes"])
    for request, _, _, size, _ in seen["chunks"]:
        totals.forward_tokens += size
        totals.recomputed_tokens += size if totals.preemptions[request] else 0
    for request, token in seen["sampled"]:
        totals.text.setdefault(request, []).append(token)
    if seen["launch"]:
        totals.launches[seen["launch"][0] if seen["launch"][0] == "replay" else seen["launch"][1]] += 1


@pytest.mark.parametrize("row", COVERAGE, ids=lambda r: f"{r[0]}-{r[1]}-{'.'.join(map(str, r[2]))}")
def test_coverage(row: tuple[int, int, tuple[int, ...], int, int, int, int, int]) -> None:
    rows, requests, cycled, decode_steps, replayed_free, scattered_free, replayed_kept, moves_kept = row
    lengths = list(islice(cycle(cycled), requests))
    limits = {"rows": rows, "blocks": 1000, "captures": [(rows, 1000)]}
    free = run([5] * requests, lengths, persistent_batch=False, **limits)
    assert free.launches == Counter(replay=replayed_free, scattered=scattered_free)
    assert free.launches.total() == decode_steps
    assert (free.moves, free.evictions) == (0, 0)
    kept = run([5] * requests, lengths, persistent_batch=True, **limits)
    assert kept.launches == Counter(replay=replayed_kept)
    assert kept.launches.total() == decode_steps
    assert (kept.moves, kept.evictions) == (moves_kept, 0)
    assert kept.text == free.text


def test_coverage_does_not_depend_on_prompt_lengths() -> None:
    lengths = list(islice(cycle((4, 32)), 16))
    runs = [run(p, lengths, rows=8, blocks=1000, captures=[(8, 1000)]) for p in ([1] * 16, list(range(1, 17)))]
    assert [(r.launches["replay"], r.moves) for r in runs] == [(47, 11)] * 2


@pytest.mark.parametrize("persistent", [True, False])
def test_hard_soak(persistent: bool) -> None:
    totals = run(HARD_PROMPTS, [10] * 10, rows=4, blocks=6, persistent_batch=persistent)
    assert totals.forward_iterations == 51
    assert totals.steps == 52
    assert totals.evictions == 16
    assert max(totals.preemptions.values()) == 2
    assert sum(1 for times in totals.preemptions.values() if times == 2) == 7
    assert totals.preemptions[0] == 0
    assert (totals.forward_tokens, totals.recomputed_tokens) == (234, 120)
    assert totals.recompute_share == 0.513
    assert totals.text == {request: [100 * request + k for k in range(10)] for request in range(10)}


@pytest.mark.parametrize(("blocks", "evictions", "most", "share"), SWEEP)
def test_sweep(blocks: int, evictions: int, most: int, share: float) -> None:
    totals = run(SWEEP_PROMPTS, [9] * 6, rows=3, blocks=blocks)
    assert totals.evictions == evictions
    assert max(totals.preemptions.values(), default=0) == most
    assert totals.recompute_share == share
    assert totals.text == {request: [100 * request + k for k in range(9)] for request in range(6)}


def test_leak_run_without_its_fault() -> None:
    # The fault is the engine's to have; here freeness is derived, so there is nothing to lose. Its run loses one of 10.
    totals = run(LEAK_PROMPTS, [8] * 12, rows=3, blocks=10)
    assert (totals.forward_iterations, totals.evictions) == (32, 0)
    assert totals.finished == dict.fromkeys(range(12), "length")
    assert totals.blank_at_end == 10


def test_the_figures_notice_another_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Model._running
    grow = Model._grow

    def grow_against_the_order(self: Model) -> Any:
        monkeypatch.setattr(Model, "_running", lambda m: running(m)[::-1])
        try:
            return grow(self)
        finally:
            monkeypatch.setattr(Model, "_running", running)

    monkeypatch.setattr(Model, "_grow", grow_against_the_order)
    totals = run(HARD_PROMPTS, [10] * 10, rows=4, blocks=6)
    assert totals.preemptions[0] > 0
    assert (totals.forward_iterations, totals.evictions) != (51, 16)


def test_the_figures_notice_another_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "_compact", lambda self: [])
    lengths = list(islice(cycle((4, 32)), 16))
    totals = run([5] * 16, lengths, rows=8, blocks=1000, captures=[(8, 1000)])
    assert totals.launches == Counter(replay=35, scattered=12)
