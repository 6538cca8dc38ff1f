"""How near a decode step comes to what the machine allows, for each weight type.

At 1 row the limit is reading the weights and the row's keys and values once; at 16 and 128 rows it is multiplying. The
share is the limit's time over the step's, sampling and scheduling included. A limit is the fastest reading of all that were
taken before and after the steps, so a share above 1 says that the machine was disturbed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from engine.loading.model import ModelConfig, RopeScaling
from server.bench.offline.limits import Limits, best_of, compiled
from server.bench.offline.models import KINDS, Files
from server.bench.offline.steps import StepTime, work
from server.bench.offline.worker import ROOT, WorkerFailed, environment

POINTS = ((1, 128, 32), (16, 128, 24), (128, 32, 8))  # rows, context, steps


@attrs.frozen
class Share:
    """``times`` in seconds and ``shares`` of the limit, by rows. ``weight_mb``: packed, as the kernels read them."""

    kind: str
    weight_mb: float
    times: Mapping[int, float]
    shares: Mapping[int, float]

    @property
    def impossible(self) -> tuple[int, ...]:
        """The rows whose step was faster than the limit allows: there the limit was measured too low."""
        return tuple(sorted(rows for rows, share in self.shares.items() if share > 1))


def shares(files: Files, threads: int, say: Callable[[str], None]) -> tuple[Limits, list[Share]]:
    """Measures the machine, then the shipped file and every type in KINDS. Raises ``BuildError``, ``WorkerFailed``."""
    models = {"as shipped": files.shipped, **{kind: files.gguf(kind) for kind in reversed(KINDS)}}
    heads: dict[str, dict[str, Any]] = {}
    times: dict[str, list[StepTime]] = {kind: [] for kind in models}
    readings: list[Limits] = []
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        for kind, path in models.items():
            say(f"decode steps with {kind} weights, and the machine's limits around them")
            engine = {"model": str(path), "threads": threads, "compute": "native"}
            lines = measured(engine, decode=POINTS, limits=program)
            heads[kind] = next(lines)
            for line in lines:
                if "decode" in line:
                    times[kind].append(StepTime(**line["decode"]))
                else:
                    readings.append(limits_of(line["limits"]))
    limits = best_of(readings)
    return limits, [share_of(kind, heads[kind], times[kind], limits) for kind in models]


def share_of(kind: str, head: Mapping[str, Any], times: Sequence[StepTime], limits: Limits) -> Share:
    size = head["weight_bytes"]
    config = config_of(head["config"])
    found = {}
    for time in times:
        least = work(config, size, head["kv_bytes_per_token"], time.context)
        bound = (
            least.memory_seconds(1, limits.read(size))
            if time.rows == 1
            else least.arithmetic_seconds(time.rows, limits.multiply(tiles=head.get("on_tiles", False)))
        )
        found[time.rows] = bound / time.wall
    return Share(kind, size / 1e6, {time.rows: time.wall for time in times}, found)


def config_of(values: Mapping[str, Any]) -> ModelConfig:
    """``attrs.asdict`` of a configuration, back."""
    scaling = values.get("rope_scaling")
    tuples = {"sliding_windows": tuple(values.get("sliding_windows", ()))}
    return ModelConfig(**{**values, **tuples, "rope_scaling": RopeScaling(**scaling) if scaling else None})


def limits_of(values: Mapping[str, Any]) -> Limits:
    """``attrs.asdict`` of limits, back: JSON has made text of the sizes."""
    return Limits(**{**values, "read_gb_s": {int(size): rate for size, rate in values["read_gb_s"].items()}})


def measured(
    engine: Mapping[str, Any],
    *,
    decode: Sequence[Sequence[int]] = (),
    prefill: Sequence[int] = (),
    limits: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """The lines of drive_steps.py. Raises ``WorkerFailed`` with what it said."""
    points = [list(point) for point in decode]
    more = {} if limits is None else {"limits": str(limits)}
    asked = json.dumps({"engine": dict(engine), "decode": points, "prefill": list(prefill), **more})
    command = [sys.executable, "-m", "server.bench.offline.drive_steps", asked]
    threads = int(engine.get("threads") or 1)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(threads)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield json.loads(line)
        said = process.stderr.read().strip().splitlines()
        if process.wait() != 0:
            raise WorkerFailed(f"measuring steps failed: {said[-1] if said else 'it said nothing'}")


def plain(limits: Limits, found: Sequence[Share]) -> dict[str, Any]:
    told = [attrs.asdict(share) | {"above_limit": list(share.impossible)} for share in found]
    return {"limits": attrs.asdict(limits), "shares": told}
