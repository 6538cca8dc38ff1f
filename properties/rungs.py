"""The engine under test, as the lockstep driver sees it. A rung says how much of the engine is real.

    ledger   all of control; a stub computes nothing, and a token is a function of request and position
    rows     also everything from the plan to the kernels' arguments, over a cache of hash chains
    staged   rows with what a step reads copied to other memory first and read there, as on a GPU
    tiny     also attention and sampler, on a small random transformer
    native   tiny on the native kernels, with their tape
    triton   tiny on the GPU's kernels in Triton's interpreter, on a CPU: hundreds of times slower
    gpu      tiny on CUDA, with CUDA graphs
    wire     ledger behind the production server, from a read request to the last byte that its client is sent

A rung is imported when it is asked for, so that ``ledger`` does without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, Protocol

from engine.control.counters import Counters
from engine.control.limits import Limits
from engine.control.plan import Runner
from engine.control.record import Ledger, StepRecord
from engine.control.scheduler import Submission
from engine.engine import Engine
from engine.trace import VOCAB, Shape, Submit, prompt_tokens
from properties.checks import Fact
from properties.diff import Known
from properties.readers import Readers
from properties.row_failures import spoken
from properties.solo import Oracle


class Rung(Protocol):
    @property
    def oracle(self) -> Oracle:
        """What each request is told when it runs alone on this rung."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def counters(self) -> Counters: ...

    def submit(self, event: Submit, first_id: int, stop_ids: frozenset[int], stops: tuple[str, ...]) -> tuple[int, ...]:
        """One Submission of ``event.n`` choices, ids from ``first_id``, all with the same stop ids and stop strings.
        Raises ``Refusal``."""
        ...

    shared: bool
    """Whether the choices of one submission are one answer: when one of them is left or fails, all of them end."""

    def abort(self, request: int) -> None: ...

    def shutdown(self, requests: Iterable[int]) -> None:
        """``requests`` are all there were."""
        ...

    def expect(self, step: Mapping[str, Any], after: Mapping[str, Any], known: Mapping[int, Known]) -> None:
        """Told before ``step``: what the specification does in this iteration and what it holds afterwards, and every
        request with its tokens before this step. A rung that looks into the cache derives from it what may change there."""
        ...

    def step(self, *, fails: bool) -> StepRecord: ...

    def facts(self) -> Mapping[str, tuple[Fact, ...]]:
        """By check (``writes``), what this rung itself saw differ in the iteration that just ran."""
        ...

    def told(self, record: StepRecord) -> Mapping[int, str]:
        """The text that each caller in ``record`` has been told since it began. Asked at most once for a record."""
        ...

    def closing(self) -> Mapping[str, tuple[Fact, ...]]:
        """As ``facts``, when all work is done."""
        ...

    def happened(self) -> Mapping[str, int]:
        """What only this rung can see happen, by name, for the floors (``floors.ON_RUNG``). Asked at the end."""
        ...

    def close(self) -> None:
        """Gives up what the rung holds, however the run ended."""
        ...

    def ledger(self) -> Ledger: ...

    def audit(self) -> list[str]: ...


MakeRung = Callable[[Shape], Rung]


class StepFailed(Exception):
    """What execute raises when the workload says that it fails."""


class Unavailable(Exception):
    """A rung that this machine cannot run; the message says what is missing."""


class EngineRung:
    """The real engine over some runner: what all rungs have in common."""

    shared = False

    def __init__(self, shape: Shape, runner: Runner, oracle: Oracle) -> None:
        self.oracle = oracle
        self._engine = Engine(limits(shape), runner)
        self._readers = Readers(shape.byte_fallback)
        self.dead: dict[int, int] = {}  # requests whose row cannot be sampled, and where the token would stand

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    def submit(
        self, event: Submit, first_id: int, stop_ids: frozenset[int], stops: tuple[str, ...] = ()
    ) -> tuple[int, ...]:
        texts = self._readers.open(event, stops)
        in_commit = bool(stops) or event.fails("text") is not None
        submission = Submission(
            prompt=prompt_tokens(event.prompt),
            max_tokens=event.max_tokens,
            priority=event.priority,
            stop_ids=stop_ids,
            min_tokens=event.min_tokens,
            salt=event.salt or None,
            takes_hits=event.takes_hits,
            payloads=self.payloads(event, stop_ids),
            texts=spoken(texts, event) if in_commit else (),
        )
        requests = self._engine.scheduler.submit(submission, event.n)  # the door itself, which also judges max_tokens 0
        self._readers.add(requests, texts, in_commit)
        self.condemn(requests[0], event)
        return requests

    def condemn(self, request: int, event: Submit) -> None:
        """Notes that the row of an accepted request fails, if the workload says so. The rung's runner makes it true."""
        if (at := event.fails("sampling")) is not None:
            self.dead[request] = event.prompt_len + at - 1

    def payloads(self, event: Submit, stop_ids: frozenset[int]) -> tuple[object, ...]:
        """What travels with each choice to the runner; nothing where the runner reads nothing."""
        return ()

    def abort(self, request: int) -> None:
        self._engine.abort(request)

    def shutdown(self, requests: Iterable[int]) -> None:
        for request in requests:
            self._engine.abort(request)

    def expect(self, step: Mapping[str, Any], after: Mapping[str, Any], known: Mapping[int, Known]) -> None:
        pass

    def facts(self) -> Mapping[str, tuple[Fact, ...]]:
        return {}

    def closing(self) -> Mapping[str, tuple[Fact, ...]]:
        return {}

    def happened(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass

    def told(self, record: StepRecord) -> Mapping[int, str]:
        return self._readers.hear(record)

    def ledger(self) -> Ledger:
        return self._engine.ledger()

    def audit(self) -> list[str]:
        return self._engine.audit()


class _Rungs(Mapping[str, MakeRung]):
    """The class of each rung, by name. Raises ``Unavailable`` for one that this machine cannot run."""

    _classes: ClassVar = {
        "ledger": ("properties.rung_ledger", "LedgerRung"),
        "rows": ("properties.rung_rows", "RowsRung"),
        "staged": ("properties.rung_rows", "StagedRung"),
        "tiny": ("properties.rung_tiny", "TinyRung"),
        "native": ("properties.rung_tiny", "NativeRung"),
        "triton": ("properties.rung_tiny", "TritonRung"),
        "gpu": ("properties.rung_tiny", "GpuRung"),
        "wire": ("properties.wire", "WireRung"),
    }

    def __getitem__(self, name: str) -> MakeRung:
        module, made = self._classes[name]
        rung: MakeRung = getattr(import_module(module), made)
        return rung

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


RUNGS: Mapping[str, MakeRung] = _Rungs()


def limits(shape: Shape) -> Limits:
    return Limits(
        num_blocks=shape.blocks,
        block_size=shape.block_size,
        max_num_seqs=shape.rows,
        max_num_batched_tokens=shape.budget,
        max_model_len=shape.max_model_len,
        vocab_size=VOCAB,
        watermark=shape.watermark,
        max_waiting=shape.max_waiting,
        persistent_batch=shape.persistent_batch,
        prefix_cache=shape.prefix_cache,
        captures=shape.captures,
    )
