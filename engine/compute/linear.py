"""Linear layers whose rows do not see each other: a backend, and the row counts that it may be run with.

On CPU in fp32 the weights are packed once for oneDNN, which is faster than a plain product from about eight rows on and
has fewer classes of equal bytes; elsewhere, or if the probe prefers it, a plain matrix product is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from engine.compute.graphs import Do
from engine.compute.probe import Ladder, UnstableMachine, probe, pseudo_random

GOOD = 1.2  # a ladder of this score wastes little, so no other backend is tried

Kernel = Callable[[Tensor, Any, Tensor | None, Tensor], None]  # x [m, k], weight, bias [n], out [m, n]


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight.T + bias, for a weight that ``pack`` made."""
    out.copy_(torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight.T + bias, for weight [n, k]."""
    torch.mm(x, weight.t(), out=out)
    if bias is not None:
        out.add_(bias)


def pack(weight: Tensor) -> Tensor:
    """``weight`` [n, k] in oneDNN's own layout; opaque."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


@attrs.frozen(eq=False)
class Linear:
    """One weight. ``apply`` takes buffers with at least ``ladder.padded(rows)`` rows; the rows beyond are scratch."""

    kernel: Kernel
    weight: Tensor
    bias: Tensor | None
    ladder: Ladder

    def apply(self, do: Do, x: Tensor, rows: int, out: Tensor) -> None:
        """out[:rows] = x[:rows] @ weight.T + bias."""
        begin = 0
        for size in self.ladder.pieces(rows):
            do(self.kernel, x[begin : begin + size], self.weight, self.bias, out[begin : begin + size])
            begin += size


class Linears:
    """Makes the ``Linear`` of a weight, probing once for each distinct shape."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, bool], tuple[Kernel, Ladder]] = {}

    @property
    def ladders(self) -> tuple[Ladder, ...]:
        return tuple(ladder for _, ladder in self._found.values())

    def make(self, name: str, weight: Tensor, bias: Tensor | None, *, most: int = 512) -> Linear:
        """``weight`` [n, k]; ``most``: the largest row count to probe. Raises ``UnstableMachine``."""
        n, k = weight.shape
        key = (n, k, bias is not None)
        known = self._found.get(key)
        packed: Tensor | None = None
        if known is None:
            known, packed = self._choose(f"{name} {n}x{k}", weight, bias, most)
            self._found[key] = known
        kernel, ladder = known
        if kernel is not packed_product:
            return Linear(kernel, weight, bias, ladder)
        return Linear(kernel, pack(weight) if packed is None else packed, bias, ladder)

    def _choose(
        self, name: str, weight: Tensor, bias: Tensor | None, most: int
    ) -> tuple[tuple[Kernel, Ladder], Tensor | None]:
        """The first backend whose ladder runs a server's loads nearly without padding, else the best of all."""
        backends: list[tuple[str, Kernel, Tensor]] = []
        if can_pack(weight):
            backends.append(("oneDNN", packed_product, pack(weight)))
        backends.append(("matmul", plain_product, weight))
        found: list[tuple[Kernel, Ladder, Tensor]] = []
        failure: UnstableMachine | None = None
        for backend, kernel, prepared in backends:
            try:
                ladder = _probe_linear(name, backend, kernel, prepared, weight, bias, most)
            except UnstableMachine as error:
                failure = error
                continue
            found.append((kernel, ladder, prepared))
            if ladder.score(most) < GOOD:
                break
        if not found:
            raise failure or UnstableMachine(f"{name}: no backend")
        kernel, ladder, prepared = min(found, key=lambda entry: entry[1].score(most))
        return (kernel, ladder), prepared if kernel is packed_product else None


def _probe_linear(
    name: str, backend: str, kernel: Kernel, prepared: Tensor, weight: Tensor, bias: Tensor | None, most: int
) -> Ladder:
    n, k = weight.shape

    def product(x: Tensor) -> Tensor:
        out = torch.empty(len(x), n, device=weight.device, dtype=weight.dtype)
        kernel(x, prepared, bias, out)
        return out

    return probe(name, product, pseudo_random(most, k, weight.device, weight.dtype), backend=backend)
