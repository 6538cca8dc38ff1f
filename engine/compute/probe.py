"""The start-up probe: which row counts a matrix product may be run with, so that a row's bits never depend on the
others.

A library picks another algorithm, hence another order of summation, for another number of rows. Where the borders lie
differs by library, machine, thread count and shape, and there can be several, so no smallest safe count exists. The
probe measures: it runs each product with real weights at a ladder of row counts, sorts the counts into classes of equal
bytes and keeps one class. Every product is then run in pieces of those counts only. Within a class it also checks that
a row's place and its neighbours' content change nothing. The choice depends on bytes and on a fixed cost model, never
on a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_OVERHEAD = 24  # reading the weights costs about as much as computing this many rows (measured, ci/notes-compute.md)
_LOADS = (1, 16, 512)  # row counts that a server sees: one stream, a batch, a chunk of prefill

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, k] -> [rows, n]


class UnstableMachine(RuntimeError):
    """No row count gives bits that are independent of a row's place and neighbours."""


@attrs.frozen
class Ladder:
    """Row counts with equal bytes, ascending. ``classes`` are all classes that were found, for the report."""

    name: str
    rungs: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...] = ()
    backend: str = ""

    def rung(self, rows: int) -> int:
        """The smallest rung that holds ``rows``, else the largest."""
        return next((rung for rung in self.rungs if rung >= rows), self.rungs[-1])

    def pieces(self, rows: int) -> tuple[int, ...]:
        """Rungs whose sum is at least ``rows``: pieces of the largest, then the smallest that holds the rest."""
        top = self.rungs[-1]
        full, rest = divmod(rows, top)
        return (top,) * full + ((self.rung(rest),) if rest else ())

    def padded(self, rows: int) -> int:
        return sum(self.pieces(rows))

    def cost(self, rows: int) -> int:
        return sum(_OVERHEAD + piece for piece in self.pieces(rows))

    def score(self, most: int) -> float:
        """Mean cost over what a server sees, up to ``most`` rows, relative to one piece of that size; 1 is ideal."""
        loads = [min(rows, most) for rows in _LOADS]
        return sum(self.cost(rows) / (_OVERHEAD + rows) for rows in loads) / len(loads)


@attrs.frozen
class ProbeReport:
    """What was found: one ladder for each distinct product."""

    threads: int
    ladders: tuple[Ladder, ...]

    @property
    def summary(self) -> str:
        """One line: how many products, and the row counts that they are run with."""
        counts = sorted({ladder.rungs for ladder in self.ladders})
        used = " or ".join(f"{rungs[0]}..{rungs[-1]}" for rungs in counts)
        return f"{len(self.ladders)} products probed on {self.threads} threads; rows in pieces of {used}"

    def lines(self) -> tuple[str, ...]:
        """For people: product, backend, the counts that are used, and the classes that were seen."""
        return tuple(
            f"{ladder.name}: {ladder.backend}, rows in pieces of {', '.join(map(str, ladder.rungs))}"
            + (f" ({len(ladder.classes)} classes of equal bytes)" if len(ladder.classes) > 1 else "")
            for ladder in self.ladders
        )


def probe(name: str, product: Product, inputs: torch.Tensor, *, backend: str = "") -> Ladder:
    """Finds the ladder of ``product`` among the candidates that ``inputs`` [rows, k] has rows for.

    How many rows are probed must not depend on a setting, or the setting would choose the class and with it the bytes.
    Raises ``UnstableMachine`` if no count is independent of place and neighbours.
    """
    counts = [count for count in CANDIDATES if count <= len(inputs)]
    outputs = {count: product(inputs[:count]).clone() for count in counts}
    steady = [count for count in counts if _independent(product, inputs[:count], outputs[count])]
    if not steady:
        tried = ", ".join(map(str, counts))
        raise UnstableMachine(
            f"{name}: with every row count tried ({tried}) the bits of a row depend on its place in the batch or on its"
            " neighbours, so answers could not be reproduced; try another number of threads"
        )
    classes = _classes(steady, outputs)
    best = min((Ladder(name, rungs) for rungs in classes), key=lambda ladder: (ladder.score(counts[-1]), ladder.rungs))
    return attrs.evolve(best, classes=tuple(classes), backend=backend)


def _classes(counts: Sequence[int], outputs: dict[int, torch.Tensor]) -> list[tuple[int, ...]]:
    """Counts sorted into classes: two are equal when all rows that both computed have the same bytes."""
    classes: list[list[int]] = []
    for count in counts:
        for members in classes:
            if all(same_bytes(outputs[member], outputs[count][:member]) for member in members):
                members.append(count)
                break
        else:
            classes.append([count])
    return [tuple(members) for members in classes]


def _independent(product: Product, inputs: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a row gets the same bytes in every place of the batch, and beside rows of NaN."""
    rows = len(inputs)
    for chosen in {0, rows - 1}:
        everywhere = product(inputs[chosen].expand(rows, -1).contiguous())
        if not same_bytes(everywhere, output[chosen].expand(rows, -1)):
            return False
        alone = torch.full_like(inputs, float("nan"))
        alone[chosen] = inputs[chosen]
        if not same_bytes(product(alone)[chosen], output[chosen]):
            return False
    return True


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit patterns: NaN equals itself, and 0.0 is not -0.0."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def pseudo_random(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Inputs in (-1, 1), the same on every machine."""
    generator = torch.Generator().manual_seed(columns)
    return (torch.rand(rows, columns, generator=generator) * 2 - 1).to(device, dtype)


def check_rowwise(device: torch.device) -> None:
    """exp and the sum over the last dimension must not care where in an array a number stands.

    Raises ``UnstableMachine``. Everything else that works row by row is correctly rounded (kernels.py).
    """
    values = pseudo_random(1, 4096, device, torch.float32)[0] * 8
    whole = values.exp()
    for length in (1, 3, 7, 8, 15, 17, 31, 33, 63, 65, 127, 1000):
        for start in (0, 1, 5, 16):
            if not same_bytes(values[start : start + length].exp(), whole[start : start + length]):
                raise UnstableMachine(f"exp of {length} numbers gives other bits than exp of {len(values)}")
    rows = pseudo_random(67, 61, device, torch.float32)
    for count in (1, 2, 3, 5, 16, 33):
        if not same_bytes(rows[:count].sum(-1), rows.sum(-1)[:count]):
            raise UnstableMachine(f"the sums of {count} rows have other bits than those of {len(rows)} rows")
    if torch.full((67,), -torch.inf, device=device).exp().any():
        raise UnstableMachine("exp of minus infinity is not zero, so masked positions would count")
