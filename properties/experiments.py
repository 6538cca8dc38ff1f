"""The two published experiments, run in lockstep: how much of decoding replays (coverage), and life in a small pool (soak).

Both are plain workloads: everything arrives at once, prefix cache off, unlimited budget, and every row count up to
``rows`` recorded. Their figures are the engine's own counters and records; oracle figures pin them in the tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs

from engine.trace import FormatError, Shape, Submit, Workload
from properties.checks import ALL, Finding
from properties.faults import armed
from properties.lockstep import Run, run
from properties.rung_ledger import LedgerRung
from properties.rungs import MakeRung

UNLIMITED = 1 << 20  # tokens per iteration
NOBODY_LOOKS: frozenset[str] = frozenset()


@attrs.frozen
class Experiment:
    """``figures`` are the table's columns; ``violated`` is the finding that ended the run early, if one did."""

    workload: Workload
    outcome: Run
    figures: dict[str, int | float | str]

    @property
    def violated(self) -> Finding | None:
        return self.outcome.first


def coverage_workload(
    rows: int,
    requests: int,
    lengths: Sequence[int],
    *,
    prompt: int = 4,
    budget: int = UNLIMITED,
    persistent_batch: bool = True,
) -> Workload:
    """``lengths`` are the max_tokens, cycled over the requests; the pool is large enough never to preempt."""
    wanted = [lengths[number % len(lengths)] for number in range(requests)]
    block_size = 4
    each = -(-(prompt + max(wanted)) // block_size)
    shape = Shape(
        blocks=each * requests,
        block_size=block_size,
        rows=rows,
        budget=budget,
        max_model_len=prompt + max(wanted),
        capture_rows=tuple(range(1, rows + 1)),
        capture_widths=(each,),
        persistent_batch=persistent_batch,
        max_waiting=requests,
    )
    return Workload(
        shape, _submits([prompt] * requests, wanted), title=f"coverage of {requests} requests in {rows} rows"
    )


def soak_workload(
    prompts: Sequence[int],
    max_tokens: int,
    rows: int,
    blocks: int,
    block_size: int,
    *,
    watermark: int = 0,
    budget: int = UNLIMITED,
    persistent_batch: bool = True,
) -> Workload:
    longest = max(prompts) + max_tokens
    need = -(-(longest - 1) // block_size)
    if need > blocks:  # the door would refuse it, and the table would count a run that never was
        raise FormatError(
            f"a prompt of {max(prompts)} and max_tokens {max_tokens} need {need} blocks, but blocks is {blocks}"
        )
    shape = Shape(
        blocks=blocks,
        block_size=block_size,
        rows=rows,
        budget=budget,
        watermark=watermark,
        max_model_len=longest,
        capture_rows=tuple(range(1, rows + 1)),
        capture_widths=(-(-longest // block_size),),
        persistent_batch=persistent_batch,
        max_waiting=len(prompts),
    )
    return Workload(shape, _submits(prompts, [max_tokens] * len(prompts)), title=f"soak of {len(prompts)} requests")


def _submits(prompts: Sequence[int], wanted: Sequence[int]) -> tuple[Submit, ...]:
    return tuple(
        Submit(0, ((f"p{number}", prompt),), max_tokens)
        for number, (prompt, max_tokens) in enumerate(zip(prompts, wanted, strict=True))
    )


def coverage(workload: Workload, *, make_rung: MakeRung = LedgerRung) -> Experiment:
    outcome = run(workload, make_rung=make_rung)
    counters = outcome.counters
    figures: dict[str, int | float | str] = {}
    if counters is not None and outcome.first is None:
        figures = {
            "decode_steps": counters.decode_steps,
            "replayed": counters.replayed,
            "scattered": counters.eager["scattered"],
            "moves": counters.row_moves,
        }
    return Experiment(workload, outcome, figures)


def soak(
    workload: Workload, *, fault: str | None = None, looking: bool = True, make_rung: MakeRung = LedgerRung
) -> Experiment:
    """``looking=False`` switches off audit and diff, to show what a fault does when nobody looks."""
    with armed(fault):
        outcome = run(workload, checks=ALL if looking else NOBODY_LOOKS, make_rung=make_rung)
    return Experiment(workload, outcome, {} if outcome.first is not None else _soak_figures(outcome))


def _soak_figures(outcome: Run) -> dict[str, int | float | str]:
    counters, left = outcome.counters, outcome.left
    assert counters is not None
    assert left is not None
    callers = [outcome.callers[request] for request in sorted(outcome.callers)]
    preemptions = [end.facts.preemptions for caller in callers for end in caller.ends if end.facts is not None]
    return {
        "finished": counters.finished["length"] + counters.finished["stop"],
        "forward_iterations": counters.forward_iterations,
        "steps_with_final_reap": counters.iterations,
        "evictions": counters.preemptions,
        "max_preemptions": max(preemptions, default=0),
        "preempted_twice": sum(times >= 2 for times in preemptions),
        "oldest_preemptions": preemptions[0] if preemptions else 0,
        "forward_tokens": counters.forward_tokens,
        "recomputed_tokens": counters.recomputed_tokens,
        "recompute_share": round(counters.recomputed_tokens / max(1, counters.forward_tokens), 3),
        "free_blocks_at_end": len(left.blank),
        "text": hashlib.sha256(repr([caller.delivered for caller in callers]).encode()).hexdigest()[:16],
    }
