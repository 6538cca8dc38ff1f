"""A process that measures decode steps and prefill of one engine, and prints one JSON line for each.

The only argument is a JSON object: "engine" holds ``EngineConfig`` fields, "decode" a list of [rows, context, steps],
"prefill" a list of lengths. The first line says what a step has to do at least. "limits" names the program that measures
the machine (limits.py): before decode steps and after each point, so at the moments that their times are of.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs

from engine import Engine
from engine.config import EngineConfig
from server.bench.offline.limits import measure_limits
from server.bench.offline.steps import decode, prefill

LONGEST_SHARED = 8192  # prompts that begin alike are computed once, so long contexts cost one prefill in all


def main() -> None:
    asked = json.loads(sys.argv[1])
    points = [tuple(point) for point in asked.get("decode", ())]
    lengths = list(asked.get("prefill", ()))
    engine = Engine.from_config(EngineConfig(**fitting(asked["engine"], points, lengths)))
    runner: Any = engine.runner
    say(
        weight_bytes=runner.weight_bytes,
        kv_bytes_per_token=runner.kv_bytes / (engine.limits.num_blocks * engine.limits.block_size),
        on_tiles=on_tiles(runner),
        config=attrs.asdict(engine.model.config),
        capacity=dict(engine.capacity()),
    )

    def measure_machine() -> None:
        if program := asked.get("limits"):
            threads = asked["engine"].get("threads", 1)
            say(limits=attrs.asdict(measure_limits(Path(program), threads, [runner.weight_bytes])))

    for length in lengths:
        say(prefill=prefill(engine, length))
    shared = [7 * at % engine.limits.vocab_size for at in range(LONGEST_SHARED)]
    measure_machine()
    for rows, context, steps in sorted(points, key=lambda point: (point[1], point[0])):
        say(decode=attrs.asdict(decode(engine, rows, context, steps, shared if rows == 1 else ())))
        measure_machine()


def on_tiles(runner: Any) -> bool:
    """Whether any weight is multiplied on matrix tiles (native kernels only)."""
    library = getattr(runner.weights, "library", None)
    return library is not None and any(library.layouts[kind] == "tiles" for kind in runner.weights.types)


def fitting(settings: dict[str, Any], points: list[tuple[int, ...]], lengths: list[int]) -> dict[str, Any]:
    """``settings`` with as many rows and blocks as the largest point needs, unless they say themselves."""
    rows = max([point[0] for point in points], default=1)
    tokens = max([rows * (context + steps + 2) for rows, context, steps in points] + lengths, default=1)
    most = {"max_num_seqs": max(rows, 1), "num_kv_blocks": 2 * tokens // 16 + rows + 8}
    return {**most, "max_num_batched_tokens": max(512, rows), **settings}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
