"""What loading used and freed, given back to the system.

Loading frees tens of MiB between things that stay: bytes of the file's header, halves of merges, angles of rotations. The C
library keeps them for what the process may ask for next, which while serving is next to nothing.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """A few milliseconds. Does nothing where the C library knows no ``malloc_trim``, which only glibc does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
