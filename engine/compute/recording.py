"""What a recorded step froze, and the proof that its key holds all of it.

Recording keeps the arguments of every kernel call: addresses and host integers. A graph is looked up by its key, (rows,
width), so a host integer that is no function of the key would be replayed for steps that have another: the set of shapes
would be open, and no list of graphs could cover it. ``refuse_open_shapes`` walks through steps of one key with different
inputs, computing nothing, and compares what would be frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch

from engine.compute.graphs import Shape, Step
from engine.compute.inputs import StaticInputs
from engine.compute.network import Network

Frozen = tuple[Any, ...]  # a kernel's name and its arguments


class OpenShapes(RuntimeError):
    """A step reads something else from the host than its key tells."""


@attrs.frozen
class Recorded:
    """What recording cost at start: how many graphs, seconds, and bytes that they hold."""

    graphs: int
    seconds: float
    bytes: int


@attrs.frozen(eq=False)
class Walk:
    """A step as a recorder keeps it: of every call the kernel's name, then addresses, sizes and numbers.

    ``alive`` holds the arguments, so that what another walk allocates lies elsewhere and is told apart.
    """

    calls: tuple[Frozen, ...]
    alive: tuple[Any, ...]

    def storages(self) -> set[int | str]:
        return {part.storage for call in self.calls for part in _parts(call) if isinstance(part, Memory)}


@attrs.frozen
class Memory:
    """A tensor without its content. ``storage``: its address, or its number among those that the walk allocated itself."""

    storage: int | str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def walk(step: Step) -> Walk:
    """What would be recorded of ``step``; nothing is computed."""
    calls: list[Frozen] = []
    alive: list[Any] = []

    def do(kernel: Callable[..., None], *arguments: Any) -> None:
        name = getattr(kernel, "name", getattr(kernel, "__qualname__", type(kernel).__name__))
        calls.append((name, *(_frozen(argument) for argument in arguments)))
        alive.append(arguments)

    step(do)
    return Walk(tuple(calls), tuple(alive))


def difference(one: Walk, other: Walk) -> str | None:
    """The first call in which two walks differ, in words; ``None`` where a recorder would keep the same.

    Memory that each walk allocated itself is the same if it is used at the same places.
    """
    if len(one.calls) != len(other.calls):
        return f"{len(one.calls)} kernel calls or {len(other.calls)}"
    shared = one.storages() & other.storages()
    for number, (a, b) in enumerate(zip(_named(one, shared), _named(other, shared), strict=True)):
        if a != b:
            return f"call {number} as {_short(a, b)} or as {_short(b, a)}"
    return None


def _named(walked: Walk, shared: set[int | str]) -> list[Frozen]:
    numbers: dict[int, str] = {}

    def named(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(named(entry) for entry in part)
        if isinstance(part, Memory) and part.storage not in shared:
            storage = numbers.setdefault(int(part.storage), f"allocated {len(numbers)}")
            return attrs.evolve(part, storage=storage)
        return part

    return [named(call) for call in walked.calls]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for entry in value:
            yield from _parts(entry)
    else:
        yield value


def _frozen(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        if argument.is_mkldnn:  # packed weights, which have no address of their own
            return ("packed", id(argument))
        first = argument.untyped_storage().data_ptr()
        offset = argument.data_ptr() - first
        return Memory(first, offset, tuple(argument.shape), tuple(argument.stride()), str(argument.dtype))
    if isinstance(argument, tuple | list):
        return tuple(_frozen(entry) for entry in argument)
    if argument is None or isinstance(argument, int | float | str):
        return argument
    return (type(argument).__name__, id(argument))


def refuse_open_shapes(network: Network, inputs: StaticInputs, shapes: Iterable[Shape]) -> None:
    """Raises ``OpenShapes`` naming the first call that differs between two steps of one of ``shapes``.

    Overwrites the static inputs; whoever runs a step fills them anyway.
    """
    for shape in shapes:
        one, other = (walk(step) for step in _steps(network, inputs, shape))
        differing = difference(one, other)
        if differing is not None:
            raise OpenShapes(_told(shape, differing))


def _steps(network: Network, inputs: StaticInputs, shape: Shape) -> Iterable[Step]:
    tokens, tables = inputs.step(*shape)

    def step(do: Callable[..., None]) -> None:
        network.decode(do, tokens, tables)

    highest = {"tokens": network.vocab_size - 1, "slots": network.pool.trash_slot, "tables": network.pool.trash_block}
    for last in (False, True):
        for name, buffer in inputs.host.items():
            if not last:
                buffer.zero_()
            elif name in highest:
                buffer.fill_(highest[name])
            else:  # positions, a different one in each row
                buffer.copy_(torch.arange(1, len(buffer) + 1))
        inputs.send(*shape)
        yield step


def corners(shapes: Iterable[Shape]) -> list[Shape]:
    """The shapes between which a network's ways of computing change: fewest and most rows, least and greatest width."""
    listed = sorted(shapes)
    if not listed:
        return []
    narrow, wide = min(width for _, width in listed), max(width for _, width in listed)
    ends = {(rows, width) for rows in (listed[0][0], listed[-1][0]) for width in (narrow, wide)}
    return sorted(ends & set(listed))


def _short(call: Frozen, other: Frozen) -> str:
    """The kernel and the arguments in which two calls differ."""
    if call[0] != other[0] or len(call) != len(other):
        return str(call[0])
    differing = [f"argument {n} = {a}" for n, (a, b) in enumerate(zip(call[1:], other[1:], strict=True)) if a != b]
    return f"{call[0]} with {', '.join(differing)}"


def _told(shape: Shape, what: str) -> str:
    return (
        f"a decode step of {shape[0]} rows and {shape[1]} blocks records {what}, depending on its inputs: it reads a host "
        "integer that the graph's key (rows, width) does not hold, so no list of graphs would cover it"
    )
