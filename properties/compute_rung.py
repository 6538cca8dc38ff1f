"""What ``rows``, ``tiny`` and ``gpu`` share: the production runner over a network, a tripwire in that network, and a look
into the cache around every step.

    Engine -> Watch -> PlanRunner -> Tripwire -> network
              poison everything that nobody owns, before; see what changed, after

Where the workload has a row fail, its logits are spoiled in front of the production sampler. A step that the workload has fail
fails inside: in the decode step when there is one, behind a finished prefill, else in the
prefill. Whatever else the runner raises is a finding, though the engine contains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from engine.compute.graphs import Do, Graphs, Shape, Step
from engine.compute.network import MakeNetwork, Network, Pool, Sizes, Span, Tokens, draw_of
from engine.compute.runner import PlanRunner
from engine.compute.sampler import Draw
from engine.control.plan import Chunk, Decode, Plan, Sampled
from engine.control.record import StepRecord
from engine.native.draw import NativeDraw
from engine.trace import Shape as WorkloadShape
from engine.trace import Submit
from properties.cache_cells import Touched, touched
from properties.checks import Fact
from properties.diff import Known
from properties.row_failures import INJECTED, KINDS, spoil
from properties.rungs import EngineRung, StepFailed, Unavailable, limits
from properties.sampled import sampling_of
from properties.solo import Oracle

BATCH = 13  # tokens in one prefill batch: small, so that chunks are cut, and no multiple of a block size
SHOWN = 6  # cells in one finding; the rest is counted


MOST_ROWS = 1 << 14
MOST_GRAPHS = 1 << 12  # a tape for each of them
MOST_TABLE_CELLS = 1 << 20


def must_fit(shape: WorkloadShape, rung: str, most_cells: int) -> None:
    """Shapes are bounded so that ``ledger`` can hold each of them; a rung with a real cache holds less, and compares all of
    it after every step. Raises ``Unavailable`` with what is too large."""
    rows = max(shape.rows, *shape.capture_rows, 1)
    width = max(-(-shape.max_model_len // shape.block_size), *shape.capture_widths, 1)
    for name, value, most in (
        ("blocks * block_size", shape.blocks * shape.block_size, most_cells),
        ("rows", rows, MOST_ROWS),
        ("rows * blocks of the longest request", rows * width, MOST_TABLE_CELLS),
        ("capture_rows x capture_widths", len(shape.capture_rows) * len(shape.capture_widths), MOST_GRAPHS),
    ):
        if value > most:
            raise Unavailable(
                f"the rung {rung} cannot hold this shape: {name} is {value}, but at most {most} fit; ledger can"
            )


class Tripwire:
    """A network that raises where it is told to: ``armed`` is ``prefill``, ``decode`` or None."""

    def __init__(self, inner: Network) -> None:
        self.inner = inner
        self.armed: str | None = None
        self.graphs: Graphs = _TripGraphs(self)

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def pool(self) -> Pool:
        return self.inner.pool

    @property
    def draw(self) -> Draw | None:
        return draw_of(self.inner)

    def trip(self, part: str) -> None:
        if self.armed == part:
            raise StepFailed(INJECTED)

    def decode(self, do: Do, step: Tokens, tables: Tensor) -> Tensor:
        self.trip("decode")
        return self.inner.decode(do, step, tables)

    def prefill(self, do: Do, step: Tokens, spans: Sequence[Span], sampling: Tensor | None) -> Tensor | None:
        self.trip("prefill")
        return self.inner.prefill(do, step, spans, sampling)


class _TripGraphs:
    def __init__(self, wire: Tripwire) -> None:
        self._wire = wire
        self._inner = wire.inner.graphs

    def record(self, shape: Shape, step: Step) -> None:
        self._inner.record(shape, step)

    def replay(self, shape: Shape) -> None:
        self._wire.trip("decode")
        self._inner.replay(shape)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._inner

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes


class Spoiler:
    """Stands in front of the sampler and spoils the logits of ``doomed``: places in the list of rows, and how."""

    def __init__(self, runner: PlanRunner, network: Network) -> None:
        self._sampler, self._draw = runner.sampler, draw_of(network)
        self.doomed: Mapping[int, str] = {}
        setattr(runner.sampler, "sample", self.sample)  # noqa: B010 - of this one sampler, whatever is armed in its class

    def sample(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[Sampled]:
        if self.doomed:
            draw, peaks = self._draw, None
            if isinstance(draw, NativeDraw) and logits.data_ptr() == draw._head:  # the head left its peaks as well
                peaks = draw._peaks(len(rows))
            with torch.inference_mode():
                for at, kind in self.doomed.items():
                    spoil(logits[at], None if peaks is None else peaks[at], kind)
        return type(self._sampler).sample(self._sampler, logits, rows, positions)


class CacheWatch(Protocol):
    """What a rung does with its cache around a step."""

    def before(self, expected: Touched) -> None:
        """Called when rows are settled and before anything is computed."""
        ...

    def after(self, expected: Touched) -> tuple[Fact, ...]: ...


class Watch:
    """Stands in front of the runner. ``expected`` is set for each step that the specification makes, too."""

    def __init__(self, inner: PlanRunner, wire: Tripwire, cache: CacheWatch) -> None:
        self._inner, self._wire, self._cache = inner, wire, cache
        self._spoiler = Spoiler(inner, wire)
        self.dead: Mapping[int, int] = {}  # see EngineRung
        self.expected: Touched | None = None
        self.fails = False
        self.raised: Exception | None = None

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        if self.expected is not None:
            self._cache.before(self.expected)
        self._wire.armed = ("decode" if plan.decodes else "prefill") if self.fails else None
        self._spoiler.doomed = self._doomed(plan)
        try:
            return self._inner.execute(plan)
        except StepFailed:
            raise
        except Exception as error:
            self.raised = error  # the engine contains what execute raises; the harness wants to know
            raise

    def _doomed(self, plan: Plan) -> dict[int, str]:
        """Places of ``plan.sampling`` whose token would stand where the workload has its row fail."""
        if not self.dead:
            return {}
        ends = [_next_position(entry) for entry in plan.sampling]
        return {
            at: KINDS[end % len(KINDS)]
            for at, (entry, end) in enumerate(zip(plan.sampling, ends, strict=True))
            if self.dead.get(entry.request) == end
        }


def _next_position(entry: Chunk | Decode) -> int:
    return entry.start + len(entry.tokens) if isinstance(entry, Chunk) else entry.position + 1


class ComputeRung(EngineRung):
    """The real engine and the production runner over the network that ``make`` makes.

    ``staged``: see ``PlanRunner``. A subclass says what it watches in its cache, and what requests were told wrongly.
    """

    staged: ClassVar[bool | None] = None

    def __init__(self, shape: WorkloadShape, make: MakeNetwork, oracle: Oracle) -> None:
        self._shape = shape
        self._known: Mapping[int, Known] = {}
        self._record: StepRecord | None = None
        wires: list[Tripwire] = []

        def wired(sizes: Sizes) -> Network:
            wires.append(Tripwire(make(sizes)))
            return wires[0]

        self.runner = PlanRunner(limits(shape), wired, prefill_tokens=BATCH, staged=self.staged)
        self.runner.warm()
        self.network = wires[0].inner
        self._cache = self.watch()
        self._watch = Watch(self.runner, wires[0], self._cache)
        super().__init__(shape, self._watch, oracle)
        self._watch.dead = self.dead

    def watch(self) -> CacheWatch:
        raise NotImplementedError

    def misled(self, record: StepRecord, known: Mapping[int, Known]) -> tuple[Fact, ...]:
        """What ``record`` tells requests, known as they were before it, that they are not told alone."""
        raise NotImplementedError

    def payloads(self, event: Submit, stop_ids: frozenset[int]) -> tuple[object, ...]:
        return tuple(choice.spec for choice in sampling_of(event, stop_ids))

    def expect(self, step: Mapping[str, Any], after: Mapping[str, Any], known: Mapping[int, Known]) -> None:
        shape = self._shape
        self._watch.expected = touched(step, after, shape.blocks, shape.block_size) if step else None
        self._known = known

    def step(self, *, fails: bool) -> StepRecord:
        """One iteration. Raises whatever the runner raised, unless the workload asked for it."""
        self._watch.fails = fails
        self._record = record = self._engine.step()
        if self._watch.raised is not None:
            raise self._watch.raised
        return record

    def facts(self) -> Mapping[str, tuple[Fact, ...]]:
        assert self._record is not None
        expected = self._watch.expected
        written = {} if expected is None else {"writes": self._cache.after(expected)}
        return {**written, "tokens": self.misled(self._record, self._known)}


def some(facts: list[Fact]) -> tuple[Fact, ...]:
    """The first few, and how many more there are."""
    if len(facts) <= SHOWN:
        return tuple(facts)
    return (*facts[:SHOWN], Fact(f"{len(facts) - SHOWN} more cells", "", ""))
