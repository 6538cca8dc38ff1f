"""How cost grows: a decode step against rows and context, prefill against length, host time against rows.

python ci/bench_growth.py --plot growth.png --json growth.json
python ci/bench_growth.py --longest 512 --rows 4                a first look
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from server.bench.offline.plot import OURS
from server.bench.offline.shares import measured
from server.bench.offline.worker import WorkerFailed
from server.bench.plot import NoPlots, check_places, pyplot

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
STEPS = 16
app = App(name="bench_growth", help=__doc__, result_action="return_value")


def growth(
    engine: Mapping[str, Any],
    rows: Sequence[int],
    contexts: Sequence[int],
    prompt: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Milliseconds: "rows" at context 128, "contexts" at one row, "prefill" as (tokens, ms so far). ``say`` hears of each as
    it is there. Raises ``WorkerFailed``."""
    # The last context has to leave room for the steps that are measured.
    room = [min(context, max(contexts) - STEPS) for context in contexts]
    told: dict[str, Any] = {"rows": [], "contexts": [], "prefill": []}
    passes: tuple[tuple[str, list[tuple[int, int, int]], list[int]], ...] = (
        ("rows", [(count, 128, STEPS) for count in rows], []),
        ("contexts", [(1, context, STEPS) for context in room], [prompt]),
    )
    for name, points, lengths in passes:
        say(f"starting an engine for {name}")
        for line in measured(engine, decode=points, prefill=lengths):
            if "decode" in line:
                told[name].append(one := _milliseconds(line["decode"]))
                say(f"decode, {one['rows']} rows at {one['context']}: {one['wall_ms']:.2f} ms")
            if "prefill" in line:
                told["prefill"] = [[tokens, seconds * 1000] for tokens, seconds in line["prefill"]]
                say(f"prefill of {prompt}: {told['prefill'][-1][1]:.0f} ms")
    return told


def _milliseconds(time: Mapping[str, float]) -> dict[str, float]:
    return {
        "rows": time["rows"],
        "context": time["context"],
        **{f"{name}_ms": time[name] * 1000 for name in ("wall", "execute", "host")},
    }


def show(console: Console, told: Mapping[str, Any]) -> None:
    for name, key in (("rows", "rows"), ("contexts", "context")):
        found = Table(title=f"decode step against {name}", box=box.SIMPLE_HEAD)
        for heading in (key, "step, ms", "host, ms", "tok/s"):
            found.add_column(heading, justify="right")
        for one in told[name]:
            rate = one["rows"] / one["wall_ms"] * 1000
            found.add_row(str(one[key]), f"{one['wall_ms']:.2f}", f"{one['host_ms']:.3f}", f"{rate:.0f}")
        console.print(found)
    found = Table(title="prefill of one prompt", box=box.SIMPLE_HEAD)
    for heading in ("tokens", "ms", "tok/s"):
        found.add_column(heading, justify="right")
    for tokens, ms in told["prefill"]:
        found.add_row(str(tokens), f"{ms:.0f}", f"{tokens / ms * 1000:.0f}")
    console.print(found)


def plot(told: Mapping[str, Any], path: Path, title: str) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(16, 3.8), layout="constrained")
    rows, contexts, prefill = told["rows"], told["contexts"], [[0, 0.0], *told["prefill"]]
    lines = (
        ("decode step, context 128", "rows", [one["rows"] for one in rows], [one["wall_ms"] for one in rows]),
        ("decode step, 1 row", "context", [one["context"] for one in contexts], [one["wall_ms"] for one in contexts]),
        ("prefill", "tokens", [tokens for tokens, _ in prefill], [ms for _, ms in prefill]),
        ("host time of a step", "rows", [one["rows"] for one in rows], [one["host_ms"] for one in rows]),
    )
    for axis, (heading, label, x, y) in zip(axes, lines, strict=True):
        axis.plot(x, y, marker="o", color=OURS)
        axis.set_title(heading)
        axis.set_xlabel(label)
        axis.set_ylabel("ms")
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.08 * max(y))
        axis.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)


@app.default
def main(
    *,
    model: Path | None = None,
    compute: str = "native",
    threads: int = 2,
    longest: int = 8192,
    rows: int = 64,
    json_to: Annotated[Path | None, Parameter(name="--json")] = None,
    plot_to: Annotated[Path | None, Parameter(name="--plot")] = None,
) -> int:
    """Measures and prints three tables. Exit status: 0 measured, 1 not.

    Args:
        longest: the longest context; one prompt nearly as long is prefilled.
        rows: the most that decode together.
    """
    console = Console()
    if longest < CONTEXTS[0] + 2 * STEPS or rows < 1:
        console.print(f"longest must be at least {CONTEXTS[0] + 2 * STEPS} and rows positive", markup=False)
        return 1
    try:
        check_places(json_to, plot_to)
    except (NoPlots, ValueError) as error:
        console.print(str(error), markup=False)
        return 1
    engine = {"threads": threads, "compute": compute, **({"model": str(model)} if model else {})}
    contexts = [context for context in CONTEXTS if context <= longest]
    try:
        told = growth(
            engine,
            [count for count in ROWS if count <= rows],
            contexts,
            longest - 2 * STEPS,
            lambda text: console.print(text, markup=False),
        )
    except WorkerFailed as error:
        console.print(f"failed: {error}", markup=False)
        return 1
    show(console, told)
    if json_to is not None:
        json_to.write_text(json.dumps(told, indent=1), encoding="utf-8")
    if plot_to is not None:
        name = model.name if model else "the default model"
        plot(told, plot_to, f"{name}, compute {compute}, {threads} threads")
    return 0


if __name__ == "__main__":
    sys.exit(app())
