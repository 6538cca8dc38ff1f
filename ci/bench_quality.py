"""Perplexity and greedy agreement of this engine against ``transformers`` on the dequantised weights, without the speed.

    python ci/bench_quality.py                          every weight type
    python ci/bench_quality.py --type Q8_0 --engine compute=int8

Needs the transformers environment that `make peers` makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from server.bench.offline import quality, report
from server.bench.offline.contestants import ready
from server.bench.offline.models import KINDS, files_of, prepare
from server.bench.requests import bundled

app = App(name="bench_quality", help=__doc__, result_action="return_value")


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value`` as fields of ``EngineConfig``; numbers and booleans by how they are written."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"--engine is {pair!r}, but must be NAME=VALUE")
        words = {"true": True, "false": False}
        found[name.replace("-", "_")] = words.get(value, int(value) if value.lstrip("-").isdigit() else value)
    return found


@app.default
def main(
    *,
    types: Annotated[tuple[str, ...], Parameter(name="--type", negative_iterable="")] = ("as shipped", *KINDS),
    engine: Annotated[tuple[str, ...], Parameter(negative_iterable="", help="NAME=VALUE of EngineConfig.")] = (),
    threads: int = 2,
    windows: int | None = None,
    peers: Path = Path(".peers"),
    json_to: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Exit status: 0 when every difference is below 1e-3 relative, 1 otherwise, 2 for wrong options."""
    console, place = Console(), peers.absolute()
    try:
        if not ready(place, "transformers"):
            raise ValueError("the transformers environment is missing: make peers PEERS=transformers")
        files = prepare(files_of(None, place / "models"), console.print)
        found = quality.qualities(
            files,
            place,
            threads,
            bundled()["batch16"],
            console.print,
            kinds=types,
            engine=settings(engine),
            windows=windows,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report.show_quality(console, found)
    if json_to is not None:
        json_to.write_text(json.dumps([one.plain() for one in found], indent=1), encoding="utf-8")
    return 1 if any(abs(one.difference) >= quality.ALLOWED for one in found) else 0


if __name__ == "__main__":
    sys.exit(app())
