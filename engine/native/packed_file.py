"""A file of packed weights, to be mapped into memory and computed from as it lies.

    head     64 bytes: magic, version, where the index is and its SHA-256
    tensors  each at a multiple of 64 bytes, which is what the kernels' loads like best
    index    JSON: the key that the file was made for; of each tensor name, type, layout, sizes, place and checksum

The index is written last and the head after it, under a name that nobody looks for; only a whole file gets its name.
Whatever does not fit, down to one byte of a tensor, makes the file ``Damaged``: then it is made anew.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import torch
from torch import Tensor

from engine.native.library import ALIGNMENT, TYPES, Library, Packed, can_pack, packed_bytes
from engine.native.tensors import JOINED, Linear, joined

VERSION = 2
_MAGIC = b"lockstep"
_HEAD = struct.Struct("<8sIIQQ32s")  # magic, version, 0, offset and size of the index, its digest
_VECTOR = "vector"  # the type of what is no weight: norms and biases, fp32
_MAX_INDEX = 2**26


class Damaged(Exception):
    """Not a whole file of packed weights for this key; the message says what is wrong."""


@attrs.frozen
class _Entry:
    """``n`` rows of ``k`` numbers; of a vector, n numbers, which have no layout."""

    type: str
    layout: str
    n: int
    k: int
    at: int
    bytes: int
    sum: int


class Writer:
    """Appends tensors to ``file``, which is empty; ``close`` makes it whole. Raises ``OSError``."""

    def __init__(self, file: BinaryIO, key: str, library: Library) -> None:
        self._file, self._key, self._library = file, key, library
        self._entries: dict[str, _Entry] = {}
        self._at = ALIGNMENT
        file.write(bytes(ALIGNMENT))

    def add(self, name: str, made: Packed | Tensor) -> None:
        if isinstance(made, Packed):
            kind, layout, n, k, data = made.type, made.layout, made.n, made.k, made.data
        else:
            kind, layout, n, k, data = _VECTOR, "", len(made), 1, made.view(torch.uint8)
        total = self._library.checksum(data)
        self._entries[name] = _Entry(kind, layout, n, k, self._at, data.nbytes, total)
        self._file.write(data.numpy().data)
        pad = -data.nbytes % ALIGNMENT
        self._file.write(bytes(pad))
        self._at += data.nbytes + pad

    def close(self) -> None:
        entries = {name: attrs.astuple(entry) for name, entry in self._entries.items()}
        index = json.dumps({"key": self._key, "tensors": entries}, separators=(",", ":")).encode()
        self._file.write(index)
        self._file.seek(0)
        self._file.write(_HEAD.pack(_MAGIC, VERSION, 0, self._at, len(index), hashlib.sha256(index).digest()))
        self._file.flush()
        os.fsync(self._file.fileno())


class FileTensors:
    """The tensors of one file, as ``Tensors``. They stay mapped for as long as one of them is held."""

    def __init__(self, path: Path, key: str, library: Library, shapes: Mapping[str, Sequence[int]]) -> None:
        """Checks all of it; ``shapes`` are those of the model's tensors. Raises ``Damaged`` or ``OSError``."""
        self._library, self._shapes = library, shapes
        self._memory = _mapped(path)
        self._entries = dict(_index(self._memory, self._memory.nbytes, key))
        for name, entry in self._entries.items():
            self._check(name, entry, self._memory.nbytes)

    def __len__(self) -> int:
        return len(self._entries)

    def vector(self, name: str) -> Tensor:
        entry = self._find(name, _VECTOR)
        return self._bytes(entry).view(torch.float32)

    def packed(self, name: str) -> Packed:
        found = self._packed(name)
        if found.type not in TYPES:
            raise Damaged(f"{name} is of type {found.type}")
        return found

    def linear(self, *names: str) -> Linear:
        return joined(self._parts(list(names)))

    def _parts(self, rest: list[str]) -> Iterator[tuple[Packed, Tensor | None]]:
        """The longest runs of names that were packed together."""
        while rest:
            ends = (end for end in range(len(rest), 0, -1) if f"{JOINED.join(rest[:end])}.weight" in self._entries)
            end = next(ends, None)
            if end is None:
                raise Damaged(f"{rest[0]}.weight is not in it")
            name = JOINED.join(rest[:end])
            yield (
                self._packed(f"{name}.weight"),
                self.vector(f"{name}.bias") if f"{name}.bias" in self._entries else None,
            )
            rest = rest[end:]

    def _packed(self, name: str) -> Packed:
        entry = self._find(name)
        return Packed(entry.type, entry.n, entry.k, self._bytes(entry), entry.layout)

    def _find(self, name: str, kind: str | None = None) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or (kind is None) == (entry.type == _VECTOR):
            raise Damaged(f"{name} is not in it")
        return entry

    def _bytes(self, entry: _Entry) -> Tensor:
        return self._memory[entry.at : entry.at + entry.bytes]

    def _check(self, name: str, entry: _Entry, size: int) -> None:
        if (entry.n, entry.k) != self._size(name):
            raise Damaged(f"{name} has {entry.n} rows of {entry.k}, unlike the model's")
        layout = self._library.layouts.get(entry.type, "")
        if entry.layout != layout:
            raise Damaged(f"{name} is packed as {entry.layout!r}, but the kernels read {layout!r}")
        inside = ALIGNMENT <= entry.at <= size - entry.bytes and entry.at % ALIGNMENT == 0
        if not inside or entry.bytes != self._wanted(entry):
            raise Damaged(f"{name} has {entry.bytes} bytes at {entry.at} of {size}")
        if self._library.checksum(self._bytes(entry)) != entry.sum:
            raise Damaged(f"the checksum of {name} is wrong")

    def _wanted(self, entry: _Entry) -> int:
        if entry.type == _VECTOR:
            return 4 * entry.n
        return packed_bytes(entry.type, entry.n, entry.k) if can_pack(entry.type, entry.k) else -1

    def _size(self, name: str) -> tuple[int, int] | None:
        """Rows, all parts together, and numbers in each; ``None`` for what is no tensor of the model."""
        parts, _, kind = name.rpartition(".")
        shapes = [tuple(self._shapes.get(f"{part}.{kind}", ())) for part in parts.split(JOINED)]
        widths = {shape[1:] for shape in shapes}
        if not all(shapes) or len(widths) != 1:
            return None
        return sum(shape[0] for shape in shapes), next(iter(widths.pop()), 1)


def _mapped(path: Path) -> Tensor:
    """The file as uint8. Raises ``Damaged`` or ``OSError``."""
    # Opened without waiting for the other end, which a pipe in the place of the file would have.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("it is no regular file")
        if status.st_size < ALIGNMENT:
            raise Damaged(f"has {status.st_size} bytes")
        # A private mapping, since torch has no read-only memory. Nothing here writes, so pages are those of the file for all
        # processes: a file rewritten in place would change live weights. Writers only ever replace it whole.
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _index(memory: Tensor, size: int, key: str) -> Iterator[tuple[str, _Entry]]:
    magic, version, _, at, length, digest = _HEAD.unpack(bytes(memory[: _HEAD.size].tolist()))
    if magic != _MAGIC or version != VERSION:
        raise Damaged(f"begins with {magic!r}, version {version}")
    if length > _MAX_INDEX or at + length != size:
        raise Damaged(f"the index is at {at} with {length} bytes, but the file has {size}")
    index = memory[at:].numpy().tobytes()
    if hashlib.sha256(index).digest() != digest:
        raise Damaged("the digest of the index is wrong")
    try:
        found: Any = json.loads(index)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the index is no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("tensors"), dict):
        raise Damaged("the index names no tensors")
    if found.get("key") != key:
        raise Damaged("it was made for another key")
    for name, fields in found["tensors"].items():
        if not isinstance(fields, list) or [type(field) for field in fields] != [str, str, *[int] * 5]:
            raise Damaged(f"the index says of {name!r:.80}: {fields!r:.80}")
        yield name, _Entry(*fields)
