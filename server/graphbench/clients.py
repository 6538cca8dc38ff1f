"""The client list of a comparison: the same requests for every arm, and what of an answer must be equal.

Prompts are token ids drawn by a seed, of different lengths, some with a common beginning, so that rows end at different
times and the batch is never still: it is when neighbours come and go that rows move. Half of the requests are sampled,
with seeds of their own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import attrs
import httpx2

_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)


@attrs.frozen
class Ask:
    """One body for ``/generate``."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]

    def body(self) -> dict[str, Any]:
        return {"input_ids": list(self.prompt), "sampling_params": self.sampling, "return_logits_digest": True}


@attrs.frozen
class Said:
    """What may not depend on anybody else: token ids, the digest of the logits behind each, text and reason."""

    tokens: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    text: str = ""
    reason: str = ""
    error: str | None = None  # then nothing else is known


def clients(
    count: int, seed: int, vocab: int, prompt: tuple[int, int] = (8, 48), tokens: tuple[int, int] = (8, 32)
) -> list[Ask]:
    """``count`` requests; ``prompt`` and ``tokens`` are shortest and longest. Token ids stay clear of the first 300,
    where vocabularies keep what steers a conversation."""
    draw = random.Random(seed)
    low = min(300, vocab // 2)
    common = [draw.randrange(low, vocab) for _ in range(prompt[1])]
    asks = []
    for number in range(count):
        ids = [draw.randrange(low, vocab) for _ in range(draw.randint(*prompt))]
        if number % 3 == 0:
            ids[: len(ids) // 2] = common[: len(ids) // 2]
        sampling: dict[str, Any] = {"max_new_tokens": draw.randint(*tokens), "ignore_eos": True, "temperature": 0}
        if number % 2:
            sampling |= {"temperature": 0.8, "top_p": 0.95, "sampling_seed": draw.randrange(2**31)}
        asks.append(Ask(tuple(ids), sampling))
    return asks


async def crowd(url: str, asks: Sequence[Ask], stagger: float = 0.0) -> list[Said]:
    """All at once, or one every ``stagger`` seconds; the answers in the order of ``asks``."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)

    async def one(client: httpx2.AsyncClient, number: int, ask: Ask) -> Said:
        await asyncio.sleep(stagger * number)
        return await say(client, url, ask)

    async with httpx2.AsyncClient(timeout=_TIMEOUT, limits=limits) as client:
        return list(await asyncio.gather(*(one(client, number, ask) for number, ask in enumerate(asks))))


async def alone(url: str, asks: Sequence[Ask]) -> list[Said]:
    """One after the other: nobody has a neighbour."""
    async with httpx2.AsyncClient(timeout=_TIMEOUT) as client:
        return [await say(client, url, ask) for ask in asks]


async def say(client: httpx2.AsyncClient, url: str, ask: Ask) -> Said:
    try:
        response = await client.post(f"{url}/generate", json=ask.body())
        if response.status_code != 200:
            return Said(error=f"{response.status_code} {response.text[:200]}")
        body = response.json()
        meta = body["meta_info"]
        reason = meta["finish_reason"]["type"]
        return Said(tuple(body["output_ids"]), tuple(meta["logits_digests"]), body["text"], reason)
    except (httpx2.HTTPError, KeyError, ValueError) as error:
        return Said(error=f"{type(error).__name__}: {error}")


async def health(url: str) -> dict[str, Any]:
    async with httpx2.AsyncClient(timeout=_TIMEOUT) as client:
        return dict((await client.get(f"{url}/health")).raise_for_status().json())


async def compute_path(url: str) -> str:
    """Device, type, threads and kernels, in words: what the bytes of an answer may depend on, and the same for every arm but
    those that are told to compute otherwise."""
    async with httpx2.AsyncClient(timeout=_TIMEOUT) as client:
        told = (await client.get(f"{url}/server_info")).raise_for_status().json()["capacity"]
    return ", ".join(told[part] for part in ("compute", "device") if part in told)


async def idle_readings(url: str, patience: float = 30.0) -> dict[str, Any]:
    """The readings of an idle engine. Raises ``TimeoutError`` when it does not become idle."""
    end = time.monotonic() + patience
    while True:
        readings: dict[str, Any] = (await health(url))["readings"]
        if readings["running"] == 0 and readings["waiting"] == 0:
            return readings
        if time.monotonic() > end:
            raise TimeoutError(f"the server still works {patience:g} s after its last answer: {readings}")
        await asyncio.sleep(0.05)
