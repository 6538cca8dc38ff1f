"""The command that says what host work runs while the device computes: each part is where it says, and what grew is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import server.metrics
from ci.hostshare import SERVED, HostShare, measure, table
from ci.hosttime import attach
from server.live import Generation
from tests.native.test_native_hosttime import STEPS, burn, small_engine


def test_shares_follow_from_the_parts() -> None:
    engine = small_engine()
    watch = attach(engine)
    found = [asyncio.run(measure(engine, watch, rows, steps=STEPS)) for rows in (1, 4)]
    for one in found:
        assert set(one.parts) == set(SERVED)
        assert all(value > 0 for value in one.parts.values())
        assert 0 < one.share < one.share_without_overlap < 1
    assert table(found).splitlines()[-1].startswith("| 4 | ")
    parts = dict.fromkeys(SERVED, 0.0) | {"commit": 1.0, "hand over": 1.0, "meanwhile": 2.0, "native": 6.0}
    assert (HostShare(1, parts).share, HostShare(1, parts).share_without_overlap) == (0.25, 0.4)


@pytest.mark.parametrize(
    ("part", "owner", "name"),
    [
        ("hand over", server.metrics, "_kept"),
        ("meanwhile", server.metrics.Metrics, "_observe"),
        ("meanwhile", Generation, "arrive"),
        ("commit", "scheduler", "_publish"),
    ],
)
def test_what_became_slow_is_named(monkeypatch: pytest.MonkeyPatch, part: str, owner: Any, name: str) -> None:
    engine = small_engine()
    slowed: Any = getattr(engine, owner) if isinstance(owner, str) else owner
    monkeypatch.setattr(slowed, name, _slow(getattr(slowed, name)))
    parts = asyncio.run(measure(engine, attach(engine), 1, steps=STEPS)).parts
    assert parts[part] >= 4.0
    assert max(parts, key=lambda key: parts[key]) == part


def _slow(inner: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        burn(0.004)
        return inner(*arguments)

    return slow


def test_steps_that_did_something_else_are_not_counted() -> None:
    engine = small_engine()  # of four rows
    with pytest.raises(RuntimeError, match="only 0 of 12 steps decoded 5 rows"):
        asyncio.run(measure(engine, attach(engine), 5, steps=STEPS))
