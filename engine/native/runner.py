"""A model's decoder on native kernels, behind ``Runner``; and whether this machine can have it."""

from __future__ import annotations

import functools
import sys

import torch

from engine.compute.runner import PlanRunner
from engine.control.limits import Limits
from engine.loading.model import LoadedModel
from engine.native.build import BuildError, built
from engine.native.library import Library, Pool
from engine.native.machine import granted
from engine.native.network import NativeNetwork
from engine.native.weights import NativeWeights, Progress, load_native
from engine.native.weights_cache import WeightsCache


@functools.cache
def library() -> Library:
    """The kernels for this machine, compiled now if they are not cached. Raises ``BuildError``."""
    path = built()
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None


def prepare(progress: Progress | None) -> None:
    """Compiles the kernels if this machine has none yet, which takes seconds, and says so. Raises ``BuildError``."""
    told = "compiling kernels for this machine, once"

    def announce() -> None:
        if progress is None:
            print(f"lockstep: {told}", file=sys.stderr, flush=True)
        else:
            progress(told, 0, 1)

    built(announce=announce)
    if progress is not None:
        progress("preparing kernels", 1, 1)


_KEYS = {torch.float32: "", torch.float16: ", K/V in fp16", torch.bfloat16: ", K/V in bf16"}


class NativeRunner(PlanRunner):
    """``threads`` computes on that many threads (by default one for each core that this process may use).

    ``weights`` lets several runners of one model share what ``load_native`` made, ``pool`` their threads; ``cache`` keeps
    packed weights for later starts; ``kv_dtype``: fp32, fp16 or bf16; ``integer``: 8-bit activations; ``pin``: threads stay on
    their cores where they are as many. Raises ``BuildError``
    without a working compiler and ``LoadError`` for a bad tensor.
    """

    def __init__(
        self,
        model: LoadedModel,
        limits: Limits,
        *,
        threads: int | None = None,
        progress: Progress | None = None,
        weights: NativeWeights | None = None,
        pool: Pool | None = None,
        cache: WeightsCache | None = None,
        kv_dtype: torch.dtype = torch.float32,
        integer: bool = False,
        pin: bool = False,
    ) -> None:
        if weights is None:
            weights = load_native(model, library(), progress, cache, integer=integer)
        self.weights = loaded = weights
        if pool is None:
            machine = granted()
            threads = threads or machine.cores
            pool = loaded.library.pool(threads, machine.pins(threads) if pin else None)
        self.threads = shared = pool
        self._kv_dtype = kv_dtype
        super().__init__(limits, lambda sizes: NativeNetwork(loaded, sizes, shared, kv_dtype))

    @property
    def compute(self) -> str:
        """Name of the compute path, for people: what the bytes of an answer depend on."""
        bits = self.weights.library.vector_bits
        vectors = f"{bits}-bit vectors" if bits else "vectors by the compiler"
        tiles = " and matrix tiles" if self.weights.library.tiles else ""
        keys = _KEYS[self._kv_dtype]
        activations = ", 8-bit activations" if self.weights.integer else ""
        return f"native kernels, {vectors}{tiles}{activations}{keys}"

    @property
    def probe_summary(self) -> str:
        types = ", ".join(f"{kind} {size / 2**20:.0f} MiB" for kind, size in sorted(self.weights.types.items()))
        return f"by construction, one order of summation for any rows and threads; weights: {types}"

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes


def native_rows(most: int) -> list[int]:
    """Row counts worth a tape: each up to 64, where padding shows, then every sixteenth."""
    return sorted({*range(1, min(most, 64) + 1), *range(80, most, 16), most})


def cores() -> int:
    """How many threads this process can run at the same time."""
    return granted().cores
