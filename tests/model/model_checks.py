"""Laws that hold between two observations of the model whatever the workload; each names the clauses it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from model_sim import Model

State = dict[str, Any]
Seen = dict[str, Any]


def check_conservation(model: Model, state: State) -> None:
    """Every block is owned, blank or cached; rows are distinct and in range (Terms, 10)."""
    held = [block for table in state["tables"].values() for block in table]
    if model.prefix_cache:
        assert state["references"] == Counter(held), "references"
        assert all(len(set(table)) == len(table) for table in state["tables"].values()), "a block twice in a table"
        assert set(state["cached"]) <= state["published"].keys(), "cached without content"
        assert not set(state["blank"]) & state["published"].keys(), "blank with content"
        held = list(set(held)) + state["cached"]
    assert sorted(held + state["blank"]) == list(range(model.blocks)), "conservation of blocks"
    rows = list(state["rows"].values())
    assert len(set(rows)) == len(rows), "two requests hold a row"
    assert set(rows) <= set(range(model.rows)), "row out of range"
    assert set(state["running"]) == set(state["rows"]), "running without a row"
    assert not set(state["running"]) & set(state["waiting"]), "waiting and running"


def check_order(rank: Callable[[int], tuple[int, int]], before: State, seen: Seen, state: State) -> None:
    """Queue order, nobody overtakes, victims come from the end of the order (2, 6.2, 8.4)."""
    for name in ("waiting", "running"):
        assert state[name] == sorted(state[name], key=rank), f"{name} out of order"
    admitted = [request for request, _, _ in seen["admitted"]]
    if admitted and state["waiting"]:
        assert max(map(rank, admitted)) < min(map(rank, state["waiting"])), "overtaken"
    stayed = [rank(r) for r in state["running"] if r not in admitted]
    assert all(rank(victim) > mine for victim in seen["preempted"] for mine in stayed), "victim is not the last"
    assert all(rank(a) > rank(b) for a, b in pairwise(seen["preempted"])), "victims out of order"
    if "cached" not in before:
        assert not set(seen["preempted"]) & set(admitted), "readmitted in the iteration of its preemption"  # 6.5


def check_plan(model: Model, seen: Seen, state: State) -> None:
    """Who runs with what, how much, and in which rows (5.1, 7, 9, 12)."""
    chunks, decodes = seen["chunks"], seen["decodes"]
    assert sum(count for _, _, _, count, _ in chunks) + len(decodes) <= model.budget, "over budget"
    assert all(count > 0 for _, _, _, count, _ in chunks), "empty chunk"
    planned = [c[0] for c in chunks] + [d[0] for d in decodes]
    assert sorted(planned) == sorted(state["running"]), "a running request is not in the plan once"
    assert bool(planned) or not state["waiting"], "no progress: requests wait and nothing runs"
    parts = [r for r in state["running"] if state["status"][r] == "prefilling"]
    assert len(parts) <= 1, "two part-prefilled requests"
    new = dict(seen["sampled"])
    for request, table in state["tables"].items():
        need = -(-(state["num_tokens"][request] - (request in new)) // model.block_size)
        assert len(table) == need, "holds more or less than it needs"
    rows = [row for _, row, _ in decodes]
    if model.persistent_batch:
        assert rows == list(range(len(rows))), "a decode out of place"
    else:
        assert not seen["moves"], "a move without the persistent batch"
    assert (seen["launch"] is not None) == bool(decodes), "launch"


def swaps(before: State, seen: Seen) -> int:
    """Moves whose hole was held by a request that stays: a prefilling one (7.4)."""
    gone = {*seen["reaped"], *seen["preempted"]}
    holders = {row for request, row in before["rows"].items() if request not in gone}
    return sum(1 for _, hole in seen["moves"] if hole in holders)


def self_preemptions(before: State, seen: Seen) -> int:
    """Victims that asked themselves: nobody took the top of what they gave back, which an asker does at once (6.2)."""
    grown = {block for _, block in seen["grown"]}
    return sum(1 for victim in seen["preempted"] if before["tables"][victim][0] not in grown)
