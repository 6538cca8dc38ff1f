"""The host's share of a served decode step, and what of the host's work runs while the device computes: CPU time, against rows.

    engine      Engine.step without native calls (ci/hosttime.py has its parts)
    hand over   what the engine's thread does for clients and metrics between two steps
    meanwhile   the event loop: tokens told, turned into text, latencies counted. Native calls run without the interpreter
                lock, so this happens while the next step computes
    native      kernels, the tape and the drawing of tokens
    share       of a step: (engine + hand over) / (that + native); and what it would be with ``meanwhile`` between the steps too

    python -m ci.hostshare [--rows 1,4,16] [--steps 60] [--threads 1] [--model PATH] [--json]

The bridge is played by hand on one thread, so that each part can be told from the others. CPU time of that thread: with more
threads ``native`` is its own part of the kernels only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence

import attrs

from ci.hosttime import PARTS, PROMPT, Stopwatch, attach
from engine.build import build
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import SamplingParams
from engine.text.stream import TextStream
from server.bridge import Bridge
from server.live import Choice, Generation
from server.live_view import LiveView
from server.metrics import Metrics

SERVED = (*PARTS, "hand over", "meanwhile")
ROUNDS = 6  # of the event loop: a token goes from the bridge to the generation and from there to its reader


@attrs.frozen
class HostShare:
    """Medians of one decode step of ``rows`` rows, milliseconds of CPU time."""

    rows: int
    parts: dict[str, float]

    @property
    def engine(self) -> float:
        return sum(self.parts[part] for part in PARTS if part != "native")

    @property
    def share(self) -> float:
        between = self.engine + self.parts["hand over"]
        return between / (between + self.parts["native"])

    @property
    def share_without_overlap(self) -> float:
        between = self.engine + self.parts["hand over"] + self.parts["meanwhile"]
        return between / (between + self.parts["native"])


async def _read(generation: Generation) -> None:
    async for _ in generation.news():
        pass


async def _submit(bridge: Bridge, rows: int, steps: int) -> list[asyncio.Task[None]]:
    """``rows`` requests, each with a client that reads its text."""
    engine = bridge.engine
    submitted = []
    for seed in range(rows):
        prompt = tuple(1 + (seed * 7919 + i * 104729) % (engine.limits.vocab_size - 1) for i in range(PROMPT + seed))
        params = SamplingParams(max_tokens=steps + 4, temperature=0.0, ignore_eos=True, seed=seed)
        text = TextStream(engine.model.tokenizer, prompt)
        submitted.append(asyncio.create_task(bridge.submit([prompt], params, [Choice(0, 0, text, False)])))
    await asyncio.sleep(0)
    bridge.apply()
    return [asyncio.create_task(_read(generation)) for generation in await asyncio.gather(*submitted)]


async def measure(engine: Engine, watch: Stopwatch, rows: int, *, steps: int = 60) -> HostShare:
    """``rows`` requests decode together for ``steps`` steps. Raises ``RuntimeError`` when too few steps did only that."""
    metrics = Metrics()
    bridge = Bridge(lambda: engine, sinks=[metrics, LiveView()])
    bridge.bind(asyncio.get_running_loop())
    bridge.adopt()
    watch.spent = dict.fromkeys(SERVED, 0.0)
    watch.wrap(bridge, "_publish", "hand over")
    readers = await _submit(bridge, rows, steps)
    seen: dict[str, list[float]] = {part: [] for part in SERVED}
    while engine.has_work:
        watch.spent = dict.fromkeys(SERVED, 0.0)
        decoded, ended = engine.counters.decode_rows[rows], engine.counters.finished.total()
        with watch.part("rest"):
            bridge.turn()
        with watch.part("meanwhile"):
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
        if engine.counters.decode_rows[rows] == decoded + 1 and engine.counters.finished.total() == ended:
            for part, value in watch.spent.items():
                seen[part].append(value * 1e3)
    await asyncio.gather(*readers)
    if len(seen["rest"]) < steps // 2:
        raise RuntimeError(f"only {len(seen['rest'])} of {steps} steps decoded {rows} rows and did nothing else")
    return HostShare(rows, {part: statistics.median(values) for part, values in seen.items()})


def table(found: Sequence[HostShare]) -> str:
    lines = ["| rows | engine | hand over | meanwhile | native | share, all between steps | share |", "|---" * 7 + "|"]
    for one in found:
        cells = (one.engine, one.parts["hand over"], one.parts["meanwhile"], one.parts["native"])
        shares = (one.share_without_overlap, one.share)
        lines.append(
            f"| {one.rows} | {' | '.join(f'{ms:.3f}' for ms in cells)} | {' | '.join(f'{s:.1%}' for s in shares)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's share of a served decode step, CPU ms.")
    parser.add_argument("--rows", default="1,4,16", help="counts of rows, e.g. 1,16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    config = EngineConfig(
        device="cpu", compute="native", threads=options.threads, max_num_seqs=max(rows), model=options.model
    )
    engine = build(config)
    watch = attach(engine)
    found = [asyncio.run(measure(engine, watch, count, steps=options.steps)) for count in rows]
    if options.json:
        print(json.dumps([{"rows": one.rows, "share": one.share, "parts_ms": one.parts} for one in found]))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
