"""``python -m ci.bench_http_overhead``: what HTTP and server-sent events cost per token, against the engine's own loop.

    loop         submit everything, step until nothing is left: no text, no bridge, no sockets
    whole        POST /v1/completions, one JSON answer each, over real sockets
    stream       the same as server-sent events, an event per token
    stream+log   and with --check log: the audit after every iteration

The server runs in this process and its clients in another, so the process's CPU time is the server's: engine, text, JSON,
events, sockets. CPU time, because wall time on a machine that does other things measures those. Arms take turns; the median
of the rounds is shown. ``--model stub`` replaces the model by a few lines of arithmetic: what is left is the overhead itself.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import attrs
import uvicorn
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from engine import Engine, SamplingParams
from engine.config import EngineConfig
from server import logs
from server.app import create_app
from server.settings import ServerSettings
from server.sockets import bind

ARMS = ("loop", "whole", "stream", "stream+log")
PROMPT = 16  # tokens

app = App(name="bench_http_overhead", help=__doc__)

_CLIENT = """
import asyncio, json, sys

async def one(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\nContent-Type: application/json\\r\\n"
    writer.write(f"{head}Content-Length: {len(data)}\\r\\n\\r\\n".encode() + data)
    answer = await reader.read(-1)
    writer.close()
    return b" 200 " in answer[:20] and (b"[DONE]" in answer if body["stream"] else b"usage" in answer)

async def main():
    for line in sys.stdin:
        port, bodies = json.loads(line)
        good = await asyncio.gather(*(one(port, body) for body in bodies))
        print(json.dumps(all(good)), flush=True)

asyncio.run(main())
"""


@attrs.frozen
class Cost:
    """Per output token, in microseconds."""

    cpu: float
    wall: float


class Clients:
    """A process that sends what it is given and reads every answer to its end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, port: int, bodies: list[dict[str, Any]]) -> None:
        """Raises ``RuntimeError`` unless every answer is whole."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([port, bodies]), file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "true\n":
            raise RuntimeError("an answer was not whole")

    def close(self) -> None:
        self._process.communicate(timeout=30)


@contextmanager
def serving(engine: Engine, check: str) -> Iterator[int]:
    """The port of a server in this process, on threads of its own."""
    application = create_app(engine, ServerSettings(check=check, log_level="error"))
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(application, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    while application.state.context.bridge.refusal() is not None:
        time.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    """Unlike each other and those of other rounds, so that the prefix cache finds nothing."""
    return [
        [3 + (seed * 7919 + number * 101 + at * at * 13) % (vocab - 8) for at in range(PROMPT)]
        for number in range(count)
    ]


def loop(engine: Engine, asks: list[list[int]], tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for ask in asks:
        engine.submit(ask, params)
    while engine.has_work:
        engine.step()


def measure(engine: Engine, clients: Clients, arm: str, streams: int, tokens: int, seed: int) -> Cost:
    """One round of one arm."""
    asks = prompts(streams, min(engine.limits.vocab_size, 400), seed)
    if arm == "loop":
        return _timed(lambda: loop(engine, asks, tokens), streams * tokens)
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": arm != "whole"}
    with serving(engine, "log" if arm.endswith("log") else "off") as port:
        clients.send(port, [{**body, "prompt": [5], "max_tokens": 1}])  # connections and code paths are warm
        return _timed(lambda: clients.send(port, [{**body, "prompt": ask} for ask in asks]), streams * tokens)


def _timed(work: Any, tokens: int) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Cost(1e6 * (time.process_time() - cpu) / tokens, 1e6 * (time.perf_counter() - wall) / tokens)


def make_engine(model: str | None, streams: int, context: int) -> Engine:
    if model == "stub":
        from tests.server.stub import stub_engine

        sizes: dict[str, Any] = {"num_blocks": streams * (context // 16 + 1), "block_size": 16, "max_num_seqs": streams}
        return stub_engine(**sizes, max_model_len=context, max_num_batched_tokens=512, max_waiting=256)
    config = EngineConfig(
        model=model, device="cpu", threads=1, max_num_seqs=streams, max_model_len=context, max_num_batched_tokens=512
    )
    return Engine.from_config(config)


@app.default
def main(
    *,
    model: Annotated[str | None, Parameter(help="as --model of the server, or 'stub'")] = None,
    streams: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 16),
    tokens: int = 64,
    rounds: int = 3,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Prints the table, or with ``--json`` its figures."""
    logs.configure("error", "text")
    engine = make_engine(model, max(streams), PROMPT + tokens + 16)
    clients = Clients()
    found: dict[tuple[int, str], list[Cost]] = {}
    try:
        for warm in range(rounds + 1):
            for count in streams:
                for arm in ARMS:
                    cost = measure(engine, clients, arm, count, tokens, 1000 * warm + count)
                    if warm:
                        found.setdefault((count, arm), []).append(cost)
    finally:
        clients.close()
    rows = []
    for (count, arm), costs in found.items():
        base = statistics.median(cost.cpu for cost in found[count, "loop"])
        cpu, wall = (statistics.median(getattr(cost, name) for cost in costs) for name in ("cpu", "wall"))
        rows.append({"streams": count, "arm": arm, "cpu_us": cpu, "ratio": cpu / base, "wall_us": wall})
    if as_json:
        print(json.dumps({"model": engine.model.name, "tokens": tokens, "rounds": rounds, "rows": rows}))
        return
    table = Table(title=f"{engine.model.name}: CPU per output token, {tokens} tokens a stream, median of {rounds}")
    for column in ("streams", "arm", "CPU us/token", "ratio to loop", "wall us/token"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows:
        numbers = (f"{row['cpu_us']:.0f}", f"{row['ratio']:.2f}", f"{row['wall_us']:.0f}")
        table.add_row(str(row["streams"]), str(row["arm"]), *numbers)
    Console(width=100).print(table)


if __name__ == "__main__":
    app()
