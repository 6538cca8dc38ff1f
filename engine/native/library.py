"""The compiled kernels as Python sees them: packing, pools of threads, running a tape.

ctypes drops the interpreter lock for the time of a call, so a running tape holds up nobody.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

TYPES = ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1")  # in the order of the source's enumeration
INTEGER = {"Q8_0": "Q8_0 x int8", "Q4_0": "Q4_0 x int8", "Q4_1": "Q4_1 x int8"}
"""Types for 8-bit activations (integer.h), by the type of the file: the same numbers in another order."""

_NUMBERS = {kind: number for number, kind in enumerate(TYPES)} | {
    kind: 16 + number for number, kind in enumerate(INTEGER.values())
}
_GROUP = 32  # values that share scales, in the types whose name begins with Q
_ROW_BYTES = {"F32": (1, 4), "BF16": (1, 2), "F16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}
_ROW_BYTES |= {INTEGER[kind]: _ROW_BYTES[kind] for kind in INTEGER}
_PANEL = 16  # rows that are packed together, in as many bytes as the file needs for them
_MAX_SIZE = 2**31
ALIGNMENT = 64
WORDS = 32
RECORD = WORDS * 8  # bytes of a call: the kernel's number, then its arguments


@attrs.frozen(eq=False)
class Packed:
    """A weight [n, k] in panels of 16 outputs (product.h), still in the type that it came in.

    ``data``: a vector of uint8 at a multiple of ALIGNMENT, of just the bytes that type and sizes need. ``layout``: how the
    numbers lie in it, in the words of the library that packed it; another build may want as many bytes in another order.
    Raises ``ValueError`` for any other data, and for sizes out of range: a kernel trusts all of it.
    """

    type: str
    n: int
    k: int
    data: Tensor
    layout: str

    def __attrs_post_init__(self) -> None:
        told, data = f"a packed weight {self.type!r} of {self.n} rows of {self.k}", self.data
        if not all(type(size) is int and 1 <= size < _MAX_SIZE for size in (self.n, self.k)):
            raise ValueError(f"{told}: both must be whole numbers in 1..{_MAX_SIZE - 1}")
        if not can_pack(self.type, self.k):
            raise ValueError(f"{told}: types are {', '.join(_NUMBERS)}; k of a Q type is a multiple of {_GROUP}")
        if data.dtype != torch.uint8 or data.dim() != 1 or data.device.type != "cpu" or not data.is_contiguous():
            raise ValueError(
                f"{told}: data is {data.dtype} {tuple(data.shape)} with strides {data.stride()} on {data.device.type}, "
                "but must be a contiguous vector of uint8 on the CPU"
            )
        if data.nbytes != (wanted := packed_bytes(self.type, self.n, self.k)):
            raise ValueError(f"{told}: data has {data.nbytes} bytes, but must have {wanted}")
        if data.data_ptr() % ALIGNMENT:
            raise ValueError(f"{told}: data is at {data.data_ptr()}, but must be at a multiple of {ALIGNMENT}")

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def can_pack(kind: str, k: int) -> bool:
    """Whether rows of ``k`` numbers of this type can be packed as they are."""
    return kind in _NUMBERS and (not kind.startswith("Q") or k % _GROUP == 0)


def packed_bytes(kind: str, n: int, k: int) -> int:
    """Size of a packed weight of one of TYPES, or of INTEGER's; ``Library.packed_bytes`` says what the kernels take it for."""
    per, size = _ROW_BYTES[kind]
    return -(-n // _PANEL) * _PANEL * (k // per * size)


class Library:
    """A shared object that ``build.built`` made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("lockstep_vector_bits", ctypes.c_int, []),
            ("lockstep_tiles", ctypes.c_int, []),
            ("lockstep_layout", ctypes.c_char_p, [size]),
            ("lockstep_packed_bytes", size, [size, size, size]),
            ("lockstep_pack", None, [size, pointer, size, size, pointer]),
            ("lockstep_checksum", ctypes.c_uint64, [pointer, size]),
            ("lockstep_pool", pointer, [ctypes.c_int, pointer]),
            ("lockstep_pinned", ctypes.c_int, [pointer]),
            ("lockstep_close", None, [pointer]),
            ("lockstep_run", size, [pointer, pointer, size]),
        ):
            function = getattr(self._dll, name)
            function.restype, function.argtypes = result, arguments
        tiles = int(self._dll.lockstep_tiles())
        if tiles < 0:
            raise OSError("it was built for matrix tiles, which the system does not grant this process")
        self.tiles = tiles == 1
        """Whether quantised weights are packed for matrix tiles and multiplied on them (tiles.h)."""
        self.layouts = {kind: self._dll.lockstep_layout(number).decode() for kind, number in _NUMBERS.items()}
        """How the kernels want weights of each type to lie."""

    @property
    def vector_bits(self) -> int:
        """512 or 256 where the kernels use these vectors explicitly, 0 where the compiler decides."""
        return int(self._dll.lockstep_vector_bits())

    def pack(self, kind: str, rows: Tensor, k: int) -> Packed:
        """``rows``: uint8 [n, bytes per row], contiguous, as the file holds them. Raises ``ValueError``."""
        if not can_pack(kind, k):
            raise ValueError(f"rows of {k} numbers of type {kind} cannot be packed; types are {', '.join(_NUMBERS)}")
        per, size = _ROW_BYTES[kind]
        expected = k // per * size
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.device.type != "cpu" or not rows.is_contiguous():
            raise ValueError(f"rows must be a contiguous uint8 matrix on the CPU, got {rows.dtype} {tuple(rows.shape)}")
        if rows.shape[1] != expected or len(rows) == 0 or k == 0:
            raise ValueError(f"rows have shape {tuple(rows.shape)}, but {kind} needs (n, {expected}) for k = {k}")
        number = _NUMBERS[kind]
        data = aligned(self.packed_bytes(kind, len(rows), k))
        self._dll.lockstep_pack(number, rows.data_ptr(), len(rows), k, data.data_ptr())
        return Packed(kind, len(rows), k, data, self.layouts[kind])

    def packed_bytes(self, kind: str, n: int, k: int) -> int:
        """Size of a packed weight of one of TYPES, or of INTEGER's."""
        return int(self._dll.lockstep_packed_bytes(_NUMBERS[kind], n, k))

    def checksum(self, data: Tensor) -> int:
        """Of contiguous uint8 memory: 64 bits that change with any byte (checksum.h)."""
        assert data.dtype == torch.uint8
        assert data.is_contiguous()
        return int(self._dll.lockstep_checksum(data.data_ptr(), data.nbytes))

    def pool(self, threads: int, cpus: Sequence[int] | None = None) -> Pool:
        """``cpus``: a core for each thread to stay on, except for the caller's, which is the first."""
        return Pool(self._dll, self.layouts, threads, cpus)


def aligned(nbytes: int) -> Tensor:
    """Uninitialised uint8 memory whose first byte lies at a multiple of ALIGNMENT."""
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    skip = -whole.data_ptr() % ALIGNMENT
    return whole[skip : skip + nbytes]


@attrs.frozen(eq=False)
class Records:
    """Calls of kernels in a row, with the memory that they lie in: who can run them holds it."""

    memory: Tensor
    address: int
    count: int

    @classmethod
    def of(cls, encoded: bytes | bytearray) -> Records:
        memory = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return cls(memory, memory.data_ptr(), len(encoded) // RECORD)


class Pool:
    """``threads`` threads, the caller's included; the others sleep between tapes. One tape runs at a time. ``layouts`` are
    those of the library whose kernels they run."""

    def __init__(
        self, dll: ctypes.CDLL, layouts: Mapping[str, str], threads: int, cpus: Sequence[int] | None = None
    ) -> None:
        if cpus is not None and (len(cpus) != threads or min(cpus) < 0 or max(cpus) >= 2**20):
            raise ValueError(f"cpus are {tuple(cpus)}, but must be one number of a core for each of {threads} threads")
        if not 1 <= threads <= 1024:
            raise ValueError(f"threads is {threads}, but must be in 1..1024")
        self.threads, self.layouts = threads, layouts
        self._run = dll.lockstep_run
        places = None if cpus is None else (ctypes.c_int * threads)(*cpus)
        self._address = dll.lockstep_pool(threads, places)
        self.pinned = int(dll.lockstep_pinned(self._address))  # helpers that stay on their core
        # A child of fork() has no helper threads to join, so only the process that made the pool closes it.
        self.close = weakref.finalize(self, _close, dll, self._address, os.getpid())
        self.close.atexit = False

    def run(self, records: Records) -> None:
        """What the records point to must be alive and as large as they say. Raises ``RuntimeError`` at one that is none."""
        if not self.close.alive:
            raise RuntimeError("this pool of threads was closed")
        done = self._run(self._address, records.address, records.count)
        if done != records.count:
            raise RuntimeError(
                f"record {done} of {records.count} is no call of a kernel, so it and those behind it did not run"
            )


def _close(dll: ctypes.CDLL, address: int, process: int) -> None:
    if os.getpid() == process:
        dll.lockstep_close(address)
