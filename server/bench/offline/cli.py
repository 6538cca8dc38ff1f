"""``python -m server bench --offline``: the request lists on this engine and its peers, in one run, as one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.loading.model import LoadError
from engine.native.build import BuildError
from server.bench.offline import quality, report, shares, table
from server.bench.offline.contestants import Contestant, Missing, contestants
from server.bench.offline.models import Files, files_of, prepare, quantised
from server.bench.offline.plot import plot
from server.bench.offline.rounds import Outcome, measure, schedule
from server.bench.offline.worker import WorkerFailed, worker
from server.bench.plot import NoPlots, check_places
from server.bench.requests import Ask, ListError, bundled
from server.bench.requests import load as load_lists

app = App(
    name="python -m server bench --offline",
    help_format="plaintext",
    result_action="return_value",
    help=(
        "Measures this engine without HTTP beside transformers, OpenVINO GenAI, CTranslate2 and, where installed, llama.cpp: "
        "the same token ids, greedy, end-of-sequence ignored, each engine in a process of its own that is stopped while "
        "another is measured, in interleaved rounds. `make peers` installs the peers. A cell is the median of --repeats runs."
    ),
)
FAILURES = (Missing, LoadError, BuildError, WorkerFailed, ListError, ValueError, OSError)


@attrs.frozen
class Settings:
    threads: int
    repeats: int
    slow: float
    patience: float

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Settings):
            if (value := getattr(self, field.name)) <= 0:
                raise ValueError(f"--{field.name} is {value}, but must be above 0")


@app.default
def bench(
    *,
    repeats: Annotated[int, Parameter(help="Runs of each list.")] = 3,
    threads: Annotated[int, Parameter(help="Of every engine.")] = 2,
    lists: Annotated[
        tuple[str, ...], Parameter(name="--list", negative_iterable="", help="A list by name; default: all.")
    ] = (),
    file: Annotated[Path | None, Parameter(help="A JSON file of request lists instead of the bundled ones.")] = None,
    model: Annotated[Path | None, Parameter(help="A .gguf file; by default the default model.")] = None,
    peers: Annotated[Path, Parameter(help="Where the peers' environments and model files lie.")] = Path(".peers"),
    with_peers: Annotated[
        bool, Parameter(name="--with-peers", negative="--no-peers", help="Measure the peers; without one it fails.")
    ] = True,
    only: Annotated[
        tuple[str, ...], Parameter(negative_iterable="", help="Contestants whose name holds this; default: all.")
    ] = (),
    http: Annotated[bool, Parameter(negative="", help="Also this engine's server, over HTTP.")] = False,
    limits: Annotated[bool, Parameter(help="Also the machine's limits, and steps by weight type.")] = True,
    with_quality: Annotated[
        bool, Parameter(name="--quality", negative="", help="Also perplexity and agreement.")
    ] = False,
    slow: Annotated[float, Parameter(help="A run of more seconds than this is not repeated.")] = 20.0,
    patience: Annotated[float, Parameter(help="A run of more seconds than this is cut.")] = 90.0,
    json_to: Annotated[Path | None, Parameter(name="--json", help="Write everything measured to this file.")] = None,
    plot_to: Annotated[Path | None, Parameter(name="--plot", help="Draw the table (.png, .svg, .pdf).")] = None,
) -> int:
    """Exit status: 0 measured, 1 something was not, 2 wrong options or missing peers."""
    settings = Settings(threads, repeats, slow, patience)
    asks = _lists(file, lists)
    files = files_of(model, peers.absolute() / "models")
    check_places(json_to, plot_to)
    people = contestants(
        files, peers.absolute(), threads, with_peers=with_peers, http=http, int8=quantised(files.shipped), only=only
    )
    console, progress = _console(), _Progress()
    prepare(files, progress.say)
    outcomes = list(_rounds(people, asks, settings, progress).values())
    rows = table.rows(outcomes, asks)
    conditions = report.conditions(threads, repeats, files.shipped.name, outcomes)
    title = _title(conditions, with_peers)
    report.show(console, rows, title)
    _tell_foreign(console, conditions)
    report.show_goals(console, rows)
    parts: dict[str, Any] = {}
    if limits:
        found, types = shares.shares(files, threads, progress.say)
        report.show_shares(console, found, types)
        parts["machine"] = shares.plain(found, types)
    failed = table.failures(rows, asks)
    if with_quality:
        measured = _quality(files, peers.absolute(), threads, asks, progress)
        report.show_quality(console, measured)
        parts["quality"] = [one.plain() for one in measured]
        failed += [
            f"{one.kind}: perplexity differs by {one.difference:+.1e} from transformers, allowed are {quality.ALLOWED}"
            for one in measured
            if abs(one.difference) >= quality.ALLOWED
        ]
    if json_to is not None:
        json_to.write_text(json.dumps(report.document(rows, outcomes, conditions, **parts), indent=1), encoding="utf-8")
    if plot_to is not None:
        plot(rows, plot_to, title)
    for failure in failed:
        console.print(f"failed: {failure}", markup=False, highlight=False, style="bold red")
    return 1 if failed else 0


def _console() -> Console:
    """Into a file or a pipe the table is as wide as it needs to be."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


def _lists(file: Path | None, names: Sequence[str]) -> Mapping[str, Sequence[Ask]]:
    known = bundled() if file is None else load_lists(file)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--list is {unknown[0]!r}, but must be one of {', '.join(known)}")
    return {name: asks for name, asks in known.items() if not names or name in names}


def _rounds(
    people: Sequence[Contestant], asks: Mapping[str, Sequence[Ask]], settings: Settings, progress: _Progress
) -> dict[str, Outcome]:
    turns = list(schedule(people, list(asks), settings.repeats))
    with progress.of(len(turns) + len(people)):
        workers = {one.name: worker(one, settings.threads) for one in people}
        return measure(workers, asks, turns, progress.say, slow=settings.slow, patience=settings.patience)


def _quality(
    files: Files, peers: Path, threads: int, asks: Mapping[str, Sequence[Ask]], progress: _Progress
) -> list[quality.Quality]:
    prompts = max(asks.values(), key=len)
    return quality.qualities(files, peers, threads, prompts, progress.say)


def _title(conditions: Mapping[str, Any], with_peers: bool) -> str:
    without = "" if with_peers else ", WITHOUT PEERS (--no-peers)"
    return f"{conditions['model']}, {conditions['processor']}, {conditions['threads']} threads{without}"


def _tell_foreign(console: Console, conditions: Mapping[str, Any]) -> None:
    middle, worst = conditions["foreign_cores_median"], conditions["foreign_cores_worst"]
    if middle is not None:
        console.print(f"other processes kept {middle:.2f} cores busy meanwhile (median; at worst {worst:.2f})")


class _Progress:
    """What is going on: a bar on a terminal, lines elsewhere, both on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None

    def of(self, total: int) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=total)
        return self._bar

    def say(self, text: str) -> None:
        if self._bar is not None and self._console.is_terminal and not self._bar.finished:
            self._bar.update(self._task, description=text, advance=1)
        else:
            self._console.print(text, markup=False, highlight=False)


def main(arguments: Sequence[str]) -> int:
    try:
        return int(app(list(arguments), print_error=False, exit_on_error=False) or 0)
    except (CycloptsError, NoPlots, *FAILURES) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
