"""The table as a picture: one panel for each column, one bar for each contestant, this engine's in another colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.bench.offline.report import short
from server.bench.offline.table import COLUMNS, Row
from server.bench.plot import pyplot

OURS, THEIRS = "#1f6f8b", "#b8b8b8"


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Writes a PNG, SVG or PDF, by the name's ending. Raises ``NoPlots``, and ``ValueError`` for another ending."""
    plt = pyplot()
    shown = [column for column in COLUMNS if any(row.cells.get(column.key) is not None for row in rows)]
    across = min(4, max(1, len(shown)))
    down = -(-max(1, len(shown)) // across)
    size = (4.2 * across, 0.8 + down * (1.0 + 0.27 * len(rows)))
    figure, axes = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    for at, axis in enumerate(axes.flat):
        if at >= len(shown):
            axis.set_axis_off()
            continue
        column = shown[at]
        values = [row.cells.get(column.key) or 0.0 for row in rows]
        colours = [OURS if row.peer is None else THEIRS for row in rows]
        bars = axis.barh(range(len(rows)), values, color=colours)
        axis.bar_label(bars, labels=[short(value or None) for value in values], padding=2, fontsize=7)
        axis.set_yticks(
            range(len(rows)), [row.label for row in rows] if at % across == 0 else [""] * len(rows), fontsize=8
        )
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_title(f"{column.title} ({'more' if column.higher else 'less'} is better)", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)
