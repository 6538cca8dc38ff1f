"""The server's own log format in every test, whatever the one before set: the library's default shows local variables, and is slow."""

from __future__ import annotations

import pytest

from server import logs


@pytest.fixture(autouse=True)
def _logs() -> None:
    logs.configure("info", "text")
