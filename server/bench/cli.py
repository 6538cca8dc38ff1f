"""``python -m server bench``: asks a server the same questions several times and prints what its clients saw."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import httpx2
from cyclopts import App, CycloptsError, Parameter
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from server.bench import load
from server.bench.client import APIS, Answer, Target
from server.bench.own import StartFailed, served
from server.bench.plot import NoPlots, check_places, plot
from server.bench.requests import Ask, ListError, bundled, drawn
from server.bench.requests import load as load_lists
from server.bench.summary import Limits, Summary, summarise

app = App(
    name="python -m server bench",
    help_format="plaintext",
    result_action="return_value",
    help=(
        "Benchmarks an OpenAI-compatible server. Without --url it starts this one, with the default model, on a free "
        "port. The bundled request lists are token ids of SmolLM2's vocabulary; for another model use --random, which "
        "sends text. Every list is asked once to warm up and then --repeats times; the run with the median duration "
        "is shown. Latencies are in milliseconds. With --offline it measures the engine itself, without HTTP, beside other "
        "engines; see --offline --help."
    ),
)


class Wrong(Exception):
    """An option that cannot be used; the message says which and why."""


@attrs.frozen
class Plan:
    """What is asked, in which way."""

    lists: Mapping[str, Sequence[Ask]]
    clients: int | None
    rate: float | None
    repeats: int
    seed: int

    def check(self) -> None:
        for name, value in (("--clients", self.clients), ("--rate", self.rate), ("--repeats", self.repeats)):
            if value is not None and value <= 0:
                raise Wrong(f"{name} is {value}, but must be above 0")
        if self.clients is not None and self.rate is not None:
            raise Wrong("--clients is a closed loop and --rate an open one: give one of them")


@app.default
def bench(
    *,
    url: Annotated[str | None, Parameter(help="The server's base address; by default one is started.")] = None,
    model: Annotated[str | None, Parameter(help="The model's name there; by default the first of /v1/models.")] = None,
    api: Annotated[str, Parameter(help="completions, chat or generate (SGLang's).")] = "completions",
    key: Annotated[str | None, Parameter(help="The server's API key.", env_var="OPENAI_API_KEY")] = None,
    lists: Annotated[
        tuple[str, ...],
        Parameter(
            name="--list", negative_iterable="", help="A list by name; may be given several times. Default: all."
        ),
    ] = (),
    file: Annotated[Path | None, Parameter(help="A JSON file of request lists instead of the bundled ones.")] = None,
    random: Annotated[int | None, Parameter(help="Send this many text requests made by --seed instead.")] = None,
    prompt_words: Annotated[
        tuple[int, int], Parameter(negative_iterable="", help="Least and most words of a random prompt.")
    ] = (32, 128),
    tokens: Annotated[
        tuple[int, int], Parameter(negative_iterable="", help="Least and most tokens of a random answer.")
    ] = (32, 64),
    shared_words: Annotated[int, Parameter(help="Words that all random prompts begin with.")] = 0,
    clients: Annotated[
        int | None, Parameter(help="Closed loop with so many clients; by default one for each request of a list.")
    ] = None,
    rate: Annotated[float | None, Parameter(help="Open loop: Poisson arrivals, in requests per second.")] = None,
    repeats: Annotated[int, Parameter(help="Runs of each list, after one to warm up.")] = 3,
    seed: Annotated[int, Parameter(help="Of arrivals and random requests.")] = 0,
    good_ttft: Annotated[float | None, Parameter(help="Goodput: TTFT at most this, in ms.")] = None,
    good_itl: Annotated[float | None, Parameter(help="Goodput: no gap between tokens above this, in ms.")] = None,
    good_tpot: Annotated[float | None, Parameter(help="Goodput: time per output token at most this, in ms.")] = None,
    plot_to: Annotated[Path | None, Parameter(name="--plot", help="Draw the distributions (.png, .svg, .pdf).")] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")] = False,
    server: Annotated[
        tuple[str, ...],
        Parameter(
            negative_iterable="", help="An option for the server that is started, as in --server=--max-num-seqs=8."
        ),
    ] = (),
) -> int:
    """Exit status: 0 measured, 1 requests failed, 2 wrong options or no server."""
    if api not in APIS:
        raise Wrong(f"--api is {api!r}, but must be one of {', '.join(APIS)}")
    if random is not None and random < 1:
        raise Wrong(f"--random is {random}, but must be at least 1")
    given = {"random": drawn(random, seed, prompt_words, tokens, shared_words)} if random else _lists(file, lists)
    plan = Plan(given, clients, rate, repeats, seed)
    plan.check()
    check_places(None, plot_to)
    limits = Limits(good_ttft, good_itl, good_tpot)
    if url is not None:
        runs, facts = _measure(Target(url.rstrip("/"), model or "", api, key), plan), {}
    else:
        with served(server) as running:
            runs = _measure(Target(running.url, model or "", api, key), plan)
            facts = {"start_s": running.start_seconds, "rss_mib": running.memory_mib()}
    summaries = [summarise(name, answers, limits) for name, answers in runs.items()]
    if as_json:
        print(json.dumps({"runs": [summary.plain() for summary in summaries], **facts}))
    else:
        _show(summaries, facts)
    if plot_to is not None:
        plot(runs, plot_to)
    return 1 if any(summary.failed for summary in summaries) else 0


def _lists(file: Path | None, names: Sequence[str]) -> Mapping[str, Sequence[Ask]]:
    known = bundled() if file is None else load_lists(file)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Wrong(f"--list is {unknown[0]!r}, but must be one of {', '.join(known)}")
    return {name: asks for name, asks in known.items() if not names or name in names}


def _measure(target: Target, plan: Plan) -> dict[str, list[Answer]]:
    """The median run of each list, by duration."""
    if not target.model:
        target = attrs.evolve(target, model=_first_model(target))
    measured: dict[str, list[Answer]] = {}
    total = sum(len(asks) for asks in plan.lists.values()) * (plan.repeats + 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("asking", total=total)
        for name, asks in plan.lists.items():
            progress.update(task, description=name)
            runs = []
            for repeat in range(plan.repeats + 1):
                salted = [
                    ask.salted(17 * repeat + (61 * at if name != "shared16" else 0)) for at, ask in enumerate(asks)
                ]
                answers = asyncio.run(_once(target, salted, plan, lambda *_: progress.advance(task)))
                runs.append(answers)
            warm = runs[1:]
            warm.sort(key=lambda answers: max(a.end for a in answers) - min(a.due for a in answers))
            measured[name] = warm[len(warm) // 2]
    return measured


async def _once(target: Target, asks: Sequence[Ask], plan: Plan, progress: load.Progress) -> list[Answer]:
    if plan.rate is not None:
        return await load.arriving(target, asks, plan.rate, plan.seed, progress)
    return await load.closed(target, asks, plan.clients or len(asks), progress)


def _first_model(target: Target) -> str:
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    try:
        response = httpx2.get(f"{target.url}/v1/models", headers=headers, timeout=10.0)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Wrong(f"--url {target.url}: /v1/models does not name a model: {error}") from None


def _show(summaries: Sequence[Summary], facts: Mapping[str, Any]) -> None:
    table = Table(title="as the clients saw it: ms, tokens per second, requests per second", box=box.SIMPLE_HEAD)
    good = any(summary.goodput is not None for summary in summaries)
    headings = ("list", "asked", "TTFT p50", "p99", "ITL p50", "p99", "tok/s", "req/s", *(("good/s",) if good else ()))
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "list" else "right", no_wrap=True)
    for summary in summaries:
        ttft, itl = summary.latencies["ttft"], summary.latencies["itl"]
        numbers = [ttft["p50"], ttft["p99"], itl["p50"], itl["p99"], summary.output_rate, summary.request_rate]
        numbers += [] if summary.goodput is None else [summary.goodput]
        table.add_row(summary.name, str(summary.requests), *(_short(number) for number in numbers))
    console = Console()
    console.print(table)
    for summary in summaries:
        for error, times in summary.errors.items():
            console.print(f"{summary.name}: {times} of {summary.requests} failed: {error}", markup=False)
    if facts:
        memory = facts["rss_mib"]
        held = "" if memory is None else f", resident memory {memory:.0f} MiB"
        console.print(f"the server was ready after {facts['start_s']:.1f} s{held}")


def _short(number: float) -> str:
    """Three figures are what such a measurement is good for."""
    if not math.isfinite(number):
        return "-"
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def main(arguments: Sequence[str]) -> int:
    if "--offline" in arguments:
        from server.bench.offline.cli import main as offline

        return offline([argument for argument in arguments if argument != "--offline"])
    try:
        return int(app(list(arguments), print_error=False, exit_on_error=False) or 0)
    except (CycloptsError, Wrong, ListError, StartFailed, NoPlots, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
