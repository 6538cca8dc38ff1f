"""The published figures of the rules, reproduced by engine and specification in lockstep, in both batch modes."""

from __future__ import annotations

import pytest

from properties.experiments import coverage, coverage_workload, soak, soak_workload

# rows, requests, lengths cycled, decode steps, replayed and scattered with free rows, replayed and moves when persistent
COVERAGE = [
    (4, 8, [16], 30, 30, 0, 30, 0),
    (4, 8, [8, 16], 31, 21, 10, 31, 3),
    (4, 8, [4, 32], 43, 36, 7, 43, 5),
    (8, 16, [16], 30, 30, 0, 30, 0),
    (8, 16, [8, 16], 31, 14, 17, 31, 6),
    (8, 16, [4, 32], 47, 35, 12, 47, 11),
    (8, 16, [4, 8, 16, 32], 47, 12, 35, 47, 8),
    (16, 32, [4, 32], 51, 34, 17, 51, 23),
]
HARD = {
    "finished": 10,
    "forward_iterations": 51,
    "steps_with_final_reap": 52,
    "evictions": 16,
    "max_preemptions": 2,
    "preempted_twice": 7,
    "oldest_preemptions": 0,
    "forward_tokens": 234,
    "recomputed_tokens": 120,
    "recompute_share": 0.513,
    "free_blocks_at_end": 6,
}
SWEEP = [(64, 0, 0, 0.0), (16, 0, 0, 0.0), (8, 2, 1, 0.235), (5, 5, 2, 0.386)]  # blocks, evictions, most of one, share
LEAK = {"prompts": [4] * 12, "max_tokens": 8, "rows": 3, "blocks": 10, "block_size": 4}


@pytest.mark.parametrize("row", COVERAGE, ids=str)
def test_coverage(row: tuple[int, int, list[int], int, int, int, int, int]) -> None:
    rows, requests, lengths, steps, replayed, scattered, persistent, moves = row
    moving = coverage(coverage_workload(rows, requests, lengths))
    assert moving.violated is None
    assert moving.figures == {"decode_steps": steps, "replayed": persistent, "scattered": 0, "moves": moves}
    still = coverage(coverage_workload(rows, requests, lengths, persistent_batch=False))
    assert still.violated is None
    assert still.figures == {"decode_steps": steps, "replayed": replayed, "scattered": scattered, "moves": 0}


@pytest.mark.parametrize("persistent_batch", [True, False])
def test_soak_in_a_hard_pool(persistent_batch: bool) -> None:
    ran = soak(soak_workload([4] * 10, 10, rows=4, blocks=6, block_size=4, persistent_batch=persistent_batch))
    assert ran.violated is None
    assert {name: ran.figures[name] for name in HARD} == HARD


@pytest.mark.parametrize("persistent_batch", [True, False])
def test_soak_text_does_not_depend_on_the_pool(persistent_batch: bool) -> None:
    texts = set()
    for blocks, evictions, most, share in SWEEP:
        ran = soak(
            soak_workload([3, 2, 4, 2, 5, 3], 9, rows=3, blocks=blocks, block_size=4, persistent_batch=persistent_batch)
        )
        assert ran.violated is None
        figures = [ran.figures[name] for name in ("evictions", "max_preemptions", "recompute_share")]
        assert figures == [evictions, most, share]
        texts.add(ran.figures["text"])
    assert len(texts) == 1


@pytest.mark.parametrize("persistent_batch", [True, False])
def test_the_leak_is_caught_where_it_arises(persistent_batch: bool) -> None:
    workload = soak_workload(**LEAK, persistent_batch=persistent_batch)  # type: ignore[arg-type]
    found = soak(workload, fault="A05").violated
    assert found is not None
    assert (found.check, found.iteration, found.headline) == (
        "audit",
        9,
        "block 2 is allocated but no request holds it",
    )


@pytest.mark.parametrize("persistent_batch", [True, False])
def test_nobody_notices_the_leak_when_nobody_looks(persistent_batch: bool) -> None:
    workload = soak_workload(**LEAK, persistent_batch=persistent_batch)  # type: ignore[arg-type]
    blind, sound = soak(workload, fault="A05", looking=False), soak(workload)
    assert blind.violated is None
    expected = {"finished": 12, "forward_iterations": 32, "evictions": 0, "free_blocks_at_end": 9}
    assert {name: blind.figures[name] for name in expected} == expected
    assert blind.figures["text"] == sound.figures["text"]
    assert sound.figures["free_blocks_at_end"] == 10
