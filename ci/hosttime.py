"""Where the engine's thread spends a decode step outside native calls: CPU time by part, against rows.

    schedule   Scheduler.plan                    copies   the static inputs' buffers
    indices    row operations, slots, tables     sample   the sampler without its native call
    commit     Scheduler.commit                  rest     Engine.step itself, the sampling list, clocks
    native     what is left out: kernels, the tape and the drawing of tokens

Detokenising, stop strings and HTTP are not part of it. CPU time of one thread, so neighbours on the machine disturb it less
than wall time, but caches are theirs too: take medians, and compare within one run.

    python -m ci.hosttime [--rows 1,4,16,64] [--temperature 0] [--steps 60] [--model PATH] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from engine.build import build
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import SamplingParams

PARTS = ("schedule", "indices", "copies", "sample", "commit", "rest", "native")
PROMPT = 24  # tokens of the first request, each other's is one longer: so rows enter new blocks in different steps


@attrs.frozen
class HostTime:
    """Medians of one decode step of ``rows`` rows, in milliseconds of the engine thread's CPU time."""

    rows: int
    parts: dict[str, float]

    @property
    def outside(self) -> float:
        """All but native calls."""
        return sum(value for part, value in self.parts.items() if part != "native")


class Stopwatch:
    """CPU time of this thread by part; while a part calls another, the time is the other's."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.thread_time()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """``owner.name`` is timed from now on, on this object only."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return inner(*arguments, **options)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, name, timed)


def attach(engine: Engine) -> Stopwatch:
    """A stopwatch on the parts of ``engine``, whose runner must be the native one."""
    runner: Any = engine.runner
    watch = Stopwatch()
    for owner, name, part in (
        (engine.scheduler, "plan", "schedule"),
        (engine.scheduler, "commit", "commit"),
        (runner.rows, "apply", "indices"),
        (runner, "_decode", "indices"),
        (runner.inputs, "fill", "copies"),
        (runner.inputs, "go_on", "copies"),
        (runner.sampler, "sample", "sample"),
        (runner.threads, "run", "native"),
    ):
        watch.wrap(owner, name, part)
    return watch


def measure(engine: Engine, watch: Stopwatch, rows: int, *, steps: int = 60, temperature: float = 0.0) -> HostTime:
    """``rows`` requests decode together for ``steps`` steps. Raises ``RuntimeError`` when a step was anything else."""
    for seed in range(rows):
        prompt = [1 + (seed * 7919 + i * 104729) % (engine.limits.vocab_size - 1) for i in range(PROMPT + seed)]
        params = SamplingParams(max_tokens=steps + 4, temperature=temperature, ignore_eos=True, seed=seed)
        engine.submit(prompt, params)
    seen: dict[str, list[float]] = {part: [] for part in PARTS}
    taken = 0
    while engine.has_work:
        watch.spent = dict.fromkeys(PARTS, 0.0)
        with watch.part("rest"):
            record = engine.step()
        plan = record.plan
        if len(plan.decodes) != rows or plan.chunks or plan.vacated or record.finished:
            continue
        taken += 1
        for part, value in watch.spent.items():
            seen[part].append(value * 1e3)
    if taken < steps // 2:
        raise RuntimeError(f"only {taken} of {steps} steps decoded {rows} rows and did nothing else")
    return HostTime(rows, {part: statistics.median(values) for part, values in seen.items()})


def host_time(
    rows: Sequence[int] = (1, 4, 16, 64), *, steps: int = 60, temperature: float = 0.0, model: str | None = None
) -> list[HostTime]:
    """One ``HostTime`` for each count of rows, on one engine (one thread, the default model unless ``model`` names another)."""
    settings: dict[str, Any] = {} if model is None else {"model": model}
    config = EngineConfig(device="cpu", compute="native", threads=1, max_num_seqs=max(rows), **settings)
    engine = build(config)
    watch = attach(engine)
    return [measure(engine, watch, count, steps=steps, temperature=temperature) for count in rows]


def table(found: Sequence[HostTime]) -> str:
    head = "| rows | " + " | ".join((*PARTS[:-1], "outside native calls", "native")) + " |"
    lines = [head, "|---" * (len(PARTS) + 2) + "|"]
    for one in found:
        cells = [*(one.parts[part] for part in PARTS[:-1]), one.outside, one.parts["native"]]
        lines.append(f"| {one.rows} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU ms of the engine's thread for one decode step, by part.")
    parser.add_argument("--rows", default="1,4,16,64", help="counts of rows, e.g. 1,16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    found = host_time(rows, steps=options.steps, temperature=options.temperature, model=options.model)
    if options.json:
        print(json.dumps([{"rows": one.rows, "outside_ms": one.outside, "parts_ms": one.parts} for one in found]))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
