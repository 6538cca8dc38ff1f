"""The picture of a benchmark: how TTFT and inter-token latency are distributed, one curve per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server.bench.client import Answer


class NoPlots(RuntimeError):
    """matplotlib is not installed; the message says how to get it."""


def pyplot() -> Any:
    """Raises ``NoPlots`` without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise NoPlots("--plot needs matplotlib: pip install 'lockstep-engine[plot]'") from None
    mpl.use("agg")
    from matplotlib import pyplot as plt

    return plt


def check_places(json_to: Path | None, plot_to: Path | None) -> None:
    """Before anything is measured for minutes. Raises ``NoPlots``, and ``ValueError`` for what could not be written."""
    for option, path in (("--json", json_to), ("--plot", plot_to)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{option} is {path}, but there is no folder {path.absolute().parent}")
    if plot_to is not None:
        plt = pyplot()
        figure = plt.figure()
        endings = sorted(figure.canvas.get_supported_filetypes())
        plt.close(figure)
        if plot_to.suffix.lower().removeprefix(".") not in endings:
            raise ValueError(f"--plot is {plot_to}, but its name must end in one of {', '.join(endings)}")


def plot(runs: Mapping[str, Sequence[Answer]], path: Path) -> None:
    """Writes a PNG, SVG or PDF, by the name's ending. Raises ``NoPlots``, and ``ValueError`` for another ending."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, answers in runs.items():
        good = [answer for answer in answers if answer.error is None]
        series = ([answer.ttft for answer in good], [gap for answer in good for gap in answer.gaps])
        for axis, values in zip(axes, series, strict=True):
            ordered = sorted(value * 1000 for value in values)
            if ordered:
                shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
                axis.step(ordered, shares, where="post", label=name)
    for axis, title in zip(axes, ("time to first token, ms", "inter-token latency, ms"), strict=True):
        axis.set_xlabel(title)
        axis.set_ylabel("share of samples at most this long")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    try:
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)
