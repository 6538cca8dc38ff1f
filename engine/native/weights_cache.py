"""Packed weights kept on disk, so that only the first start of a model packs them; later ones map the file into memory.

    key   the source files (size, time of change, their beginning and samples of the rest), how weights are packed, byte order
    file  <key>.packed in the user's cache, written under another name first; two processes at once both make a whole one
    kept  the files used last, see KEPT; when one is written, others go (prune.py)

Nothing here can make a start fail: a folder that cannot be written, a full disk, a file that is damaged or that somebody
else could have written only mean that weights are packed in memory, as they are without a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, cast, runtime_checkable

import attrs

from engine.loading.model import TensorSource
from engine.native.build import cache_home, foreign
from engine.native.library import Library
from engine.native.packed_file import Damaged, FileTensors, Writer
from engine.native.prune import Limits, prune, used

MIN_BYTES = 2**24  # of source files; a smaller model is packed before a file could be opened and checked
SPARE_BYTES = 2**28  # that stay free on the disk
KEPT = Limits(re.compile(r"[0-9a-f]{32}\.packed"), files=8, nbytes=16 * 2**30, days=30)
LEFT = Limits(re.compile(r"[0-9a-f]{32}\w{8}\.tmp"), files=2**31, nbytes=2**63, days=1)  # by writers that were killed
_BEGINNING, _SAMPLES, _SAMPLE = 2**20, 64, 4096
_PACKING = ("integer.h", "library.py", "packed_file.py", "product.h", "tensors.py", "tiles.h", "weights.py")


@runtime_checkable
class OnDisk(Protocol):
    """A tensor source that reads files."""

    @property
    def files(self) -> tuple[Path, ...]: ...


@attrs.frozen
class WeightsCache:
    """``folder`` need not exist. ``min_bytes``: smaller models are left alone."""

    folder: Path
    min_bytes: int = MIN_BYTES

    def key(self, source: TensorSource, layout: str = "") -> str | None:
        """Of what ``source`` is packed to; ``None`` where it is not worth a file or lies in none."""
        if not isinstance(source, OnDisk):
            return None
        try:
            if sum(path.stat().st_size for path in source.files) < self.min_bytes:
                return None
            digest = hashlib.sha256(f"{sys.byteorder} {layout}".encode())
            for name in _PACKING:
                digest.update((Path(__file__).parent / name).read_bytes())
            for path in source.files:
                _identify(path, digest.update)
        except OSError:
            return None
        return digest.hexdigest()[:32]

    def place(self, key: str) -> Path:
        return self.folder / f"{key}.packed"

    def open(self, key: str, library: Library, shapes: Mapping[str, Sequence[int]]) -> FileTensors | None:
        """What was kept under ``key`` of a model with tensors of these shapes; ``None`` if there is nothing, or nothing that
        can be trusted."""
        place = self.place(key)
        try:
            if foreign(self.folder) or foreign(place):
                return None
            found = FileTensors(place, key, library, shapes)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (Damaged, OSError) as error:
            warnings.warn(f"{place} is made anew: {error}", stacklevel=2)
            return None
        used(place)
        return found

    @contextlib.contextmanager
    def write(self, key: str, nbytes: int, library: Library) -> Iterator[Writer]:
        """A file of about ``nbytes``; it gets its name when the block ends well. Raises ``OSError``."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := foreign(self.folder):
            raise PermissionError(f"{self.folder} {why}")
        self._prune(key)
        if shutil.disk_usage(self.folder).free < nbytes + SPARE_BYTES:
            raise OSError(f"{nbytes / 2**20:.0f} MiB would leave too little room on the disk of {self.folder}")
        handle, name = tempfile.mkstemp(prefix=key, suffix=".tmp", dir=self.folder)
        half = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                writer = Writer(cast(BinaryIO, file), key, library)
                yield writer
                writer.close()
            half.replace(self.place(key))
            self._prune(key)
        finally:
            half.unlink(missing_ok=True)

    def _prune(self, key: str) -> None:
        prune(self.folder, LEFT)
        prune(self.folder, KEPT, self.place(key))


def weights_folder() -> Path:
    return cache_home() / "weights"


def _identify(path: Path, update: Callable[[bytes], None]) -> None:
    """Size, time, beginning and samples: a model trained further has another byte in nearly every one of them."""
    status = path.stat()
    size = status.st_size
    update(f"{size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        update(file.read(_BEGINNING))
        for sample in range(_SAMPLES):
            file.seek(size // _SAMPLES * sample)
            update(file.read(_SAMPLE))
