"""Faults of the block pool: who owns a block, what is free, and in which order it is handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from properties.arming import Fault, in_area, instead, line

POOL = "engine.control.blocks:BlockPool"
SCHEDULER = "engine.control.scheduler:Scheduler"


def _takes_an_owned_block(take: Callable[[Any], int]) -> Any:
    def faulty(pool: Any) -> int:
        owned = [block for block, references in enumerate(pool.references) if references]
        if len(owned) < 3:
            return take(pool)
        pool.references[owned[0]] += 1
        return owned[0]

    return faulty


def _loses_the_first_of_the_third(release: Callable[..., None]) -> Any:
    """Whatever the order in which blocks go back, table[0] of the third table does not."""
    count = 0

    def faulty(pool: Any, table: list[int]) -> None:
        nonlocal count
        count += 1
        release(pool, table[1:] if count == 3 else table)

    return faulty


FAULTS = in_area(
    "allocator",
    Fault(
        "A01",
        "take hands out the block that was freed first",
        ("ledger",),
        line(POOL, "take", "_blank.pop()", "_blank.pop(0)"),
        rules=("10.1", "10.2"),
    ),
    Fault(
        "A02",
        "take returns a block that is still owned",
        ("audit", "ledger"),
        instead(POOL, "take", _takes_an_owned_block),
        rules=("10.4",),
    ),
    Fault(
        "A03",
        "release drops the last block of a table",
        ("audit", "ledger", "drain"),
        line(POOL, "release", "reversed(table)", "reversed(table[:-1])"),
        rules=("4.1",),
    ),
    Fault(
        "A04",
        "release pushes a block twice",
        ("audit", "ledger"),
        line(POOL, "release", "self._blank.append(block)", "self._blank += [block, block]"),
        source="vllm-project/vllm#42571",
        rules=("10.2",),
    ),
    Fault(
        "A05",
        "the third release loses the first block of the table",
        ("audit", "ledger", "drain"),
        instead(POOL, "release", _loses_the_first_of_the_third),
        rules=("4.1",),
        needs="row reused",
    ),
    Fault(
        "A06",
        "release frees a shared block although another table still lists it",
        ("audit", "ledger"),
        line(POOL, "release", "self.references[block] -= 1", "self.references[block] = 0"),
        rules=("4.2",),
        needs="shared",
    ),
    Fault(
        "A07",
        "the free count says 1 when it is 0",
        ("raises",),
        line(POOL, "num_free", "len(self._blank)", "max(1, len(self._blank))"),
        rules=("8.2",),
        needs="pool exhausted",
    ),
    Fault(
        "A08",
        "blocks are rounded down instead of up",
        ("audit", "decisions", "ledger"),
        line(
            "engine.control.limits:Limits", "blocks_for", "-(-tokens // self.block_size)", "tokens // self.block_size"
        ),
        rules=("5.1",),
    ),
    Fault(
        "A09",
        "a table goes back head first",
        ("ledger",),
        line(POOL, "release", "reversed(table)", "list(table)"),
        rules=("4.2",),
    ),
    Fault(
        "A10",
        "the watermark is compared with < instead of <=",
        ("decisions",),
        line(SCHEDULER, "_fits", "unowned <= self.pool", "unowned < self.pool"),
        rules=("8.2",),
    ),
    Fault(
        "A12",
        "the watermark is never waived, so a large request waits for ever",
        ("decisions", "drain"),
        line(SCHEDULER, "_fits", "reserve = 0", "pass"),
        rules=("8.3",),
        needs="watermark waived",
    ),
    Fault(
        "A13",
        "a block is taken in advance for the token after the next",
        ("audit", "decisions"),
        line(
            SCHEDULER,
            "_grow",
            "self.limits.blocks_for(request.num_tokens)",
            "self.limits.blocks_for(request.num_tokens + 1)",
        ),
        rules=("5.1", "6.1"),
    ),
)
