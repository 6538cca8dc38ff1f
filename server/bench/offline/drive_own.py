"""The worker around this engine: ``Engine.step`` without HTTP and without text, as the other workers drive theirs.

The only argument is a JSON object of ``EngineConfig`` fields.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from engine import Engine, SamplingParams
from engine.config import EngineConfig
from server.bench.offline.drive import Reading, Request, clock, serve


def run(engine: Engine, requests: Sequence[Request], hits: bool = True) -> Reading:
    """Serves ``requests`` at once, greedily. Raises ``RuntimeError`` when a step fails."""
    begin = clock()
    tokens: dict[int, list[int]] = {}
    for request in requests:
        params = SamplingParams(max_tokens=request.gen, temperature=0.0, ignore_eos=True)
        tokens[engine.submit(request.prompt, params, takes_hits=hits).requests[0]] = []
    leader = next(iter(tokens))
    first = last = wall = 0.0
    while engine.has_work:
        record = engine.step()
        if record.error is not None:
            raise RuntimeError(record.error)
        for request_id, sampled in record.sampled:
            tokens[request_id].append(sampled.token)
            if request_id == leader:
                last = clock() - begin
                first = first or last
        if record.sampled:
            wall = clock() - begin
    return Reading(wall, first, last, list(tokens.values()))


def score(engine: Engine, ids: list[int]) -> tuple[list[float], list[int]]:
    """The log-probability of each id after the first, and the most likely id in its place."""
    engine.submit(ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1))
    told: list[tuple[float, int]] = []
    while engine.has_work:
        record = engine.step()
        if record.error is not None:
            raise RuntimeError(record.error)
        for _, sampled in record.sampled:
            told += [(one.chosen, one.top[0][0]) for one in sampled.prompt or ()]
    return [chosen for chosen, _ in told], [best for _, best in told]


def main() -> None:
    engine = Engine.from_config(EngineConfig(**json.loads(sys.argv[1])))
    serve(
        {"engine": "lockstep", "capacity": dict(engine.capacity())},
        lambda requests, hits: run(engine, requests, hits),
        lambda ids: score(engine, ids),
    )


if __name__ == "__main__":
    main()
