"""How fast this machine generates, without HTTP: one stream, then a full batch, of the same engine.

Prompts are random token ids, different in every run, so that neither the prefix cache nor the text helps; generation
ignores end-of-sequence, so that every request makes the same number of tokens. Each case runs ``--repeats`` times after
one warm-up, and the run with the median wall time is shown. Wall time covers prefill.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable
from typing import Annotated

import attrs
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from engine import LLM, Engine, SamplingParams

app = App(name="bench_offline", help=__doc__)


@attrs.frozen
class Case:
    """``ttft``: seconds to the first token of the request served first; rates are output tokens per second."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft: float
    wall: float
    decode_rate: float  # tokens after each request's first, over the time from the last first token to the end

    @property
    def rate(self) -> float:
        return self.requests * self.output_tokens / self.wall


def run_once(
    engine: Engine, prompts: list[list[int]], output_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> Case:
    """Serves ``prompts`` at once, greedily; ``clock`` gives seconds. Raises ``RuntimeError`` when a step fails."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    started: dict[int, float] = {}
    late = 0  # tokens sampled after every request had its first
    begin = clock()
    for prompt in prompts:
        engine.submit(prompt, params)
    while engine.has_work:
        everyone_started = len(started) == len(prompts)
        record = engine.step()
        if record.error is not None:
            raise RuntimeError(record.error)
        now = clock()
        for request, _ in record.sampled:
            started.setdefault(request, now)
        if record.sampled:
            end = now
            late += len(record.sampled) if everyone_started else 0
    first, last = min(started.values()), max(started.values())
    decode_rate = late / (end - last) if late else 0.0
    return Case(len(prompts), len(prompts[0]), output_tokens, first - begin, end - begin, decode_rate)


def measure(engine: Engine, requests: int, prompt_tokens: int, output_tokens: int, repeats: int) -> Case:
    """The median run of ``repeats``, by wall time."""
    draw = random.Random(requests)
    vocabulary = engine.limits.vocab_size

    def prompts() -> list[list[int]]:
        return [[draw.randrange(vocabulary) for _ in range(prompt_tokens)] for _ in range(requests)]

    run_once(engine, prompts(), 4)
    cases = sorted((run_once(engine, prompts(), output_tokens) for _ in range(repeats)), key=lambda case: case.wall)
    return cases[len(cases) // 2]


@app.default
def main(
    *,
    model: str | None = None,
    device: str = "auto",
    compute: str = "auto",
    threads: int | None = None,
    requests: int = 16,
    prompt_tokens: int = 64,
    output_tokens: int = 128,
    repeats: int = 3,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Measures one stream and ``requests`` at once, and prints both with their ratio."""
    llm = LLM(model, device=device, compute=compute, threads=threads, max_num_seqs=max(requests, 1))
    shape = (prompt_tokens, output_tokens, repeats)
    single, batch = measure(llm.engine, 1, *shape), measure(llm.engine, requests, *shape)
    ratio = batch.rate / single.rate
    if as_json:
        print(json.dumps({"cases": [attrs.asdict(c) | {"rate": c.rate} for c in (single, batch)], "ratio": ratio}))
        return
    table = Table(title=f"{llm.engine.model.name}, {platform.machine()}, {os.cpu_count()} cores")
    for heading in ("requests", "prompt", "output", "TTFT ms", "decode tok/s", "all tok/s"):
        table.add_column(heading, justify="right")
    for case in (single, batch):
        numbers = (case.ttft * 1000, case.decode_rate, case.rate)
        table.add_row(str(case.requests), str(prompt_tokens), str(output_tokens), *(f"{n:.1f}" for n in numbers))
    console = Console()
    console.print(table)
    console.print(f"{requests} requests at once make {ratio:.1f} times the tokens per second of one")


if __name__ == "__main__":
    app()
