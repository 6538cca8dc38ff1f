"""One run of the real engine over a list of requests: what each of them was told, and what happened on the way.

The list is the whole input: which request arrives before which iteration, and which is aborted when. ``draw_asks`` makes such
lists from a number: greedy and sampled requests with every kind of parameter, prompts that share their beginnings, several
choices, stop tokens that do occur.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from engine.control.plan import Plan, Replay, Sampled
from engine.control.record import StepRecord
from engine.engine import Engine
from engine.request import SamplingParams
from properties.guard import Guard, Overtime

Lever = Callable[[Engine], None]  # what a test does to an engine before it runs
MOST_ITERATIONS = 5_000
TINY, DEFAULT = "tiny", "default"  # names of models


@attrs.frozen
class Ask:
    """Arrives before iteration ``at`` and is aborted before iteration ``abort``, both counted from the start of the run."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at: int = 0
    abort: int | None = None


@attrs.frozen
class Told:
    """What one choice was told. ``digests`` are of the raw logits behind each token; iterations are not compared."""

    tokens: tuple[int, ...]
    digests: tuple[str | None, ...]
    reason: str
    stop: int | str | None
    seed: int = attrs.field(eq=False, default=0)
    iterations: tuple[int, ...] = attrs.field(eq=False, repr=False, default=())


@attrs.frozen
class Played:
    """``told``: by request, then choice; ``rows``: the row that each request's first choice was first given."""

    told: tuple[tuple[Told, ...], ...]
    rows: tuple[int | None, ...]
    happened: Counter[str]

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) for choices in self.told for one in choices)


class Failed(RuntimeError):
    """The engine raised, or a call to it did not come back in time (``overtime``). ``iteration`` counts from 1."""

    def __init__(self, told: str, iteration: int, *, overtime: bool) -> None:
        super().__init__(told)
        self.iteration = iteration
        self.overtime = overtime


@attrs.define
class _Answer:
    seed: int
    sampled: list[Sampled] = attrs.field(factory=list)
    iterations: list[int] = attrs.field(factory=list)
    reason: str = "none"
    stop: int | str | None = None
    row: int | None = None

    def told(self) -> Told:
        tokens, digests = tuple(s.token for s in self.sampled), tuple(s.digest for s in self.sampled)
        return Told(tokens, digests, self.reason, self.stop, self.seed, tuple(self.iterations))


def play(
    engine: Engine,
    asks: Sequence[Ask],
    *,
    lever: Lever | None = None,
    stop_after: int | None = None,
    guard: Guard | None = None,
) -> Played:
    """Runs ``asks`` until every one has ended, or for ``stop_after`` iterations. ``guard``, when it is entered, bounds each
    iteration. Raises ``Failed`` for whatever the engine raises and when no end comes."""
    if lever is not None:
        lever(engine)
    played = _Play(engine, asks)
    bounded = guard or Guard()
    last = max((max(ask.at, ask.abort or 0) for ask in asks), default=0)
    iteration = 0
    while iteration != stop_after:
        try:
            if iteration > last and not bounded(lambda: engine.has_work):
                break
            bounded(lambda: played.step(iteration))  # noqa: B023 - called at once
        except (Exception, Overtime) as error:  # the engine under test may raise whatever it likes
            raise Failed(bounded.told(error), iteration + 1, overtime=isinstance(error, Overtime)) from error
        iteration += 1
        if iteration > MOST_ITERATIONS:
            raise Failed(f"no end after {iteration - 1} iterations", iteration, overtime=False)
    return played.result()


class _Play:
    """What the requests of one run have been told so far."""

    def __init__(self, engine: Engine, asks: Sequence[Ask]) -> None:
        self._engine, self._asks = engine, asks
        self._answers: list[list[_Answer]] = [[] for _ in asks]
        self._of: dict[int, _Answer] = {}
        self._ids: list[tuple[int, ...]] = [() for _ in asks]
        self._happened: Counter[str] = Counter()

    def step(self, iteration: int) -> None:
        """What arrives before ``iteration``, what is aborted before it, and the iteration."""
        for index, ask in enumerate(self._asks):
            if ask.at == iteration:
                submitted = self._engine.submit(ask.prompt, ask.params)
                self._ids[index] = submitted.requests
                self._answers[index] = [_Answer(seed) for seed in submitted.seeds]
                self._of |= dict(zip(submitted.requests, self._answers[index], strict=True))
        for index, ask in enumerate(self._asks):
            for request in self._ids[index] if ask.abort == iteration else ():
                self._engine.abort(request)
        _take(self._engine.step(), self._of, self._happened)
        self._happened["waited"] += bool(self._engine.scheduler.waiting)

    def result(self) -> Played:
        self._happened["unfinished"] = len(self._engine.scheduler.requests)
        told = tuple(tuple(answer.told() for answer in choices) for choices in self._answers)
        rows = tuple(choices[0].row if choices else None for choices in self._answers)
        return Played(told, rows, self._happened)


def _take(record: StepRecord, of: dict[int, _Answer], happened: Counter[str]) -> None:
    if record.error is not None:
        raise RuntimeError(f"iteration {record.iteration} failed: {record.error}")
    _count(record.plan, happened)
    happened["preemptions"] += len(record.preempted)
    happened["aborted while running"] += len({end.request for end in record.aborted} & set(record.reaped))
    for seat in record.plan.seated:
        if seat.request in of and of[seat.request].row is None:
            of[seat.request].row = seat.row
    for request, sampled in record.sampled:
        of[request].sampled.append(sampled)
        of[request].iterations.append(record.iteration)
    for end in (*record.aborted, *record.finished):
        of[end.request].reason, of[end.request].stop = end.reason, end.stop


def _count(plan: Plan, happened: Counter[str]) -> None:
    working = {chunk.request for chunk in plan.chunks} | {decode.request for decode in plan.decodes}
    happened["steps with neighbours"] += len(working) > 1
    happened["cut prompts"] += sum(not chunk.samples for chunk in plan.chunks)
    happened["moves"] += len(plan.moves)
    happened["blocks"] += sum(len(seat.table) for seat in plan.seated) + len(plan.grown)
    seated = {seat.request for seat in plan.seated}
    happened["cached tokens"] += sum(chunk.start for chunk in plan.chunks if chunk.request in seated)
    if isinstance(plan.launch, Replay):
        happened["replays"] += 1
        happened["padded rows"] += plan.launch.padding
    elif plan.launch is not None:
        happened["eager steps"] += 1
        happened[plan.launch.reason] += 1


def preempting_every(k: int) -> Lever:
    """Before every k-th iteration grows its tables, one running request is preempted, another one each time (rule 6's act
    without its cause). Set on this one scheduler from outside."""

    def lever(engine: Engine) -> None:
        scheduler: Any = engine.scheduler
        real = scheduler._grow

        def grow() -> Any:
            preempted, vacated = [], []
            running = scheduler.running
            if running and scheduler.iteration % k == 0:
                victim = running[scheduler.iteration // k % len(running)]
                preempted, vacated = [victim.id], [scheduler._preempt(victim)]
            grown, more, rows = real()
            return grown, (*preempted, *more), [*vacated, *rows]

        scheduler._grow = grow

    return lever


# Request lists -----------------------------------------------------------------------------------------------------------

_STYLES: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 8},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"top_p": 0.8},
    {"min_p": 0.05},
)


def draw_asks(
    seed: int,
    *,
    ids: tuple[int, int],
    count: int = 8,
    prompts: tuple[int, int] = (1, 26),
    tokens: tuple[int, int] = (3, 11),
) -> list[Ask]:
    """``count`` requests as a function of ``seed``. ``ids``: prompts are drawn from this range; ``prompts``, ``tokens``: the
    shortest and longest prompt and answer."""
    draw = random.Random(seed)
    streams = [[draw.randrange(*ids) for _ in range(prompts[1])] for _ in range(2)]
    return [_ask(draw, index, streams, ids, prompts, tokens) for index in range(count)]


def _ask(
    draw: random.Random,
    index: int,
    streams: list[list[int]],
    ids: tuple[int, int],
    prompts: tuple[int, int],
    tokens: tuple[int, int],
) -> Ask:
    length = draw.randint(*prompts)
    shared = length if index % 4 == 3 else length * 3 // 4
    prompt = streams[index % 2][:shared] + [draw.randrange(*ids) for _ in range(length - shared)]
    most = draw.randint(*tokens)
    sampling: dict[str, Any] = {"temperature": 0.0} if index % 2 else {"temperature": draw.choice((0.7, 1.0, 1.5))}
    sampling |= _STYLES[draw.randrange(len(_STYLES)) if index else 2]
    if draw.random() < 0.5:
        stops = tuple(draw.randrange(*ids) for _ in range(24))
        sampling |= {"stop_token_ids": stops, "min_tokens": draw.randint(0, min(2, most))}
    if index % 4 == 2:
        sampling["n"] = 2
    params = SamplingParams(
        max_tokens=most, seed=draw.getrandbits(40), ignore_eos=draw.random() < 0.5, logits_digest=True, **sampling
    )
    return Ask(tuple(prompt), params, at=draw.randint(0, index))
