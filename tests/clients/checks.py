"""What a client's driver notes: how many checks held. Standard library only, since drivers run outside .venv."""

from __future__ import annotations

import json
from typing import Any


class Checks:
    """Counts the checks that held; the first that does not raises ``AssertionError`` that says what was seen."""

    def __init__(self) -> None:
        self.held = 0

    def equal(self, what: str, seen: Any, wanted: Any) -> None:
        if seen != wanted:
            raise AssertionError(f"{what}: {seen!r}, wanted {wanted!r}")
        self.held += 1

    def true(self, what: str, seen: Any) -> None:
        if not seen:
            raise AssertionError(f"{what}: {seen!r}")
        self.held += 1

    def report(self) -> None:
        """The driver's last line, which the test reads."""
        print(json.dumps({"held": self.held}), flush=True)
