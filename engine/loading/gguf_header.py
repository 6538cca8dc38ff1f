"""The header of a GGUF file, read by a parser that believes nothing: every length is checked before it is used.

Layout (little endian)::

    magic "GGUF" | version u32 | n_tensors u64 | n_kv u64
    n_kv      x  key string | type u32 | value          string = length u64, bytes
    n_tensors x  name string | n_dims u32 | dims u64 * n_dims (fastest first) | type u32 | offset u64
    padding to general.alignment | tensor data, at the offsets

A count is compared with the bytes left before anything is allocated for it, so a hostile file costs no more memory than
its own size. Tensor sizes, alignment, overlap and the end of the file are all checked here, before a tensor is read.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import attrs
import numpy as np

from engine.loading.model import LoadError

MAX_KEY, MAX_TENSOR_NAME, MAX_DIMS, MAX_ARRAY_DEPTH = 65_535, 256, 4, 3
_SCALARS: dict[int, tuple[struct.Struct, str]] = {
    code: (struct.Struct("<" + fmt), dtype)
    for code, fmt, dtype in (
        (0, "B", "u1"), (1, "b", "i1"), (2, "H", "<u2"), (3, "h", "<i2"), (4, "I", "<u4"), (5, "i", "<i4"),
        (6, "f", "<f4"), (7, "?", "?"), (10, "Q", "<u8"), (11, "q", "<i8"), (12, "d", "<f8"),
    )
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@attrs.frozen
class TensorInfo:
    """``dims`` in torch's order (slowest first); ``offset`` from the start of the file, ``nbytes`` of stored data."""

    name: str
    dims: tuple[int, ...]
    type_code: int
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        rows = int(np.prod(self.dims[:-1], dtype=object)) if len(self.dims) > 1 else 1
        return self.nbytes // rows


@attrs.frozen
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class Strings(Sequence[str]):
    """An array of strings in the bytes of the file, each decoded when it is asked for.

    A vocabulary and its merges are a hundred thousand strings that nobody needs once there is a tokenizer. As Python objects they
    would leave holes behind, between what was made while they lived, which the interpreter does not give back.
    """

    def __init__(self, raw: bytes, ends: Sequence[int]) -> None:
        self._raw, self._ends = raw, ends  # of each string; its length stands before it

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return list(self)[index]
        index = range(len(self))[index]
        return self._raw[(self._ends[index - 1] if index else 0) + 8 : self._ends[index]].decode()

    def __iter__(self) -> Iterator[str]:
        raw, start = self._raw, 8
        for end in self._ends:
            yield raw[start:end].decode()
            start = end + 8


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def fail(self, message: str) -> LoadError:
        return LoadError(f"{self.path}: {message} (at byte {self.at} of {self.size})")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, but only {self.size - self.at} are left; is it truncated?")

    def number(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        value = layout.unpack_from(self.data, self.at)[0]
        self.at += layout.size
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number(_U64, f"the length of {what}")
        if limit is not None and length > limit:
            raise self.fail(f"{what} is {length} bytes long, but at most {limit} are allowed")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from None

    def value(self, code: int, what: str, depth: int = 0) -> Any:
        if code in _SCALARS:
            return self.number(_SCALARS[code][0], what)
        if code == _STRING:
            return self.string(what)
        if code != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {code}")
        if depth == MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        item, count = self.number(_U32, f"the type of {what}"), self.number(_U64, f"the length of {what}")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item][1])
            self.need(count * dtype.itemsize, what)
            start, self.at = self.at, self.at + count * dtype.itemsize
            return np.frombuffer(self.data[start : self.at], dtype)
        self.need(count * (8 if item == _STRING else 12), what)
        if item == _STRING:
            return self.strings(count, what)
        return [self.value(item, what, depth + 1) for _ in range(count)]

    def strings(self, count: int, what: str) -> Strings:
        """``string`` a hundred thousand times, without its calls; what is read is checked here and kept as it is."""
        data, first, size, unpack = self.data, self.at, self.size, _U64.unpack_from
        at, ends = first, array("q")
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                if end > size:
                    self.at = at
                    raise self.fail(f"item {len(ends)} of {what} ends after the file; is it truncated?")
                data[at + 8 : end].decode()
                ends.append(end - first)
                at = end
        except (struct.error, UnicodeDecodeError) as error:
            self.at = at
            raise self.fail(f"item {len(ends)} of {what} is broken: {error}") from None
        self.at = at
        return Strings(data[first:at], ends)


def read_header(path: Path, block_sizes: Mapping[int, tuple[int, int]]) -> GGUFHeader:
    """Reads and checks everything but the tensor data. ``block_sizes``: type code -> (elements, bytes) of one block.
    Raises ``LoadError`` with the byte at which the file goes wrong."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise LoadError(f"{path}: {size} bytes are too few for a GGUF header; is it truncated?")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data, size), block_sizes)
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}") from None


def _parse(cursor: _Cursor, block_sizes: Mapping[int, tuple[int, int]]) -> GGUFHeader:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.fail(f"not a GGUF file: it begins with {magic!r}")
    cursor.at = 4
    version = cursor.number(_U32, "the version")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise cursor.fail(f"GGUF version is {version}{hint}, but must be 2 or 3")
    n_tensors, n_kv = cursor.number(_U64, "the tensor count"), cursor.number(_U64, "the key count")
    cursor.need(n_kv * 13, f"a list of {n_kv} keys")
    metadata: dict[str, Any] = {}
    for _ in range(n_kv):
        key = cursor.string("a key", MAX_KEY)
        if key in metadata:
            raise cursor.fail(f"key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.number(_U32, f"the type of {key!r}"), f"{key!r}")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, but must be a power of two up to {1 << 20}")
    cursor.need(n_tensors * 32, f"a list of {n_tensors} tensors")
    found = [_tensor(cursor, block_sizes) for _ in range(n_tensors)]
    start = -(-cursor.at // alignment) * alignment
    return GGUFHeader(cursor.path, metadata, _place(cursor, found, start, alignment))


def _tensor(cursor: _Cursor, block_sizes: Mapping[int, tuple[int, int]]) -> TensorInfo:
    name = cursor.string("a tensor name", MAX_TENSOR_NAME)
    n_dims = cursor.number(_U32, f"the rank of {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions, but must have 1 to {MAX_DIMS}")
    dims = tuple(cursor.number(_U64, f"the shape of {name!r}") for _ in range(n_dims))
    code = cursor.number(_U32, f"the type of {name!r}")
    offset = cursor.number(_U64, f"the offset of {name!r}")
    if code not in block_sizes:
        raise cursor.fail(f"tensor {name!r} has the unknown quantisation type {code}")
    elements, block_bytes = block_sizes[code]
    if min(dims) < 1 or dims[0] % elements:
        raise cursor.fail(f"tensor {name!r} has dimensions {dims}; the first must be a multiple of {elements}")
    count = 1
    for dim in dims:
        count *= dim
    nbytes = count // elements * block_bytes
    if nbytes > cursor.size:
        raise cursor.fail(f"tensor {name!r} with dimensions {dims} needs {nbytes} bytes, more than the whole file")
    return TensorInfo(name, dims[::-1], code, offset, nbytes)


def _place(cursor: _Cursor, found: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
    """Names to tensors with offsets from the start of the file; refuses overlaps and ends beyond the file."""
    placed: dict[str, TensorInfo] = {}
    for info in found:
        if info.name in placed:
            raise cursor.fail(f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            raise cursor.fail(f"tensor {info.name!r} is at offset {info.offset}, not a multiple of {alignment}")
        end = start + info.offset + info.nbytes
        if end > cursor.size:
            raise cursor.fail(f"tensor {info.name!r} ends at byte {end}, beyond the end of the file; is it truncated?")
        placed[info.name] = attrs.evolve(info, offset=start + info.offset)
    inner = sorted(placed.values(), key=lambda info: info.offset)
    for one, two in itertools.pairwise(inner):
        if one.offset + one.nbytes > two.offset:
            raise cursor.fail(f"tensors {one.name!r} and {two.name!r} overlap")
    return placed
