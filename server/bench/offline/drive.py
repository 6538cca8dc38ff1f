"""The worker's side of a measurement: requests come as JSON lines on standard input, answers leave on standard output.

    <- {"requests": [{"prompt": [ids], "gen": n}, ...], "hits": true}
    -> {"wall": s, "first": s, "last": s, "tokens": [[ids], ...]}          or {"error": "..."}
    <- {"score": [ids]}                                                    where the worker can
    -> {"logprobs": [of ids[1], of ids[2], ...], "best": [most likely id there, ...]}

The first line that a worker writes is {"ready": {...}}: what it is. Only the standard library, since a worker runs in the
environment of the engine that it drives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

clock = time.perf_counter


class Request(NamedTuple):
    prompt: list[int]
    gen: int


class Reading(NamedTuple):
    """Seconds since the requests were handed over. ``first``: when the first request's first token was there;
    ``last``: when its last one was. ``tokens``: what each request generated, exactly as many as it asked for."""

    wall: float
    first: float
    last: float
    tokens: list[list[int]]


Run = Callable[[Sequence[Request], bool], Reading]  # requests; whether the prefix cache may be used
Score = Callable[[list[int]], tuple[list[float], list[int]]]


def serve(ready: dict[str, Any], run: Run, score: Score | None = None) -> None:
    """Answers until standard input ends, then ends the process at once: some engines do not join their threads."""
    out = _own_output()
    _say(out, {"ready": ready})
    for line in sys.stdin:
        try:
            _say(out, _answer(json.loads(line), run, score))
        except Exception as error:  # noqa: BLE001 - whatever an engine raised belongs in the table, not on the floor
            _say(out, {"error": f"{type(error).__name__}: {error}"[:500]})
    out.flush()
    os._exit(0)


def _answer(asked: dict[str, Any], run: Run, score: Score | None) -> dict[str, Any]:
    if "score" in asked:
        if score is None:
            raise ValueError("this engine was asked for log-probabilities, which its worker does not give")
        logprobs, best = score(asked["score"])
        return {"logprobs": logprobs, "best": best}
    requests = [Request(list(one["prompt"]), int(one["gen"])) for one in asked["requests"]]
    reading = run(requests, bool(asked.get("hits", True)))
    wanted = [request.gen for request in requests]
    if (made := [len(tokens) for tokens in reading.tokens]) != wanted:
        raise RuntimeError(f"{made} tokens were generated, but {wanted} were asked for")
    return reading._asdict()


def _own_output() -> Any:
    """The real standard output; what libraries print goes to standard error from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _say(out: Any, value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()
