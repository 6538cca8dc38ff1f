"""The arms from start to end: a server each, the crowd, the clients alone, and the open loop at each rate.

All servers live at once, and only one of them is asked at a time: an idle engine waits for requests without computing.
The open loop is cut into halves that the arms take in turns, forwards and then backwards, so that a machine that gets
slower in the meantime gets slower for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import attrs

from server.bench import load
from server.bench.client import Answer, Target
from server.bench.own import Running
from server.bench.requests import Ask as PacedAsk
from server.bench.summary import summarise
from server.graphbench.clients import Ask, Said, alone, clients, compute_path, crowd, health, idle_readings
from server.graphbench.readings import Happened, between, total
from server.graphbench.verdict import ArmRun, Paced

Progress = Callable[[str], None]
Open = Callable[["Arm"], AbstractContextManager[Running]]

# The arms that have a name. Every arm gets the same model, seed and common options.
ARMS: Mapping[str, tuple[str, ...]] = {
    "graphs": (),
    "eager": ("--enforce-eager",),
    "free-rows": ("--no-persistent-batch",),
    "no-cache": ("--no-enable-prefix-caching",),
    "compiled": (
        "--compute",
        "auto",
    ),  # the kernels compiled for this machine, where --server=--compute=torch is common
    "torch": ("--compute", "torch"),
}


@attrs.frozen
class Arm:
    name: str
    options: tuple[str, ...]

    @property
    def replays(self) -> bool:
        return "--enforce-eager" not in self.options

    @property
    def computes_otherwise(self) -> bool:
        """Whether it may have kernels of its own: then no equal bytes are promised."""
        return "--compute" in self.options


def joined(common: Sequence[str], own: Sequence[str]) -> list[str]:
    """The words of a command line: where both name the same option, ``own`` has its way, since a server takes an option once.
    A value stands behind ``=`` or is the next word."""

    def name(word: str) -> str:
        return word.partition("=")[0].removeprefix("--no-").removeprefix("--")

    named = {name(word) for word in own if word.startswith("--")}
    kept: list[str] = []
    dropped = False
    for word in common:
        if word.startswith("--"):
            dropped = name(word) in named
        if not dropped:
            kept.append(word)
    return [*kept, *own]


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


def run_arms(arms: Sequence[Arm], plan: Plan, open_arm: Open, progress: Progress) -> list[ArmRun]:
    """Starts every arm's server, asks everything, ends them. Raises what starting, reading or asking raises."""
    with ExitStack() as stack:
        running = []
        for arm in arms:
            progress(f"{arm.name}: starting")
            running.append(stack.enter_context(open_arm(arm)))
        return asyncio.run(_passes(arms, plan, running, progress))


def run_arm(arm: Arm, plan: Plan, open_arm: Open, progress: Progress) -> ArmRun:
    """One arm without company: in a test, where a fault can be armed for the whole process only."""
    return run_arms([arm], plan, open_arm, progress)[0]


async def _passes(arms: Sequence[Arm], plan: Plan, running: Sequence[Running], progress: Progress) -> list[ArmRun]:
    runs = [await _crowded(arm, plan, server, progress) for arm, server in zip(arms, running, strict=True)]
    paced: list[list[Paced]] = [[] for _ in arms]
    for rate in plan.rates:
        halves: list[list[tuple[list[Answer], Happened]]] = [[] for _ in arms]
        order = list(range(len(arms)))
        for half, turn in enumerate((order, order[::-1])):
            for n in turn:
                progress(f"{arms[n].name}: {rate:g} requests per second for {plan.seconds / 2:g} s, {half + 1} of 2")
                halves[n].append(await _half(running[n].url, runs[n].promises, rate, half, plan))
        for n, pair in enumerate(halves):
            paced[n].append(_joined(rate, pair))
    return [
        attrs.evolve(run, paced=tuple(passes), memory_mib=server.memory_mib())
        for run, passes, server in zip(runs, paced, running, strict=True)
    ]


async def _crowded(arm: Arm, plan: Plan, running: Running, progress: Progress) -> ArmRun:
    url = running.url
    promises: dict[str, Any] = (await health(url))["promises"]
    asks = _asks(plan, promises)
    before = await idle_readings(url)
    progress(f"{arm.name}: a crowd of {len(asks)}")
    said = await crowd(url, asks)
    happened = between(before, await idle_readings(url))
    lonely: tuple[Said, ...] = ()
    if plan.alone:
        progress(f"{arm.name}: {len(asks)} clients alone")
        lonely = tuple(await alone(url, asks))
    return ArmRun(
        name=arm.name,
        replays=arm.replays,
        rows=int(promises["max_num_seqs"]),
        boot_s=running.start_seconds,
        memory_mib=None,
        promises=promises,
        compute=await compute_path(url),
        computes_otherwise=arm.computes_otherwise,
        crowd=said,
        crowd_happened=happened,
        alone=lonely,
    )


def _asks(plan: Plan, promises: Mapping[str, Any]) -> list[Ask]:
    return clients(plan.clients, plan.seed, int(promises["vocab_size"]), plan.prompt, plan.tokens)


async def _half(
    url: str, promises: Mapping[str, Any], rate: float, half: int, plan: Plan
) -> tuple[list[Answer], Happened]:
    """Half of what the rate brings in the time, from the same list over and over, always in the same order."""
    asks = _asks(plan, promises)
    count = max(2, round(rate * plan.seconds))
    first, last = half * (count // 2), count if half else count // 2
    before = await idle_readings(url)
    wanted = [asks[number % len(asks)] for number in range(first, last)]
    bodies = [PacedAsk(ask.prompt, ask.sampling["max_new_tokens"]) for ask in wanted]
    target = Target(url, str(promises["served_model_name"][0]))
    answers = await load.arriving(target, bodies, rate, plan.seed + half)
    return answers, between(before, await idle_readings(url))


def _joined(rate: float, halves: Sequence[tuple[list[Answer], Happened]]) -> Paced:
    answers = [answer for half, _ in halves for answer in half]
    wall = sum(summarise("", half).wall for half, _ in halves)  # without the time in which the others had their turn
    return Paced(
        rate,
        attrs.evolve(summarise(f"{rate:g}/s", answers), wall=wall),
        tuple(tuple(answer.gaps) if answer.error is None else () for answer in answers),
        total([happened for _, happened in halves]),
    )
