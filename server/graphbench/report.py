"""The comparison for people (tables, a plot) and for machines (JSON, CSV)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from server.bench.plot import pyplot
from server.graphbench.clients import Said
from server.graphbench.readings import Happened
from server.graphbench.verdict import ArmRun, Complaint, Paced, promised_equal, ratio_of, unequal

DODGE = 0.06  # of the way from one rate to the next, between the points of two arms


def show(arms: Sequence[ArmRun], complaints: Sequence[Complaint], console: Console) -> None:
    console.print(_arms(arms))
    if arms[0].paced:
        console.print(_rates(arms))
    for other in arms[1:]:
        console.print(f"{arms[0].name} and {other.name}: {_equal(arms[0], other)}", markup=False, soft_wrap=True)
    for arm in arms:
        if arm.alone:
            console.print(f"{arm.name} in the crowd and alone: {_counted(arm.crowd, arm.alone)}")
    for complaint in complaints:
        label = "WORSE" if complaint.kind == "worse" else "SAYS NOTHING"
        console.print(f"{label}  {complaint.check}: {complaint.text}", markup=False, soft_wrap=True)
    if not complaints:
        console.print("all checks hold")


def _equal(first: ArmRun, other: ArmRun) -> str:
    told = _counted(first.crowd, other.crowd)
    if promised_equal(first, other):
        return told
    same = sum(a.tokens == b.tokens and a.error is None for a, b in zip(first.crowd, other.crowd, strict=True))
    return f"{told}, {same} in their tokens; none is promised between {first.compute} and {other.compute}"


def _counted(some: Sequence[Said], others: Sequence[Said]) -> str:
    return f"{len(some) - len(unequal(some, others))} of {len(some)} answers equal to the byte"


def _arms(arms: Sequence[ArmRun]) -> Table:
    table = Table(title="the crowd, and what each arm cost to start", box=box.SIMPLE_HEAD)
    for heading in ("arm", "clients", "peak rows", "decode steps", "replayed", "eager steps", "padded", "moves"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for heading in ("recorded", "boot s", "capture s", "capture MiB", "RSS MiB"):
        table.add_column(heading, justify="right")
    for arm in arms:
        happened = arm.crowd_happened
        counts = [len(arm.crowd), happened.peak_rows, happened.decode_steps, f"{happened.replay_share:.1%}"]
        counts += [_reasons(happened), happened.padded_rows, happened.row_moves, sum(h.recorded for h in arm.happened)]
        memory = "-" if arm.memory_mib is None else f"{arm.memory_mib:.0f}"
        table.add_row(arm.name, *map(str, counts), f"{arm.boot_s:.1f}", *_capture(arm), memory)
    return table


def _reasons(happened: Happened) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(happened.eager.items())) or "0"


def _capture(arm: ArmRun) -> tuple[str, str]:
    """Seconds and memory of recording, as the server promised them."""
    told = arm.promises.get("capture")
    if not isinstance(told, Mapping):
        return "-", "-"
    return f"{told['seconds']:.2f}", f"{told['bytes'] / 2**20:.2f}"


def _rates(arms: Sequence[ArmRun]) -> Table:
    table = Table(title="open loop, ms", box=box.SIMPLE_HEAD)
    headings = ("arm", "req/s", "TTFT p50", "p99", "ITL p50", "p99", "samples", "replayed")
    for heading in (*headings, f"ITL p50 of {arms[0].name} / it", "p99", "90 % of redraws"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm in arms:
        for mine, paced in zip(arms[0].paced, arm.paced, strict=True):
            cells = [arm.name, *_latencies(paced), f"{paced.happened.replay_share:.1%}"]
            middle, tail = (None, None) if arm is arms[0] else (ratio_of(mine, paced, 50), ratio_of(mine, paced, 99))
            if middle is not None and tail is not None:
                cells += [f"{middle.value:.2f}", f"{tail.value:.2f}", f"{tail.low:.2f} .. {tail.high:.2f}"]
            table.add_row(*cells)
    return table


def _latencies(paced: Paced) -> list[str]:
    ttft, itl = paced.summary.latencies["ttft"], paced.summary.latencies["itl"]
    numbers = (ttft["p50"], ttft["p99"], itl["p50"], itl["p99"])
    return [f"{paced.rate:g}", *(f"{number:.1f}" for number in numbers), str(paced.samples)]


def document(arms: Sequence[ArmRun], complaints: Sequence[Complaint]) -> dict[str, Any]:
    """Plain values; answers are left out, how many are equal is in."""
    return {
        "arms": [_plain(arm) for arm in arms],
        "equal_answers": {
            other.name: len(arms[0].crowd) - len(unequal(arms[0].crowd, other.crowd)) for other in arms[1:]
        },
        "promised_equal": {other.name: promised_equal(arms[0], other) for other in arms[1:]},
        "ratios": {other.name: _ratios(arms[0], other) for other in arms[1:]},
        "complaints": [attrs.asdict(complaint) for complaint in complaints],
        "holds": not complaints,
    }


def _ratios(first: ArmRun, other: ArmRun) -> list[dict[str, Any]]:
    """The first arm's inter-token latency over the other's, by rate."""
    told = []
    for mine, theirs in zip(first.paced, other.paced, strict=True):
        quantiles = {f"p{percent}": ratio_of(mine, theirs, percent) for percent in (50, 99)}
        plain = {name: None if ratio is None else attrs.asdict(ratio) for name, ratio in quantiles.items()}
        told.append({"rate": mine.rate, "itl": plain})
    return told


def _plain(arm: ArmRun) -> dict[str, Any]:
    return {
        "name": arm.name,
        "boot_s": arm.boot_s,
        "memory_mib": arm.memory_mib,
        "compute": arm.compute,
        "promises": dict(arm.promises),
        "clients": len(arm.crowd),
        "equal_alone": len(arm.crowd) - len(unequal(arm.crowd, arm.alone)) if arm.alone else None,
        "crowd": attrs.asdict(arm.crowd_happened) | {"peak_rows": arm.crowd_happened.peak_rows},
        "paced": [
            {
                "rate": paced.rate,
                "samples": paced.samples,
                **paced.summary.plain(),
                "steps": attrs.asdict(paced.happened),
            }
            for paced in arm.paced
        ],
    }


def table_of(arms: Sequence[ArmRun]) -> str:
    """CSV: a line for each arm and rate, latencies in milliseconds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["arm", "rate", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "samples", "replay_share"])
    for arm in arms:
        for paced in arm.paced:
            writer.writerow([arm.name, *_latencies(paced), f"{paced.happened.replay_share:.4f}"])
    return out.getvalue()


def plot(arms: Sequence[ArmRun], path: Path) -> None:
    """ITL and TTFT over the rate, one pair of lines per arm. Raises ``NoPlots``, and ``ValueError`` for the ending."""
    plt = pyplot()
    rates = [f"{paced.rate:g}" for paced in arms[0].paced]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for number, arm in enumerate(arms):
        # Side by side, so that arms that are equally quick are all seen.
        places = [place + DODGE * (number - (len(arms) - 1) / 2) for place in range(len(rates))]
        for axis, name in zip(axes, ("itl", "ttft"), strict=True):
            for quantile, line, fill in (("p50", "--", "none"), ("p99", "-", "full")):
                values = [paced.summary.latencies[name][quantile] for paced in arm.paced]
                style = {"linestyle": line, "marker": "o", "fillstyle": fill, "color": f"C{number}"}
                axis.plot(places, values, label=f"{arm.name} {quantile}", **style)
    for axis, title in zip(axes, ("inter-token latency, ms", "time to first token, ms"), strict=True):
        axis.set_xlabel("requests per second")
        axis.set_xticks(range(len(rates)), rates)
        axis.set_xlim(-0.5, len(rates) - 0.5)
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    pairs = [f"{arms[0].name} and {other.name}: {_counted(arms[0].crowd, other.crowd)}" for other in arms[1:]]
    figure.suptitle("\n".join(pairs), fontsize="medium")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms))
    try:
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)
