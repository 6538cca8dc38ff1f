"""An event loop without files, sockets and clock: it runs what is ready until nothing is, and returns.

So the schedule of a whole server and all its clients is one, the same every time. Time stands still: no timer ever fires.
"""

from __future__ import annotations

import asyncio
from typing import Any


class _NoFiles:
    def select(self, timeout: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class QuietLoop(asyncio.BaseEventLoop):
    """``failures``: what tasks raised that nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoFiles()
        self.failures: list[str] = []
        self.set_exception_handler(lambda _, context: self.failures.append(_told(context)))

    def settle(self) -> None:
        """Returns when no callback is ready: every task has ended or waits for somebody outside."""
        while True:
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:  # type: ignore[attr-defined]
                return

    def time(self) -> float:
        return 0.0

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        """Whoever calls from another thread would have to be woken here; there is no other thread."""


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message')}" + (f": {type(error).__name__}: {error}" if error is not None else "")
