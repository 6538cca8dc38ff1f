"""The offline benchmark's arithmetic, on the real engine with a runner whose time is made up and therefore known."""

from __future__ import annotations

import pytest

from ci.bench_offline import measure, run_once
from engine import Engine
from engine.control.limits import Limits
from engine.control.plan import Plan, Sampled

PREFILL, DECODE = 1.0, 0.25  # seconds that an iteration takes


class TimedRunner:
    """Samples token 1; an iteration with a prefill takes ``PREFILL`` seconds, any other with work ``DECODE``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fails = False
        self.prompts: list[tuple[int, ...]] = []

    def execute(self, plan: Plan) -> list[Sampled]:
        if self.fails:
            raise ArithmeticError("planned")
        self.now += PREFILL if plan.chunks else DECODE if plan.decodes else 0.0
        self.prompts += [seat.tokens for seat in plan.seated]
        return [Sampled(1) for _ in plan.sampling]


@pytest.fixture
def runner() -> TimedRunner:
    return TimedRunner()


@pytest.fixture
def engine(runner: TimedRunner) -> Engine:
    limits = Limits(
        num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, vocab_size=9
    )
    return Engine(limits, runner, eos_token_ids=frozenset({1}))


def test_one_stream(engine: Engine, runner: TimedRunner) -> None:
    case = run_once(engine, [[2] * 8], 5, clock=lambda: runner.now)
    assert case.ttft == PREFILL
    assert case.wall == PREFILL + 4 * DECODE, "end-of-sequence is ignored, so all five tokens are made"
    assert case.decode_rate == 1 / DECODE
    assert case.rate == 5 / case.wall


def test_a_batch_counts_decode_only_once_all_have_started(engine: Engine, runner: TimedRunner) -> None:
    # The budget of 16 holds two prompts of 7, so the others start in later iterations.
    case = run_once(engine, [[token] * 7 for token in (2, 3, 4, 5)], 9, clock=lambda: runner.now)
    assert case.ttft == PREFILL
    assert case.rate == 4 * 9 / case.wall
    assert case.decode_rate <= 4 / DECODE
    assert case.decode_rate > 3 / DECODE


def test_failed_step_is_no_result(engine: Engine, runner: TimedRunner) -> None:
    runner.fails = True
    with pytest.raises(RuntimeError, match="ArithmeticError: planned"):
        run_once(engine, [[2] * 8], 5)


def test_no_two_runs_share_a_prompt(engine: Engine, runner: TimedRunner) -> None:
    measure(engine, requests=2, prompt_tokens=12, output_tokens=2, repeats=3)
    assert len(runner.prompts) == len(set(runner.prompts)) == 2 * 4
