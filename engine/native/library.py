"""The compiled kernels as Python sees them: packing, pools of threads, running a tape.

ctypes drops the interpreter lock for the time of a call, so a running tape holds up nobody.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path

import attrs
import torch
from torch import Tensor

TYPES = ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1")  # in the order of the source's enumeration
_GROUP = 32  # values that share scales, in the types whose name begins with Q
_ROW_BYTES = {"F32": (1, 4), "BF16": (1, 2), "F16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}
ALIGNMENT = 64


@attrs.frozen(eq=False)
class Packed:
    """A weight [n, k] in panels of 16 outputs (product.h), still in the type that it came in. ``data``: uint8, aligned."""

    type: str
    n: int
    k: int
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def can_pack(kind: str, k: int) -> bool:
    """Whether rows of ``k`` numbers of this type can be packed as they are."""
    return kind in TYPES and (not kind.startswith("Q") or k % _GROUP == 0)


class Library:
    """A shared object that ``build.built`` made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("lockstep_vector_bits", ctypes.c_int, []),
            ("lockstep_packed_bytes", size, [size, size, size]),
            ("lockstep_pack", None, [size, pointer, size, size, pointer]),
            ("lockstep_checksum", ctypes.c_uint64, [pointer, size]),
            ("lockstep_pool", pointer, [ctypes.c_int]),
            ("lockstep_close", None, [pointer]),
            ("lockstep_run", None, [pointer, pointer, size]),
        ):
            function = getattr(self._dll, name)
            function.restype, function.argtypes = result, arguments

    @property
    def vector_bits(self) -> int:
        """512 or 256 where the kernels use these vectors explicitly, 0 where the compiler decides."""
        return int(self._dll.lockstep_vector_bits())

    def pack(self, kind: str, rows: Tensor, k: int) -> Packed:
        """``rows``: uint8 [n, bytes per row], contiguous, as the file holds them. Raises ``ValueError``."""
        if not can_pack(kind, k):
            raise ValueError(f"rows of {k} numbers of type {kind} cannot be packed; types are {', '.join(TYPES)}")
        per, size = _ROW_BYTES[kind]
        expected = k // per * size
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.device.type != "cpu" or not rows.is_contiguous():
            raise ValueError(f"rows must be a contiguous uint8 matrix on the CPU, got {rows.dtype} {tuple(rows.shape)}")
        if rows.shape[1] != expected or len(rows) == 0 or k == 0:
            raise ValueError(f"rows have shape {tuple(rows.shape)}, but {kind} needs (n, {expected}) for k = {k}")
        number = TYPES.index(kind)
        data = aligned(self.packed_bytes(kind, len(rows), k))
        self._dll.lockstep_pack(number, rows.data_ptr(), len(rows), k, data.data_ptr())
        return Packed(kind, len(rows), k, data)

    def packed_bytes(self, kind: str, n: int, k: int) -> int:
        """Size of a packed weight of one of TYPES."""
        return int(self._dll.lockstep_packed_bytes(TYPES.index(kind), n, k))

    def checksum(self, data: Tensor) -> int:
        """Of contiguous uint8 memory: 64 bits that change with any byte (checksum.h)."""
        assert data.dtype == torch.uint8
        assert data.is_contiguous()
        return int(self._dll.lockstep_checksum(data.data_ptr(), data.nbytes))

    def pool(self, threads: int) -> Pool:
        return Pool(self._dll, threads)


def aligned(nbytes: int) -> Tensor:
    """Uninitialised uint8 memory whose first byte lies at a multiple of ALIGNMENT."""
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    skip = -whole.data_ptr() % ALIGNMENT
    return whole[skip : skip + nbytes]


class Pool:
    """``threads`` threads, the caller's included; the others sleep between tapes. One tape runs at a time."""

    def __init__(self, dll: ctypes.CDLL, threads: int) -> None:
        if not 1 <= threads <= 1024:
            raise ValueError(f"threads is {threads}, but must be in 1..1024")
        self.threads = threads
        self._run = dll.lockstep_run
        self._address = dll.lockstep_pool(threads)
        # A child of fork() has no helper threads to join, so only the process that made the pool closes it.
        self.close = weakref.finalize(self, _close, dll, self._address, os.getpid())
        self.close.atexit = False

    def run(self, address: int, count: int) -> None:
        """Runs ``count`` records at ``address``; what they point to must be alive and as large as they say."""
        if not self.close.alive:
            raise RuntimeError("this pool of threads was closed")
        self._run(self._address, address, count)


def _close(dll: ctypes.CDLL, address: int, process: int) -> None:
    if os.getpid() == process:
        dll.lockstep_close(address)
