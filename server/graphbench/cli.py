"""``python -m server graphbench``: two servers with one model and one seed, one of which replays recorded graphs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from server.bench.own import Running, StartFailed, served
from server.bench.plot import NoPlots, check_places
from server.graphbench import report
from server.graphbench.readings import Backwards
from server.graphbench.run import ARMS, Arm, Plan, joined, run_arms
from server.graphbench.verdict import Tolerance, judge

app = App(
    name="python -m server graphbench",
    help_format="plaintext",
    result_action="return_value",
    help=(
        "Proves recorded graphs in a crowd. Each arm is a server of its own; only one is asked at a time, so that they do "
        "not disturb each other's clock. First a crowd of clients all at once, whose answers must be equal to the byte "
        "between the arms; then the same clients in an open loop at each rate, in which the arms take turns. Everything "
        "said about a run is the difference of two readings of /health. The first arm is compared with every other."
    ),
)

MOST_CLIENTS = 1000  # each is a connection, at both ends
PAGE = 160  # columns of a table that no terminal shows


class Wrong(Exception):
    """An option that cannot be used."""


@app.default
def graphbench(
    *,
    arms: Annotated[str, Parameter(help=f"Names, with commas: {', '.join(ARMS)}.")] = "graphs,eager",
    model: Annotated[str | None, Parameter(help="As for python -m server.")] = None,
    clients: Annotated[int, Parameter(help="Requests in the crowd.")] = 24,
    rates: Annotated[
        str, Parameter(help="Requests per second of the open loop, with commas; empty for none.")
    ] = "0.5,1,2",
    seconds: Annotated[float, Parameter(help="How long requests arrive, at each rate.")] = 30.0,
    seed: Annotated[int, Parameter(help="Of clients, arrivals and servers.")] = 0,
    max_num_seqs: Annotated[int, Parameter(help="Rows of each server.")] = 16,
    persistent_batch: Annotated[bool, Parameter(help="As for python -m server; for all arms.")] = True,
    solo: Annotated[
        bool, Parameter(negative="", help="Also ask every client alone, and compare that with the crowd.")
    ] = False,
    tail: Annotated[float, Parameter(help="Largest accepted ratio of the first arm's ITL p99 to another's.")] = 1.25,
    samples: Annotated[int, Parameter(help="Inter-token samples that each rate needs.")] = 200,
    plot: Annotated[Path | None, Parameter(help="Draw latency over rate (.png, .svg, .pdf).")] = None,
    csv: Annotated[Path | None, Parameter(help="Write a line per arm and rate.")] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of tables.")] = False,
    server: Annotated[
        tuple[str, ...], Parameter(negative_iterable="", help="An option for every server, as in --server=--threads=1.")
    ] = (),
) -> int:
    """Exit status: 0 all checks hold, 1 one does not, 2 wrong options or a server that does not start."""
    listed = [_arm(name.strip()) for name in arms.split(",") if name.strip()]
    if len(listed) < 2:
        raise Wrong(f"--arms is {arms!r}, but a comparison needs at least two")
    paced = tuple(_rate(rate) for rate in rates.split(",") if rate.strip())
    if not 2 <= clients <= MOST_CLIENTS:
        raise Wrong(f"--clients is {clients}, but a crowd has 2 to {MOST_CLIENTS}")
    for option, value, most in (("--seconds", seconds, 86_400), ("--tail", tail, 1000), ("--samples", samples, 10**6)):
        if not 0 < value <= most:
            raise Wrong(f"{option} is {value}, but must be above 0 and at most {most}")
    if plot is not None and not paced:
        raise Wrong(f"--plot is {plot}, but it draws latency over the rate, and --rates is empty")
    if csv is not None and not csv.absolute().parent.is_dir():
        raise Wrong(f"--csv is {csv}, but there is no folder {csv.absolute().parent}")
    check_places(None, plot)
    plan = Plan(clients, paced, seconds, seed, solo)
    common = ["--seed", str(seed), "--max-num-seqs", str(max_num_seqs)]
    common += [] if model is None else ["--model", model]
    common += [] if persistent_batch else ["--no-persistent-batch"]
    common = joined(common, server)

    @contextmanager
    def open_arm(arm: Arm) -> Iterator[Running]:
        with served(joined(common, arm.options)) as running:
            yield running

    notes = Console(stderr=True)
    runs = run_arms(listed, plan, open_arm, lambda text: notes.print(text, markup=False))
    complaints = [found for other in runs[1:] for found in judge(runs[0], other, Tolerance(tail, samples))]
    if as_json:
        print(json.dumps(report.document(runs, complaints)))
    else:
        report.show(runs, complaints, Console(width=None if sys.stdout.isatty() else PAGE))
    if csv is not None:
        csv.write_text(report.table_of(runs), encoding="utf-8")
    if plot is not None:
        report.plot(runs, plot)
    return 1 if complaints else 0


def _arm(name: str) -> Arm:
    if name not in ARMS:
        raise Wrong(f"--arms holds {name!r}, but must hold {', '.join(ARMS)}")
    return Arm(name, ARMS[name])


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 10_000:
        raise Wrong(f"--rates holds {text!r}, but must hold numbers above 0")
    return rate


def main(arguments: Sequence[str]) -> int:
    try:
        return int(app(list(arguments), print_error=False, exit_on_error=False) or 0)
    except (CycloptsError, Wrong, StartFailed, NoPlots, Backwards, TimeoutError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
