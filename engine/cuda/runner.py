"""A model's decoder on Triton kernels, behind ``Runner``."""

from __future__ import annotations

import torch

from engine.compute.runner import PlanRunner
from engine.compute.weights import Progress
from engine.control.limits import Limits
from engine.cuda.network import TritonNetwork
from engine.cuda.weights import TritonWeights, load_triton
from engine.loading.model import LoadedModel


class TritonRunner(PlanRunner):
    """``batch_invariant``: a request's bytes depend on nobody else; see ``TritonNetwork``.

    ``weights`` lets several runners of one model share what ``load_triton`` made. Raises ``NoTriton`` where the kernels
    cannot run and ``LoadError`` for a bad tensor.
    """

    def __init__(
        self,
        model: LoadedModel,
        limits: Limits,
        *,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = True,
        progress: Progress | None = None,
        weights: TritonWeights | None = None,
    ) -> None:
        if weights is None:
            weights = load_triton(model, torch.device(device), dtype, progress)
        self.weights = loaded = weights
        self.batch_invariant = batch_invariant
        super().__init__(limits, lambda sizes: TritonNetwork(loaded, sizes, batch_invariant=batch_invariant))

    @property
    def compute(self) -> str:
        """Name of the compute path, for people: what the bytes of an answer depend on."""
        products = "fixed-tile products" if self.batch_invariant else "library products"
        return f"Triton kernels, {products}"

    @property
    def probe_summary(self) -> str:
        if self.batch_invariant:
            return "by construction, one order of summation for any rows"
        return "not promised: the matrix library adds in another order for another number of rows (--batch-invariant promises it)"

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes
