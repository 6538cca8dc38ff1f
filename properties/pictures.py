"""``--html`` and ``--perfetto``: a run as a page to look at and as a trace to open in Perfetto, beside what is printed."""

from __future__ import annotations

import argparse
import json

from engine.trace import Workload
from properties.lockstep import Run


def draw(options: argparse.Namespace, workload: Workload, run: Run, command: str) -> dict[str, str]:
    """Writes what was asked for. Returns what was written where, by option name. Raises ``OSError``."""
    written = {}
    if options.html is not None:
        from properties.page import page  # with it comes jinja2, which nothing else here needs

        options.html.write_text(page(workload, run, command), encoding="utf-8")
        written["html"] = str(options.html)
    if options.perfetto is not None:
        from properties.perfetto import trace

        options.perfetto.write_text(json.dumps(trace(workload, run), indent=1), encoding="utf-8")
        written["perfetto"] = str(options.perfetto)
    return written
