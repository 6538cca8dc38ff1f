"""One engine, step by step: how long a decode step of so many rows at such a context takes, and of what.

A step's time is ``Engine.step``'s, split as ``Engine.seconds`` tells it: executing the plan, and the rest on the host.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import attrs

from engine import Engine, SamplingParams
from engine.loading.model import ModelConfig


@attrs.frozen
class StepTime:
    """Seconds of one decode step, medians. ``host``: planning and committing, on the engine's thread."""

    rows: int
    context: int
    wall: float
    execute: float
    host: float


@attrs.frozen
class Work:
    """What one decode step must at least do: bytes read once whatever the rows, bytes and operations of each row."""

    weight_bytes: int
    kv_bytes: int  # of one row
    flops: int  # of one row

    def memory_seconds(self, rows: int, gb_s: float) -> float:
        return (self.weight_bytes + rows * self.kv_bytes) / (gb_s * 1e9)

    def arithmetic_seconds(self, rows: int, gflop_s: float) -> float:
        return rows * self.flops / (gflop_s * 1e9)


def work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: float, context: int) -> Work:
    """Products and attention of one row at ``context``; norms, rotations and the like are left out."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = config.hidden_size * (q + 2 * kv) + q * config.hidden_size
    layer = linear + 3 * config.hidden_size * config.intermediate_size + 2 * context * q
    products = config.num_layers * layer + config.vocab_size * config.hidden_size
    return Work(weight_bytes, int(kv_bytes_per_token * context), 2 * products)


def decode(engine: Engine, rows: int, context: int, steps: int, shared: Sequence[int] = ()) -> StepTime:
    """Medians of ``steps`` decode steps of ``rows`` requests whose context is about ``context`` tokens in the middle.

    Prompts are random ids after ``shared``, which all begin with. Raises ``RuntimeError`` when a step fails.
    """
    length = max(1, context - steps // 2)
    draw = random.Random(rows * 100_003 + context)
    params = SamplingParams(max_tokens=steps + 2, temperature=0.0, ignore_eos=True)
    for _ in range(rows):
        own = length - len(shared[:length])
        prompt = [*shared[:length], *(draw.randrange(engine.limits.vocab_size) for _ in range(own))]
        engine.submit(prompt, params)
    times: list[tuple[float, float, float]] = []
    while engine.has_work:
        execute, host = -engine.seconds.execute, -engine.seconds.schedule
        began = time.perf_counter()
        record = engine.step()
        wall = time.perf_counter() - began
        if record.error is not None:
            raise RuntimeError(record.error)
        if len(record.plan.decodes) == rows and not record.plan.chunks:
            times.append((wall, execute + engine.seconds.execute, host + engine.seconds.schedule))
    if not times:
        raise RuntimeError(
            f"{rows} requests of {length} tokens never decoded together; the pool or the rows are too few"
        )
    return StepTime(rows, context, *(statistics.median(column) for column in zip(*times, strict=True)))


def prefill(engine: Engine, length: int) -> list[tuple[int, float]]:
    """(tokens so far, seconds so far) after each chunk of one prompt of ``length`` random ids."""
    draw = random.Random(length)
    prompt = [draw.randrange(engine.limits.vocab_size) for _ in range(length)]
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), takes_hits=False)
    told: list[tuple[int, float]] = []
    began = time.perf_counter()
    while engine.has_work:
        record = engine.step()
        if record.error is not None:
            raise RuntimeError(record.error)
        if record.plan.chunks:
            done = told[-1][0] if told else 0
            told.append((done + sum(len(chunk.tokens) for chunk in record.plan.chunks), time.perf_counter() - began))
    return told
