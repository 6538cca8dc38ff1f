"""Which graphs suit the model, the machine and the settings; and what was decided about them, told apart from what happens.

Decided at start, and published as a promise: the shapes, the bounds and which of them is the ceiling, what recording cost.
Counted while running, and published as readings: replays by shape, eager steps by reason, padded rows, graphs recorded.
"""

from __future__ import annotations

from typing import Any

from engine.compute.captures import Bounds, CaptureList, Room, TooMany, captures_gap, plan_captures
from engine.compute.recording import Recorded
from engine.config import ConfigError, EngineConfig
from engine.loading.model import LoadedModel
from engine.native.runner import native_rows

MEMORY = {"cpu": 256 * 2**20, "cuda": 2**30}  # bytes that recorded graphs may hold, unless told otherwise
CALLS = {"native": (4, 12), "torch": (10, 25)}  # most kernel calls of a step: outside the layers, and in each of them
CALL_BYTES = {"cpu": 1024, "cuda": 4096}  # of one recorded call; on CUDA an assumption, and what it cost is measured
_FIELD = {"bytes": "capture_memory", "graphs": "max_captures"}


def capture_budget(config: EngineConfig, device: str) -> int:
    """Bytes that recorded graphs may hold; none where nothing is recorded. The KV pool is sized from what that leaves."""
    if config.enforce_eager:
        return 0
    return MEMORY[device] if config.capture_memory is None else config.capture_memory * 2**20


def capture_list(config: EngineConfig, model: LoadedModel, *, longest: int, device: str, compute: str) -> CaptureList:
    """``longest``: tokens of the longest sequence that can exist. Raises ``ConfigError`` where the bounds leave nothing."""
    if config.enforce_eager:
        return CaptureList((), Bounds(0, 0, 0, 0), 0)
    outside, each_layer = CALLS.get(compute, CALLS["torch"])
    room = Room(
        bytes=capture_budget(config, device),
        each=(outside + each_layer * model.config.num_layers) * CALL_BYTES[device],
        graphs=config.max_captures,
    )
    # A native tape is small and reads lengths when it runs, so few rows are padded, and one width does.
    rows = (
        native_rows(config.max_num_seqs) if config.capture_rows is None and compute == "native" else config.capture_rows
    )
    try:
        return plan_captures(
            rows,
            config.capture_widths,
            max_num_seqs=config.max_num_seqs,
            max_model_len=longest,
            block_size=config.block_size,
            longest=config.capture_max_len,
            room=room,
            one_width=compute == "native",
        )
    except TooMany as error:
        field = _FIELD[error.bound]
        value = f"{room.bytes // 2**20} MiB" if error.bound == "bytes" else str(room.graphs)
        advice = "name fewer capture_rows, or use enforce_eager"
        raise ConfigError(field, f"{field} is {value}: {error}; {advice}") from None


def describe(
    captures: CaptureList, recorded: Recorded, *, max_num_seqs: int, longest: int, block_size: int
) -> dict[str, Any]:
    """The promise, as plain values. ``ceiling`` and ``bounds`` in blocks, ``bytes`` as measured after recording."""
    gap = captures_gap(captures.shapes, max_num_seqs=max_num_seqs, max_model_len=longest, block_size=block_size)
    return {
        "rows": sorted({rows for rows, _ in captures.shapes}),
        "widths": sorted({width for _, width in captures.shapes}),
        "ceiling": captures.bounds.ceiling,
        "bound_by": captures.bounds.bound_by if captures.shapes else "enforce_eager",
        "bounds": {
            "context": captures.bounds.context,
            "flag": captures.bounds.flag,
            "bytes": captures.bounds.bytes,
            "graphs": captures.bounds.graphs,
        },
        "graphs": recorded.graphs,
        "seconds": recorded.seconds,
        "bytes": recorded.bytes,
        "estimated_bytes": captures.estimated_bytes,
        "gap": gap,
    }
