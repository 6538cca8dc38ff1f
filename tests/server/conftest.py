"""The server's own log format, set anew for each test: the library's default shows local variables in tracebacks, and is slow."""

from __future__ import annotations

import pytest

from server import logs


@pytest.fixture(autouse=True)
def _logs() -> None:
    logs.configure("info", "text")
