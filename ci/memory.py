"""Where the engine's resident memory goes: what a process holds at each stage of its life, the KV pool apart.

    python ci/memory.py [--model FILE] [--json]

One process, from the bare interpreter to a served crowd. ``resident`` and ``anonymous`` are /proc/self/smaps_rollup's in MiB,
less the pages of the pool that were touched, which a column of their own counts: how large the pool is, is a setting. What is
resident and not anonymous is mapped from files, packed weights and libraries, and shared by all processes that map them.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
Span = tuple[int, int]  # first address, and the one behind the last


class Ledger:
    """Rows of the table; ``pool``: where the pool lies, once there is one."""

    def __init__(self, told: Callable[[dict[str, Any]], None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.pool: list[Span] = []
        self._told = told

    def note(self, stage: str) -> None:
        kinds = rollup()
        pool = touched(self.pool)
        row = {"stage": stage, "resident": kinds["Rss"] - pool, "anonymous": kinds["Anonymous"] - pool, "pool": pool}
        self.rows.append(row)
        self._told(row)


def rollup() -> dict[str, float]:
    """Kinds of memory of this process, in MiB."""
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines())
    return {words[0][:-1]: int(words[1]) / 1024 for words in fields if words[-1] == "kB"}


def touched(spans: Iterable[Span]) -> float:
    """MiB of the pages in these spans that are in memory, by the bit that says so in each page's entry."""
    pages = 0
    with Path("/proc/self/pagemap").open("rb") as entries:
        for first, end in spans:
            begin = first // mmap.PAGESIZE
            entries.seek(8 * begin)
            told = entries.read(8 * (-(-end // mmap.PAGESIZE) - begin))
            pages += sum(flags >= 128 for flags in told[7::8])
    return pages * mmap.PAGESIZE / MIB


def follow(ledger: Ledger, model: str | None) -> None:
    ledger.note("Python")
    import numpy as np  # noqa: F401

    ledger.note("numpy")
    import torch  # noqa: F401

    ledger.note("torch")
    from engine import LLM, EngineConfig, SamplingParams
    from engine.build import assemble
    from engine.loading import load_model
    from engine.loading.heap import give_back

    ledger.note("engine, imported")
    loaded = load_model(model)
    ledger.note("tokenizer and configuration")
    engine = assemble(EngineConfig(model=model), loaded)
    runner: Any = engine.runner
    ledger.pool = [(layer.data_ptr(), layer.data_ptr() + layer.nbytes) for layer in runner.network.pool.layers]
    ledger.note("weights, scratch, recorded steps")
    give_back()
    ledger.note("given back: ready")
    llm, vocab = LLM(engine=engine), loaded.config.vocab_size
    long = min(6000, engine.limits.max_model_len - 32)

    def ask(stage: str, prompts: Sequence[int], **params: Any) -> None:
        """``prompts``: how long each is."""
        tokens = [[(7 * i + row) % vocab for i in range(count)] for row, count in enumerate(prompts)]
        llm.generate(tokens, SamplingParams(ignore_eos=True, **params), progress=False)
        ledger.note(stage)

    ask("answered one of 5 tokens", [5], max_tokens=4, temperature=0)
    ask("a prompt of 1024", [min(1024, long)], max_tokens=2, temperature=0)
    ask("16 at once", [20] * 16, max_tokens=32, temperature=0)
    ask(f"a prompt of {long}", [long], max_tokens=16, temperature=0)
    ask("16 with penalties, logprobs", [20] * 16, max_tokens=8, top_p=0.9, repetition_penalty=1.1, logprobs=5)


def lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield f"{'MiB':<34}{'resident':>10}{'anonymous':>11}{'pool':>8}"
    for row in rows:
        yield f"{row['stage']:<34}{row['resident']:>10.1f}{row['anonymous']:>11.1f}{row['pool']:>8.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="resident memory by stage")
    parser.add_argument("--model", help="as for the server; the default model unless given")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    ledger = Ledger(lambda row: None if given.json else print(list(lines([row]))[1], flush=True))
    if not given.json:
        print(next(lines([])))
    follow(ledger, given.model)
    if given.json:
        json.dump(ledger.rows, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
