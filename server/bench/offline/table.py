"""What the runs say: a number for each contestant and column, ratios to the best peer, and which aims are met.

Times and memory are better when smaller, rates when larger; every ratio is written so that above 1 means better than the
peer. A cell is the median of a contestant's runs of one list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from server.bench.offline.rounds import COLD, Outcome, median
from server.bench.offline.worker import Reading
from server.bench.requests import Ask

Lists = Mapping[str, Sequence[Ask]]
SHIPPED, INT8, F32 = "lockstep, as shipped", "lockstep, int8 activations", "lockstep, F32"
LLAMA_SHIPPED = "llama.cpp, as shipped"


@attrs.frozen
class Column:
    """``of``: the number of one run; None takes it from the process (memory)."""

    key: str
    title: str
    list: str | None
    higher: bool
    of: Callable[[Reading, Sequence[Ask]], float] | None

    def value(self, outcome: Outcome, lists: Lists) -> float | None:
        if self.of is None or self.list is None:
            return outcome.rss
        asks = lists.get("shared16" if self.list == COLD else self.list)
        runs = outcome.runs.get(self.list, [])
        if asks is None:
            return None
        return median([self.of(run, asks) for run in runs])

    def ratio(self, ours: float, theirs: float) -> float:
        """Above 1: ours is better."""
        return ours / theirs if self.higher else theirs / ours


def _ttft(run: Reading, _: Sequence[Ask]) -> float:
    return run.first * 1000


def _decode(run: Reading, asks: Sequence[Ask]) -> float:
    return (asks[0].gen - 1) / (run.last - run.first) if run.last > run.first else float("nan")


def _prefill(run: Reading, asks: Sequence[Ask]) -> float:
    return len(asks[0].prompt) / run.first


def _output(run: Reading, asks: Sequence[Ask]) -> float:
    return sum(ask.gen for ask in asks) / run.wall


COLUMNS = (
    Column("ttft_ms", "TTFT 128, ms", "single", False, _ttft),
    Column("decode_tok_s", "1 stream, tok/s", "single", True, _decode),
    Column("prefill_tok_s", "prefill 1024, tok/s", "prefill1024", True, _prefill),
    Column("batch16_tok_s", "16 requests, tok/s", "batch16", True, _output),
    Column("shared16_tok_s", "16 sharing 512, tok/s", "shared16", True, _output),
    Column("shared16_cold_tok_s", "same, no prefix cache", COLD, True, _output),
    Column("rss_mib", "RSS, MiB", None, False, None),
)
BY_KEY = {column.key: column for column in COLUMNS}


@attrs.frozen
class Row:
    name: str
    peer: str | None
    fp32: bool
    cells: Mapping[str, float | None]
    notes: tuple[str, ...] = ()  # why a cell is empty
    int8: bool = False

    @property
    def label(self) -> str:
        """The name, and what a reader of its numbers has to know."""
        return f"{self.name} (8-bit activations)" if self.int8 and self.name != INT8 else self.name


@attrs.frozen
class Comparison:
    """A ratio on one footing, without an aim. ``ratio`` is None where a part of it was not measured."""

    text: str
    ratio: float | None


@attrs.frozen
class Goal:
    """An aim of the project and what was measured. ``met`` is None where a part of it was not measured."""

    text: str
    wanted: float
    reached: float | None

    @property
    def met(self) -> bool | None:
        return None if self.reached is None else self.reached >= self.wanted


def rows(outcomes: Sequence[Outcome], lists: Lists) -> list[Row]:
    found = []
    for outcome in outcomes:
        cells = {column.key: column.value(outcome, lists) for column in COLUMNS}
        notes = [*outcome.lost.values()] if outcome.failure is None else [outcome.failure]
        found.append(Row(outcome.name, outcome.peer, outcome.fp32, cells, tuple(notes), outcome.int8))
    return found


Among = Callable[[Row], bool]


def _any(row: Row) -> bool:
    return True


def _fp32(row: Row) -> bool:
    return row.fp32


def _int8(row: Row) -> bool:
    return row.int8


def best(found: Sequence[Row], key: str, among: Among) -> tuple[float, str] | None:
    """The best number in a column of a peer that is ``among`` those who count, and its name."""
    column = BY_KEY[key]
    cells = [
        (value, row.name)
        for row in found
        if row.peer is not None and among(row) and (value := row.cells.get(key)) is not None
    ]
    if not cells:
        return None
    return max(cells) if column.higher else min(cells)


def ratios(found: Sequence[Row], *, fp32_only: bool = True) -> dict[str, dict[str, float | None]]:
    """For each row of this engine and each column: how many times better than the best (fp32) peer."""
    told: dict[str, dict[str, float | None]] = {}
    for row in found:
        if row.peer is None:
            told[row.name] = {key: _to_best(found, row, key, _fp32 if fp32_only else _any) for key in BY_KEY}
    return told


def _to_best(found: Sequence[Row], row: Row | None, key: str, among: Among) -> float | None:
    return None if row is None else _against(row, key, best(found, key, among))


def _against(row: Row, key: str, peer: tuple[float, str] | None) -> float | None:
    ours = row.cells.get(key)
    return None if ours is None or peer is None else BY_KEY[key].ratio(ours, peer[0])


def comparisons(found: Sequence[Row]) -> list[Comparison]:
    """This engine and peers that round activations as it does: not at all, or to 8 bits."""
    by_name = {row.name: row for row in found}
    return [
        Comparison(f"{what}, {ours}, to the best {peer} peer", _to_best(found, by_name.get(name), key, among))
        for name, ours, peer, among in (
            (SHIPPED, "as shipped", "fp32", _fp32),
            (INT8, "int8 activations", "8-bit", _int8),
        )
        for what, key in (("16 requests", "batch16_tok_s"), ("prefill of 1024", "prefill_tok_s"))
    ]


def goals(found: Sequence[Row]) -> list[Goal]:
    """The aims of this engine on the CPU, judged by this run's numbers."""
    by_name = {row.name: row for row in found}
    shipped, plain, llama = (by_name.get(name) for name in (SHIPPED, F32, LLAMA_SHIPPED))

    def against(row: Row | None, key: str, *, fp32_only: bool) -> float | None:
        return _to_best(found, row, key, _fp32 if fp32_only else _any)

    def to_llama() -> float | None:
        if shipped is None or llama is None or llama.cells["decode_tok_s"] is None:
            return None
        return _against(shipped, "decode_tok_s", (llama.cells["decode_tok_s"], llama.name))

    def sharing() -> float | None:
        warm, cold = ((shipped.cells[key] if shipped else None) for key in ("shared16_tok_s", "shared16_cold_tok_s"))
        return None if warm is None or cold is None else warm / cold

    every = [value for key in BY_KEY if (value := against(plain, key, fp32_only=True)) is not None]
    return [
        Goal("F32 weights, every column, to the best fp32 peer", 1.0, min(every) if every else None),
        Goal("1 stream, F32 weights, to the best fp32 peer", 1.1, against(plain, "decode_tok_s", fp32_only=True)),
        Goal("1 stream, as shipped, to the best fp32 peer", 2.5, against(shipped, "decode_tok_s", fp32_only=True)),
        Goal("1 stream, as shipped, to llama.cpp on the same file", 1.2, to_llama()),
        Goal("16 requests, as shipped, to the best peer", 1.6, against(shipped, "batch16_tok_s", fp32_only=False)),
        Goal("prefill of 1024, as shipped, to the best peer", 1.05, against(shipped, "prefill_tok_s", fp32_only=False)),
        Goal("16 sharing 512 tokens, to the same without prefix cache", 2.5, sharing()),
        Goal("RSS, as shipped, to the smallest peer", 1.0, against(shipped, "rss_mib", fp32_only=False)),
    ]


def failures(found: Sequence[Row], lists: Lists) -> list[str]:
    """What makes the table incomplete: a contestant without any number, or one of ours with an empty cell."""
    told = []
    for row in found:
        measured = [key for key, column in BY_KEY.items() if column.list in lists and row.cells[key] is not None]
        if not measured or (row.peer is None and row.notes):
            told.append(f"{row.name} was not measured: {row.notes[0] if row.notes else 'it has no run'}")
    return told


def plain(found: Sequence[Row]) -> dict[str, Any]:
    """The table as JSON values."""
    return {
        "rows": [attrs.asdict(row) for row in found],
        "ratios_to_best_fp32_peer": ratios(found),
        "ratios_to_best_peer": ratios(found, fp32_only=False),
        "comparisons": [attrs.asdict(one) for one in comparisons(found)],
        "goals": [{**attrs.asdict(goal), "met": goal.met} for goal in goals(found)],
    }
