"""What `--check log` costs: the audit after every iteration, as a share of the iterations that it looks at.

    python -m ci.bench_audit                 the tiny rung of the harness, and the default model, one row and sixteen

On the rung the hunter's workloads run in lockstep with and without the check `audit`, in turn. On the model the server's own
Checker audits every step of a batch that decodes; the time is its own clock's, and the step's is the engine's.
"""

from __future__ import annotations

import random
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from engine import Engine, EngineConfig, SamplingParams
from properties.checks import ALL
from properties.hunt import numbered
from properties.lockstep import run
from properties.rungs import RUNGS
from properties.sampled import for_rung
from server.check import Checker

WORKLOADS = 60
ROUNDS = 5
SEED = 1
PROMPT, ANSWER = 64, 64


def on_the_rung(rung: str = "tiny") -> float:
    """CPU time with the audit over CPU time without it: the median of interleaved rounds."""
    ratios = []
    for number in range(ROUNDS + 1):
        checked = _seconds(rung, ALL)
        ratios.append(checked / _seconds(rung, ALL - {"audit"}))
        if not number:
            ratios.clear()  # whatever is made once was made now
    return statistics.median(ratios)


def _seconds(rung: str, checks: frozenset[str]) -> float:
    began = time.process_time()
    for number in range(WORKLOADS):
        run(for_rung(numbered(SEED, number), rung), make_rung=RUNGS[rung], checks=checks)
    return time.process_time() - began


def on_the_model(engine: Engine, rows: int) -> float:
    """Time of steps and their audits over time of the steps, for ``rows`` requests that are served to their ends."""
    checker, clean = Checker("log"), random.Random(SEED)
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    for _ in range(rows):
        engine.submit([clean.randrange(engine.limits.vocab_size) for _ in range(PROMPT)], params)
    steps = 0.0
    while engine.has_work:
        began = time.perf_counter()
        record = engine.step()
        steps += time.perf_counter() - began
        checker.after(engine, record.iteration)
    if checker.violations or not checker.checks:
        raise RuntimeError(f"{checker.violations} violations in {checker.checks} audits")
    return (steps + checker.seconds) / steps


def main() -> int:
    table = Table(title="Cost of --check log, audits in every iteration")
    table.add_column("where")
    table.add_column("with / without", justify="right")
    table.add_row("tiny rung, in lockstep", f"{on_the_rung():.3f}")
    engine = Engine.from_config(EngineConfig())
    on_the_model(engine, 1)
    for rows in (1, 16):
        measured = statistics.median(on_the_model(engine, rows) for _ in range(3))
        table.add_row(f"default model, {rows} row{'s' if rows > 1 else ''}", f"{measured:.4f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
