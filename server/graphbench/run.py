"""One arm from start to end: its server, the crowd, the clients alone, and the open loop at each rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs

from server.bench import load
from server.bench.client import Target
from server.bench.own import Running
from server.bench.requests import Ask as PacedAsk
from server.bench.summary import summarise
from server.graphbench.clients import Ask, Said, alone, clients, crowd, health, idle_readings
from server.graphbench.readings import between
from server.graphbench.verdict import ArmRun, Paced

Progress = Callable[[str], None]

# The arms that have a name. Every arm gets the same model, seed and common options.
ARMS: Mapping[str, tuple[str, ...]] = {
    "graphs": (),
    "eager": ("--enforce-eager",),
    "free-rows": ("--no-persistent-batch",),
    "no-cache": ("--no-enable-prefix-caching",),
}


@attrs.frozen
class Arm:
    name: str
    options: tuple[str, ...]

    @property
    def replays(self) -> bool:
        return "--enforce-eager" not in self.options


@attrs.frozen
class Plan:
    """``clients`` requests in the crowd; ``rates`` in requests per second, ``seconds`` each; ``alone``: also one by one."""

    clients: int = 24
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    seconds: float = 30.0
    seed: int = 0
    alone: bool = False
    prompt: tuple[int, int] = (8, 48)
    tokens: tuple[int, int] = (8, 32)


def run_arm(
    arm: Arm, plan: Plan, open_arm: Callable[[Arm], AbstractContextManager[Running]], progress: Progress
) -> ArmRun:
    """Starts the arm's server, asks everything, ends it. Raises what starting, reading or asking raises."""
    progress(f"{arm.name}: starting")
    with open_arm(arm) as running:
        return asyncio.run(_passes(arm, plan, running, progress))


async def _passes(arm: Arm, plan: Plan, running: Running, progress: Progress) -> ArmRun:
    url = running.url
    promises: dict[str, Any] = (await health(url))["promises"]
    asks = clients(plan.clients, plan.seed, int(promises["vocab_size"]), plan.prompt, plan.tokens)

    before = await idle_readings(url)
    progress(f"{arm.name}: a crowd of {len(asks)}")
    said = await crowd(url, asks)
    after = await idle_readings(url)
    happened = between(before, after)

    lonely: tuple[Said, ...] = ()
    if plan.alone:
        progress(f"{arm.name}: {len(asks)} clients alone")
        lonely = tuple(await alone(url, asks))
    paced = []
    for rate in plan.rates:
        progress(f"{arm.name}: {rate:g} requests per second for {plan.seconds:g} s")
        paced.append(await _paced(url, str(promises["served_model_name"][0]), asks, rate, plan))
    return ArmRun(
        name=arm.name,
        replays=arm.replays,
        rows=int(promises["max_num_seqs"]),
        boot_s=running.start_seconds,
        memory_mib=running.memory_mib(),
        promises=promises,
        crowd=said,
        crowd_happened=happened,
        alone=lonely,
        paced=paced,
    )


async def _paced(url: str, model: str, asks: Sequence[Ask], rate: float, plan: Plan) -> Paced:
    """As many requests as the rate brings in the time, from the same list over and over, always in the same order."""
    count = max(1, round(rate * plan.seconds))
    wanted = [asks[number % len(asks)] for number in range(count)]
    before = await idle_readings(url)
    bodies = [PacedAsk(ask.prompt, ask.sampling["max_new_tokens"]) for ask in wanted]
    answers = await load.arriving(Target(url, model), bodies, rate, plan.seed)
    after = await idle_readings(url)
    samples = sum(len(answer.gaps) for answer in answers if answer.error is None)
    return Paced(rate, summarise(f"{rate:g}/s", answers), samples, between(before, after))
