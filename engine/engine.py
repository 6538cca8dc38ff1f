"""The engine: the one object that decides, computes and is checked. The server and the harness drive this very class.

    submit / abort  ->  step()  ->  StepRecord

``step`` is one iteration of the rules: control plans, compute executes, control commits. Not thread-safe: one thread owns
an engine. What it decides depends on the sequence of submit and abort calls between steps, on the sampled tokens and on
step failures, and on nothing else.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from engine.control.audit import audit
from engine.control.counters import Counters
from engine.control.door import check_door
from engine.control.limits import Limits
from engine.control.plan import Runner
from engine.control.record import Ledger, StepRecord
from engine.control.request import Refusal, StopText, Submission
from engine.control.scheduler import Scheduler
from engine.request import InvalidRequest, SamplingParams, SamplingSpec, check_salt

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.loading.model import LoadedModel

Progress = Callable[[str, int, int], None]  # (stage, done, total)

_PARAM_OF_REASON = {
    "empty_prompt": "prompt",
    "token_out_of_range": "prompt",
    "max_tokens": "max_tokens",
    "max_model_len": "max_tokens",
    "pool": "max_tokens",
    "queue_full": None,
}


class Rejected(InvalidRequest):
    """The door's refusal (rule 1). ``reason`` is its stable word; ``param`` the field to blame, if there is one."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(_PARAM_OF_REASON.get(refusal.reason) or "", str(refusal), code=refusal.reason)
        self.reason = refusal.reason


@attrs.frozen
class Submitted:
    """One id and one seed for each choice. Sending the same request with a seed gives the same answer."""

    requests: tuple[int, ...]
    seeds: tuple[int, ...]


def choice_seed(seed: int, choice: int) -> int:
    """The seed of the ``choice``-th of n answers: the first is the request's own, so n = 1 and n > 1 agree on it.

    The others are a splitmix64 finaliser over (seed, choice) (Steele, Lea and Flood, OOPSLA 2014), not seed + 1, so that
    neighbouring seeds do not share answers.
    """
    if choice == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + choice * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1  # non-negative, so that it can be sent back as a seed


@attrs.define
class Seconds:
    """Where the time of all iterations went, for people; nothing is decided by it. ``execute`` includes the sampler, whose
    share the runner may tell as ``sample_seconds``; ``schedule`` is planning and committing, stop strings included."""

    schedule: float = 0.0
    execute: float = 0.0


class Tap(Protocol):
    """Is told of every event and iteration, in their order, on the thread that owns the engine; decides nothing."""

    def submitted(self, submission: Submission, n: int, requests: Sequence[int] | None) -> None:
        """``requests`` are the ids given out; None when the door refused all ``n``."""
        ...

    def aborted(self, request: int) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...


class Engine:
    """A scheduler and a runner. ``Engine.from_config`` loads a model; tests hand in their own parts.

    ``tap`` may be set before the first event: a recorder.
    """

    def __init__(
        self,
        limits: Limits,
        runner: Runner,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int | None = None,
        model: LoadedModel | None = None,
        capacity: Sequence[tuple[str, str]] = (),
        capture: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = limits
        self.runner = runner
        self.scheduler = Scheduler(limits)
        self._eos = eos_token_ids
        self._seed = seed
        self._model = model
        self._capacity = tuple(capacity)
        self.capture = capture  # what was decided about recorded graphs at start (engine/capture_plan.py)
        self.tap: Tap | None = None
        self.seconds = Seconds()

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        """Loads the model, sizes the pool, probes the kernels and records the graphs.

        Raises ``LoadError`` or ``ConfigError`` with one sentence that says what is wrong; nothing stays half loaded.
        """
        from engine.build import build

        return build(config, progress)

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise RuntimeError("this engine was made without a model")
        return self._model

    # Events ------------------------------------------------------------------------------------------------------

    def check(self, prompt: Sequence[int], params: SamplingParams, salt: str | None = None) -> None:
        """Raises what ``submit`` would raise for a request that can never be served; queues nothing."""
        check_salt(salt)
        params.check_vocabulary(self.limits.vocab_size)
        if params.n > self.limits.max_waiting:
            raise InvalidRequest("n", f"n is {params.n}, but the queue holds {self.limits.max_waiting} requests")
        try:
            check_door(self.limits, Submission(tuple(prompt), params.max_tokens), 0, 0)
        except Refusal as refusal:
            raise Rejected(refusal) from None

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        texts: Sequence[StopText] = (),
        salt: str | None = None,
        takes_hits: bool = True,
    ) -> Submitted:
        """Queues ``params.n`` requests. ``texts``: one per choice when there are stop strings, fed in commit (rule 13).

        Only requests of one ``salt`` share blocks in the prefix cache; without ``takes_hits``, and for prompt logprobs,
        every position is computed, though later requests may hit what it wrote (rule 11).
        Raises ``InvalidRequest`` for token ids outside the vocabulary in ``params`` or a bad salt and ``Rejected`` for the
        door's no.
        """
        check_salt(salt)
        params.check_vocabulary(self.limits.vocab_size)
        if params.stop and len(texts) != params.n:
            raise InvalidRequest(
                "stop", f"{params.n} choices with stop strings need {params.n} texts, got {len(texts)}"
            )
        seed = self._draw_seed() if params.seed is None else params.seed
        seeds = tuple(choice_seed(seed, choice) for choice in range(params.n))
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        # What min_tokens holds back also covers end-of-sequence under ignore_eos=False only: an ignored id may be sampled.
        masked = tuple(sorted(stop_ids)) if params.min_tokens else ()
        submission = Submission(
            prompt=tuple(prompt),
            max_tokens=params.max_tokens,
            priority=priority,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            texts=tuple(texts),
            payloads=tuple(SamplingSpec(params, seed, masked) for seed in seeds),
            salt=salt,
            takes_hits=takes_hits and params.prompt_logprobs is None,
        )
        try:
            requests = self.scheduler.submit(submission, params.n)
        except Refusal as refusal:
            if self.tap is not None:
                self.tap.submitted(submission, params.n, None)
            raise Rejected(refusal) from None
        if self.tap is not None:
            self.tap.submitted(submission, params.n, requests)
        return Submitted(requests, seeds)

    def abort(self, request_id: int) -> None:
        """Takes effect in the next iteration. Unknown, finished or repeated: no effect."""
        self.scheduler.abort(request_id)
        if self.tap is not None:
            self.tap.aborted(request_id)

    # Iterations --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepRecord:
        """One iteration (rule 3). A step that raises ends the requests of its plan with reason ``error``; the engine goes on."""
        record = self._iterate()
        if self.tap is not None:
            self.tap.stepped(record)
        return record

    def _iterate(self) -> StepRecord:
        began = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        self.seconds.schedule += planned - began
        try:
            sampled = self.runner.execute(plan)
        except Exception as error:  # noqa: BLE001 - rule 3: whatever compute raised is the end of this plan only
            return self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
        except BaseException:  # Ctrl-C: an iteration that stays open would let no other follow
            self.scheduler.fail(plan, "interrupted")
            raise
        finally:
            executed = time.perf_counter()
            self.seconds.execute += executed - planned
        record = self.scheduler.commit(plan, sampled)
        self.seconds.schedule += time.perf_counter() - executed
        return record

    # Readings ----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        return self.scheduler.counters

    def ledger(self) -> Ledger:
        return self.scheduler.ledger()

    def audit(self) -> list[str]:
        """Violated invariants, between two iterations; empty when everything holds."""
        return audit(self.scheduler)

    def capacity(self) -> tuple[tuple[str, str], ...]:
        """What was settled at start, as (name, value) rows for people."""
        return self._capacity

    def _draw_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(63)
        return choice_seed(self._seed, self.scheduler.counters.submitted + 1)
