"""Logs to stderr, as text or as one JSON object a line. Nothing that is logged contains prompt or answer text."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def printable(text: str) -> str:
    """``text`` from a stranger as printable ASCII: no line breaks and no terminal escapes get into the log."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


class _Told(logging.Handler):
    """What the engine tells the standard library's logger, as a line like all others, to what stderr is then."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage())


def configure(level: str, form: str) -> None:
    """Sets structlog and the standard library's root logger (uvicorn's warnings) for the whole process."""
    number = getattr(logging, level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        shared += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # A plain traceback: the pretty one shows local variables, and prompts are among them.
        shared.append(
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        )
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),  # whatever stderr is when a line is written
    )
    logging.basicConfig(stream=sys.stderr, level=max(number, logging.WARNING), format="%(levelname)s %(message)s")
    engine = logging.getLogger("engine")
    engine.handlers, engine.propagate = [_Told()], False
    engine.setLevel(number)
