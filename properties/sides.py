"""Both ledgers in the same words, entry by entry, and which entries differ: what the report prints and the page shows.

An entry is a name and a text. Queues and free blocks are one entry each; so is every published block, and every request
(status, progress, row, block table): a difference then stands in the line of the block or request that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from engine.control.record import Ledger
from properties.cached import Contents
from properties.lockstep import Step


@attrs.frozen
class Side:
    """What one side holds after an iteration."""

    waiting: tuple[int, ...]
    running: tuple[int, ...]
    rows: Mapping[int, int]  # request -> row
    tables: Mapping[int, tuple[int, ...]]
    status: Mapping[int, str]
    computed: Mapping[int, int]
    num_tokens: Mapping[int, int]
    blank: tuple[int, ...]
    cached: tuple[int, ...]
    published: Mapping[int, object]
    references: Mapping[int, int]  # of each block that has any

    def request(self, request: int) -> str:
        """``decoding 5/6 @0 b0,b1``: status, computed/tokens, row, block table."""
        if request not in self.status:
            return "-"
        text = f"{self.status[request]} {self.computed.get(request, '?')}/{self.num_tokens.get(request, '?')}"
        if request in self.rows:
            text += f" @{self.rows[request]}"
        if table := self.tables.get(request):
            text += " " + blocks(table)
        return text

    def entries(self) -> Iterator[tuple[str, str]]:
        yield "waiting", people(self.waiting)
        yield "running", people(self.running)
        yield "blank", blocks(self.blank)
        yield "cached", blocks(self.cached)
        yield "references", self._unusual_references()
        for block, held in sorted(self.published.items()):
            yield f"b{block} holds", content(held)
        for request in sorted(self.status):
            yield f"r{request}", self.request(request)

    def _unusual_references(self) -> str:
        """Shared blocks, and those whose count is not the number of tables that name them."""
        named = Counter(block for table in self.tables.values() for block in table)
        told = [
            block
            for block in sorted({*self.references, *named})
            if self.references.get(block, 0) > 1 or self.references.get(block, 0) != named[block]
        ]
        return ", ".join(f"b{block} x{self.references.get(block, 0)}" for block in told)


@attrs.frozen
class Entry:
    """One line of both ledgers. ``note`` says of a difference what it means."""

    name: str
    engine: str
    specification: str
    note: str = ""

    @property
    def differs(self) -> bool:
        return self.engine != self.specification


def of_model(state: Mapping[str, Any]) -> Side:
    return Side(
        tuple(state["waiting"]),
        tuple(state["running"]),
        {request: row for request, row in state["rows"].items() if row is not None},
        {request: tuple(table) for request, table in state["tables"].items()},
        state["status"],
        state["computed"],
        state["num_tokens"],
        tuple(state["blank"]),
        tuple(state.get("cached", ())),
        state.get("published", {}),
        Counter(block for table in state["tables"].values() for block in table),
    )


def of_engine(ledger: Ledger, contents: Contents) -> Side:
    """``contents`` has followed the engine up to here; it says what a published hash stands for."""
    return Side(
        ledger.waiting,
        ledger.running,
        ledger.rows,
        ledger.tables,
        ledger.status,
        ledger.computed,
        ledger.num_tokens,
        ledger.blank,
        ledger.cached,
        contents.name(ledger),
        {block: count for block, count in enumerate(ledger.references) if count},
    )


def sides(steps: Sequence[Step]) -> Iterator[tuple[Step, Side | None, Side]]:
    """Each iteration with the engine's side (None where it did not step) and the specification's."""
    salts = {salt for step in steps for salt, _ in step.after.get("published", {}).values()}
    contents = Contents([None, *sorted(salts - {None})])
    for step in steps:
        mine = None if step.ledger is None else of_engine(step.ledger, contents)
        yield step, mine, of_model(step.after)


def compare(mine: Side, theirs: Side, pool: int) -> list[Entry]:
    """Both ledgers line by line; entries that are empty on both sides are left out."""
    left, right = dict(mine.entries()), dict(theirs.entries())
    notes = {"blank": "; ".join(lost(mine, pool))}
    entries = [
        Entry(name, left.get(name, ""), right.get(name, ""), notes.get(name, ""))
        for name in sorted({*left, *right}, key=_place)
    ]
    return [entry for entry in entries if entry.engine or entry.specification]


def _place(name: str) -> tuple[int, int]:
    """Lists first, then blocks, then requests, each by number."""
    lists = ("waiting", "running", "blank", "cached", "references")
    if name in lists:
        return (0, lists.index(name))
    return (1 if name[0] == "b" else 2, int("".join(filter(str.isdigit, name))))


def lost(side: Side, pool: int) -> Iterator[str]:
    """Blocks that are nowhere, or in two places at once."""
    owned = {block for table in side.tables.values() for block in table}
    free = Counter((*side.blank, *side.cached))
    for block in range(pool):
        if block not in owned and not free[block]:
            yield f"block {block} has no owner and is not free"
        elif block in owned and free[block]:
            yield f"block {block} has an owner and is free"
        elif free[block] > 1:
            yield f"block {block} is free {free[block]} times"


def people(requests: Iterable[int]) -> str:
    return " ".join(f"r{request}" for request in requests)


def blocks(numbers: Iterable[int]) -> str:
    return ",".join(f"b{block}" for block in numbers)


def content(held: object) -> str:
    """``ends at 8 [3 7 9 1] salt s1``: where the content of a published block ends, and its last tokens."""
    match held:
        case (salt, (*tokens,)) if salt is None or isinstance(salt, str):
            shown = " ".join(str(token) for token in tokens[-4:])
            return f"ends at {len(tokens)} [{'.. ' if len(tokens) > 4 else ''}{shown}]" + (
                f" salt {salt}" if salt else ""
            )
        case _:
            return str(held)
