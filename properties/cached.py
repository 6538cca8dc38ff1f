"""What the engine's published blocks hold, in the specification's words: (salt, all tokens from position 0 on).

The engine names a block by a hash chained over its parent; the specification knows no hashes. So hashes are translated by
following the chain: what a parent held was seen when it was published, and is remembered here, since it may be evicted before
its child. A hash that stands for two contents, as when it leaves out its parent or its salt, is told as such.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.control.prefix import BlockKey, root
from engine.control.record import Ledger
from engine.trace import Submit, Workload

Content = tuple[str | None, tuple[int, ...]]


def salts_of(workload: Workload) -> list[str | None]:
    """The salts that a workload uses, none included."""
    return [None, *sorted({event.salt for event in workload.events if isinstance(event, Submit) and event.salt})]


class Contents:
    """``salts``: all that a run may use, None for no salt."""

    def __init__(self, salts: Iterable[str | None]) -> None:
        self._known: dict[bytes, Content] = {root(salt): (salt, ()) for salt in salts}
        self._named: dict[int, tuple[BlockKey, object]] = {}  # block: its key, and the name of that

    def name(self, ledger: Ledger) -> dict[int, object]:
        """Content of every published block; the key itself where its chain leads nowhere."""
        named: dict[int, object] = {}
        waiting: dict[int, BlockKey] = {}
        for block, key in ledger.published.items():
            seen = self._named.get(block)
            if seen is not None and seen[0] is key:  # the very same value, so the same name
                named[block] = seen[1]
            else:
                waiting[block] = key
        while waiting:
            ready = {block: key for block, key in waiting.items() if key.parent in self._known}
            if not ready:
                return named | dict(waiting)
            for block, key in ready.items():
                del waiting[block]
                named[block] = self._learn(key)
                self._named[block] = key, named[block]
        return named

    def _learn(self, key: BlockKey) -> object:
        salt, before = self._known[key.parent]
        content = (salt, (*before, *key.tokens))
        if self._known.setdefault(key.digest, content) != content:
            return (key.digest.hex(), content, self._known[key.digest])
        return content
