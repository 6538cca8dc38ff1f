"""Two ways to load a server: a fixed number of clients that each wait for their answer, or arrivals that wait for nobody.

closed   N clients; each sends its next request when it has its answer. Says what N users get.
open     Poisson arrivals at a rate, by a seed. Says what a rate of traffic gets, queueing included: latency counts
         from the moment a request was due, not from the moment it could be sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import httpx2

from server.bench.client import Answer, Target, ask_once
from server.bench.requests import Ask

Progress = Callable[[int, int], None]  # answered, of how many

_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)


def _client() -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(timeout=_TIMEOUT, limits=limits)


async def closed(target: Target, asks: Sequence[Ask], clients: int, progress: Progress | None = None) -> list[Answer]:
    """Answers in the order of ``asks``."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(asks))

    async def one_client(client: httpx2.AsyncClient) -> None:
        for number, ask in waiting:
            answers[number] = await ask_once(client, target, ask)
            if progress is not None:
                progress(len(answers), len(asks))

    async with _client() as client:
        await asyncio.gather(*(one_client(client) for _ in range(min(clients, len(asks)))))
    return [answers[number] for number in range(len(asks))]


async def arriving(
    target: Target, asks: Sequence[Ask], rate: float, seed: int, progress: Progress | None = None
) -> list[Answer]:
    """``rate`` in requests per second. Answers in the order of ``asks``."""
    draw = random.Random(seed)
    done = 0

    async def one(client: httpx2.AsyncClient, ask: Ask, due: float) -> Answer:
        nonlocal done
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        answer = await ask_once(client, target, ask, due)
        done += 1
        if progress is not None:
            progress(done, len(asks))
        return answer

    due = time.perf_counter()
    tasks = []
    async with _client() as client, asyncio.TaskGroup() as group:
        for ask in asks:
            tasks.append(group.create_task(one(client, ask, due)))
            due += draw.expovariate(rate)
    return [task.result() for task in tasks]
