"""GGUF files made to do harm, or cut off: each is refused with a reason, at once and in little memory."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engine.loading import LoadError, load_model
from tests.models import write_gguf

SECONDS, BYTES = 1.0, 50 << 20
F32, Q8_0 = 0, 8
TINY: dict[str, Any] = {"num_layers": 1, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str, code: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", code) + payload


def tensor(name: str, dims: tuple[int, ...], code: int = F32, offset: int = 0, n_dims: int | None = None) -> bytes:
    rank = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, code, offset)


def gguf(
    keys: list[bytes], tensors: list[bytes], *, version: int = 3, n_kv: int | None = None, n_t: int | None = None
) -> bytes:
    counts = (len(tensors) if n_t is None else n_t, len(keys) if n_kv is None else n_kv)
    body = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(256)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "not gguf": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "version 1": (gguf([], [], version=1), "version is 1"),
    "big endian": (gguf([], [], version=3 << 24), "big-endian"),
    "key length 2^48": (gguf([text("", 1 << 48)], []), "at most 65535"),
    "string length 2^63": (gguf([key("a", 8, text("", 1 << 63))], []), "'a' needs"),
    "key count 2^62": (gguf([], [], n_kv=1 << 62), "keys needs"),
    "tensor count 2^60": (gguf([], [], n_t=1 << 60), "tensors needs"),
    "rank 10^6": (gguf([], [tensor("x", (8,), n_dims=10**6)]), "has 1000000 dimensions"),
    "rank 0": (gguf([], [tensor("x", ())]), "has 0 dimensions"),
    "product wraps": (gguf([], [tensor("x", (1 << 32, 1 << 32, 1 << 32))]), "more than the whole file"),
    "product wraps to little": (gguf([], [tensor("x", ((1 << 63) + 4, 2))]), "more than the whole file"),
    "dimension 0": (gguf([], [tensor("x", (0, 4))]), "dimensions (0, 4)"),
    "row not a block": (gguf([], [tensor("x", (33, 2), Q8_0)]), "multiple of 32"),
    "alignment 0": (gguf([key("general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment is 0"),
    "alignment 3": (gguf([key("general.alignment", 4, struct.pack("<I", 3))], []), "general.alignment is 3"),
    "alignment a string": (gguf([key("general.alignment", 8, text("x"))], []), "general.alignment is 'x'"),
    "offset past the end": (gguf([], [tensor("x", (8,), offset=1 << 40)]), "beyond the end"),
    "offset wraps": (gguf([], [tensor("x", (8,), offset=(1 << 64) - 32)]), "beyond the end"),
    "offset unaligned": (gguf([], [tensor("x", (8,), offset=4)]), "not a multiple of 32"),
    "overlap": (gguf([], [tensor("x", (16,)), tensor("y", (16,), offset=32)]), "'x' and 'y' overlap"),
    "unknown type": (gguf([], [tensor("x", (8,), 4711)]), "unknown quantisation type 4711"),
    "duplicate tensor": (gguf([], [tensor("x", (8,)), tensor("x", (8,), offset=32)]), "'x' appears twice"),
    "duplicate key": (gguf([key("a", 0, b"1"), key("a", 0, b"2")], []), "'a' appears twice"),
    "unknown value type": (gguf([key("a", 77, b"")], []), "unknown value type 77"),
    "array of 2^61 strings": (gguf([key("a", 9, struct.pack("<IQ", 8, 1 << 61))], []), "'a' needs"),
    "array of 2^61 floats": (gguf([key("a", 9, struct.pack("<IQ", 6, 1 << 61))], []), "'a' needs"),
    "array string past the end": (gguf([key("a", 9, struct.pack("<IQ", 8, 1) + text("", 1 << 50))], []), "item 0"),
    "arrays without end": (gguf([key("a", 9, struct.pack("<IQ", 9, 1) * 200)], []), "nests arrays"),
    "key not UTF-8": (gguf([key("a", 8, text(b"\xff\xfe"))], []), "not UTF-8"),
    "item not UTF-8": (gguf([key("a", 9, struct.pack("<IQ", 8, 1) + text(b"\xff"))], []), "item 0"),
    "no architecture": (gguf([], []), "architecture is None"),
    "mamba": (gguf([key("general.architecture", 8, text("mamba"))], []), "llama, qwen2, qwen3"),
    "part of a split": (
        gguf([key("split.count", 2, struct.pack("<H", 3)), key("general.architecture", 8, text("llama"))], []),
        "split GGUF",
    ),
}


def refused(path: Path) -> str:
    """Loads ``path`` under both limits and returns the reason."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(LoadError) as caught:
            load_model(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < SECONDS
    assert peak < BYTES
    return str(caught.value)


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first load imports the gguf package, which is not what the limits are about."""
    load_model(write_gguf(tmp_path_factory.mktemp("warm") / "warm.gguf"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message = refused(path)
    assert reason in message
    assert str(path) in message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", **TINY).read_bytes()
    path = tmp_path / "cut.gguf"
    started = time.perf_counter()
    cuts = range(0, len(whole), 100)
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(LoadError):
            load_model(path)
    assert (time.perf_counter() - started) / len(cuts) < SECONDS / 10
    path.write_bytes(whole)
    load_model(path)


def test_a_file_with_changed_bytes_loads_or_is_refused_but_never_crashes(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "whole.gguf", **TINY).read_bytes())
    header_end = 14_000
    rng = random.Random(7)
    path, refusals = tmp_path / "changed.gguf", 0
    for _ in range(250):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(header_end)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(changed)
        try:
            load_model(path)
        except LoadError:
            refusals += 1
    assert refusals > 30
