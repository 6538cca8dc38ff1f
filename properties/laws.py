"""Laws without a model: a request is told the same whatever else is changed (promise P2). The check of whole engines.

Each law is one changed setting. The base run is all requests together in an ample engine; a law runs them again with its
change and compares, request by request: tokens, digests of the raw logits behind every token, reason. There is no
specification and no oracle here, so a law sees what both sides of lockstep could share: kernels, sampler, arithmetic.

What it cannot see: a mistake that is the same in both runs. Why it has teeth: a law also counts that its change really took
place (preemptions, hits, padded rows, ...), and one whose change never did has held nothing and fails; and ``test_laws.py``
arms, for each law, a mistake that repeating the run does not show and that the law does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from engine.config import EngineConfig
from engine.control.limits import Limits
from engine.engine import Engine
from properties.checks import Fact, Finding
from properties.guard import CPU_SECONDS, Guard
from properties.law_play import Ask, Failed, Played, Told, play, preempting_every

CHECK = "laws"


class MakeEngine(Protocol):
    """Engines of one model. They may share its weights, which nothing writes to."""

    def __call__(self, config: EngineConfig) -> Engine: ...

    def reload(self) -> MakeEngine:
        """The same model read again, as after a restart."""
        ...


@attrs.frozen
class Ground:
    """One list of requests, the settings of its base run, and what that run told."""

    asks: tuple[Ask, ...]
    config: EngineConfig
    make: MakeEngine
    base: Played
    limits: Limits
    guard: Guard

    def play(self, engine: Engine, asks: Sequence[Ask] | None = None, **options: Any) -> Played:
        return play(engine, self.asks if asks is None else asks, guard=self.guard, **options)

    def again(self, asks: Sequence[Ask] | None = None, *, every: int | None = None, **changes: Any) -> Played:
        """A run of a new engine with ``changes`` to the settings, preempting ``every`` so many iterations."""
        lever = None if every is None else preempting_every(every)
        return self.play(self.make(attrs.evolve(self.config, **changes)), asks, lever=lever)

    @property
    def smallest_pool(self) -> int:
        """Blocks that the most demanding request needs: the door admits no smaller pool."""
        sizes = (len(ask.prompt) + (ask.params.max_tokens or 0) - 1 for ask in self.asks)
        return max(self.limits.blocks_for(size) for size in sizes)


@attrs.frozen
class Try:
    """One changed run: what the requests were told, by their number in the list, and how often the change took place."""

    label: str
    told: Mapping[int, Sequence[Told]]
    occurred: Mapping[str, int]


@attrs.frozen
class Law:
    """``change`` completes "a request is told the same"; ``tries`` makes the changed runs. Every count that they report must
    be above zero over all of the lists that a check goes through."""

    name: str
    change: str
    tries: Callable[[Ground], Iterable[Try]]


@attrs.define
class Row:
    """What a law compared. ``occurred`` adds up over all lists."""

    law: str
    requests: int = 0
    tokens: int = 0
    occurred: Counter[str] = attrs.field(factory=Counter)

    @property
    def idle(self) -> list[str]:
        """What should have taken place and never did."""
        return [what for what, count in self.occurred.items() if count <= 0] or ([] if self.tokens else ["tokens"])


@attrs.frozen
class Report:
    """``findings``: broken laws, ``missed``: laws that compared nothing worth comparing. The check holds without either."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    missed: tuple[str, ...]


def base_config(asks: Sequence[Ask], **settings: Any) -> EngineConfig:
    """An ample engine for ``asks``: six rows, blocks of four, nobody is preempted. ``settings`` replace any of it."""
    longest = max(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in asks)
    choices = sum(ask.params.n for ask in asks)
    ample: dict[str, Any] = {
        "device": "cpu",
        "block_size": 4,
        "num_kv_blocks": 2 * choices * -(-longest // 4),
        "max_num_seqs": 6,
        "max_num_batched_tokens": max(64, longest),
        "max_model_len": longest,
        "watermark": 0,
    }
    return EngineConfig(**ample | settings)


def check_laws(
    make: MakeEngine,
    lists: Iterable[Sequence[Ask]],
    *,
    only: Iterable[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    cpu_seconds: float = CPU_SECONDS,
) -> Report:
    """Holds every law, or those named in ``only``, against each list of requests.

    ``settings`` change the base run. A changed run that raises breaks its law; a base run that does is a finding of the check
    ``raises``, and its list holds no law. An iteration of more than ``cpu_seconds`` of CPU time ends the whole check, since the
    next would take as long again. Raises ``KeyError`` for a name that is no law.
    """
    chosen = [LAWS[name] for name in (LAWS if only is None else only)]
    rows = {law.name: Row(law.name) for law in chosen}
    findings: list[Finding] = []
    with Guard(cpu_seconds) as guard:
        for number, asks in enumerate(lists):
            try:
                findings += _hold_all(chosen, number, make, asks, base_config(asks, **settings or {}), rows, guard)
            except _Endless as ended:
                findings += ended.findings
                break
    missed = [f"{row.law}: {what} never occurred" for row in rows.values() for what in row.idle]
    return Report(tuple(rows.values()), tuple(findings), tuple(missed))


class _Endless(Exception):
    """An iteration took too long; ``findings`` of its list, up to that one."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        super().__init__()
        self.findings = list(findings)


def _hold_all(
    laws: Sequence[Law],
    number: int,
    make: MakeEngine,
    asks: Sequence[Ask],
    config: EngineConfig,
    rows: Mapping[str, Row],
    guard: Guard,
) -> list[Finding]:
    """What ``laws`` find in one list. Raises ``_Endless``."""
    findings: list[Finding] = []
    engine = make(config)
    try:
        base = play(engine, asks, guard=guard)
    except Failed as failed:
        found = Finding("raises", failed.iteration, f"the base run of list {number}: {failed}")
        if failed.overtime:
            raise _Endless([found]) from None
        return [found]
    ground = Ground(tuple(asks), config, make, base, engine.limits, guard)
    for law in laws:
        try:
            findings += _hold(law, number, ground, rows[law.name])
        except _Endless as ended:
            raise _Endless([*findings, *ended.findings]) from None
    return findings


def _hold(law: Law, number: int, ground: Ground, row: Row) -> list[Finding]:
    """What one law finds in one list; ``row`` is added to. Raises ``_Endless``."""
    findings: list[Finding] = []
    try:
        for tried in law.tries(ground):
            row.occurred.update(tried.occurred)
            row.requests += len(tried.told)
            row.tokens += sum(len(one.tokens) for choices in tried.told.values() for one in choices)
            findings += _compare(law, number, tried, ground)
    except Failed as failed:
        findings.append(Finding(CHECK, failed.iteration, f"{law.name}: list {number} raised {failed}"))
        if failed.overtime:
            raise _Endless(findings) from None
    except Exception as error:  # noqa: BLE001 - the engine could not even be made
        said = f"{law.name}: list {number} raised {type(error).__name__}: {error}"
        findings.append(Finding(CHECK, 1, said))
    return findings


def _compare(law: Law, number: int, tried: Try, ground: Ground) -> Iterable[Finding]:
    """One finding for each request that was told something else, at the iteration of its first other token."""
    for request, choices in tried.told.items():
        pairs = zip(choices, ground.base.told[request], strict=True)
        for choice, (mine, base) in enumerate(pairs):
            if mine != base:
                at = _first_difference(mine, base)
                where = f"list {number}, request {request}, choice {choice}"
                facts = (Fact("changed run", str(mine), str(base)),)
                iteration = mine.iterations[at] + 1 if at < len(mine.iterations) else 1
                yield Finding(CHECK, iteration, f"{law.name} ({tried.label}): {where} differs at token {at}", facts)
                break


def _first_difference(mine: Told, base: Told) -> int:
    pairs = zip(zip(mine.tokens, mine.digests, strict=True), zip(base.tokens, base.digests, strict=True), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(mine.tokens), len(base.tokens)))


# The laws ----------------------------------------------------------------------------------------------------------------


def _all(label: str, played: Played, **occurred: int) -> Try:
    return Try(label, dict(enumerate(played.told)), {name.replace("_", " "): n for name, n in occurred.items()})


def _neighbours(ground: Ground) -> Iterable[Try]:
    for number, ask in enumerate(ground.asks):
        alone = ground.again([attrs.evolve(ask, at=0)])
        beside = ground.base.happened["steps with neighbours"]
        yield Try(f"request {number} alone", {number: alone.told[0]}, {"steps with neighbours": beside})


def _order(ground: Ground) -> Iterable[Try]:
    last = max(ask.at for ask in ground.asks)
    backwards = [attrs.evolve(ask, at=last - ask.at) for ask in reversed(ground.asks)]
    played = ground.again(backwards)
    moved = sum(a != b for a, b in zip(reversed(played.rows), ground.base.rows, strict=True))
    yield Try("reversed", dict(enumerate(reversed(played.told))), {"other rows": moved})


def _rows(ground: Ground) -> Iterable[Try]:
    for rows in (1, 2):
        played = ground.again(max_num_seqs=rows)
        yield _all(f"{rows} rows", played, iterations_in_which_somebody_waited=played.happened["waited"])


def _pool(ground: Ground) -> Iterable[Try]:
    for spare in (0, 2):
        played = ground.again(num_kv_blocks=ground.smallest_pool + spare)
        yield _all(f"{ground.smallest_pool + spare} blocks", played, preemptions=played.happened["preemptions"])


def _block_size(ground: Ground) -> Iterable[Try]:
    for size in (1, 7, 16):
        larger = ground.config.num_kv_blocks or 0
        played = ground.again(block_size=size, num_kv_blocks=larger * (4 if size == 1 else 1))
        changed = abs(played.happened["blocks"] - ground.base.happened["blocks"])
        yield _all(f"blocks of {size}", played, blocks_more_or_less=changed)


def _budget(ground: Ground) -> Iterable[Try]:
    rows = ground.config.max_num_seqs
    for budget in (rows, rows + 5):
        played = ground.again(max_num_batched_tokens=budget)
        yield _all(f"{budget} tokens an iteration", played, cut_prompts=played.happened["cut prompts"])


def _captures(ground: Ground) -> Iterable[Try]:
    rows = ground.config.max_num_seqs
    longest = ground.limits.blocks_for(ground.limits.max_model_len)
    one = ground.again(capture_rows=(rows,), capture_widths=(longest,))
    yield _all("one graph", one, padded_rows=one.happened["padded rows"])
    few = ground.again(capture_rows=(1, 3), capture_widths=(2, longest - 1))
    yield _all("few graphs", few, uncaptured_steps=few.happened["uncaptured"], replays=few.happened["replays"])


def _graphs(ground: Ground) -> Iterable[Try]:
    played = ground.again(enforce_eager=True)
    replays = ground.base.happened["replays"]
    yield _all("no graphs", played, eager_steps=played.happened["eager steps"], replays_before=replays)


def _persistent_batch(ground: Ground) -> Iterable[Try]:
    played = ground.again(persistent_batch=False)
    moves = ground.base.happened["moves"]
    yield _all("rows stay", played, scattered_steps=played.happened["scattered"], moves_before=moves)


def _prefix_cache(ground: Ground) -> Iterable[Try]:
    played = ground.again(enable_prefix_caching=False)
    hits = ground.base.happened["cached tokens"]
    yield _all("no prefix cache", played, cached_tokens_before=hits - played.happened["cached tokens"])


def _warm(ground: Ground) -> Iterable[Try]:
    engine = ground.make(ground.config)
    first, second = (ground.play(engine) for _ in range(2))
    more = second.happened["cached tokens"] - first.happened["cached tokens"]
    yield _all("the second time", second, more_cached_tokens=more)


def _preemption(ground: Ground) -> Iterable[Try]:
    whole = (
        ground.config.max_num_seqs * ground.limits.max_model_len
    )  # whoever comes back samples at once, or nobody would end
    for every in (1, 2, 5):
        cached = every != 2  # without the cache, everything is computed again
        played = ground.again(every=every, enable_prefix_caching=cached, max_num_batched_tokens=whole)
        yield _all(f"every {every} iterations", played, preemptions=played.happened["preemptions"])


def _aborts(ground: Ground) -> Iterable[Try]:
    """Beside each request another one arrives, half of them with the same prompt, and is aborted soon after."""
    asks: list[Ask] = []
    for number, ask in enumerate(ground.asks):
        prompt = ask.prompt if number % 2 else tuple(reversed(ask.prompt))
        params = attrs.evolve(ask.params, seed=number, temperature=1.0, stop_token_ids=(), min_tokens=0)
        asks += [Ask(prompt, params, at=ask.at, abort=ask.at + 1 + number // 2 % 3), ask]
    played = ground.again(asks)
    aborted = played.happened["aborted while running"]
    yield Try("aborted neighbours", dict(enumerate(played.told[1::2])), {"aborted while running": aborted})


def _restart(ground: Ground) -> Iterable[Try]:
    """An engine is left in the middle of its work; another process would read the model again and be asked again."""
    left = ground.play(ground.make(ground.config), stop_after=max(ask.at for ask in ground.asks) // 2 + 2)
    fresh = ground.play(ground.make.reload()(ground.config))
    yield _all("a new engine", fresh, unfinished_requests_left_behind=left.happened["unfinished"])


def _choices(ground: Ground) -> Iterable[Try]:
    """Each of n choices is what its own reported seed gives, asked alone."""
    for number, ask in enumerate(ground.asks):
        if ask.params.n == 1:
            continue
        told = ground.base.told[number]
        each = [Ask(ask.prompt, attrs.evolve(ask.params, n=1, seed=one.seed)) for one in told]
        played = ground.again(each)
        yield Try(f"request {number}, one by one", {number: [one[0] for one in played.told]}, {"choices": len(told)})


def _mixture(ground: Ground) -> Iterable[Try]:
    """A small pool, chunks, one wide graph, other blocks and forced preemption, all in one run."""
    rows = ground.config.max_num_seqs - 1
    longest = -(-ground.limits.max_model_len // 2)
    played = ground.again(
        every=4,
        block_size=2,
        num_kv_blocks=ground.smallest_pool * 2 + 3,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + 2,
        capture_rows=(rows,),
        capture_widths=(longest,),
    )
    names = ("preemptions", "cut prompts", "cached tokens", "padded rows")
    yield Try("all at once", dict(enumerate(played.told)), {name: played.happened[name] for name in names})


LAWS: Mapping[str, Law] = {
    law.name: law
    for law in (
        Law("neighbours", "alone and beside others", _neighbours),
        Law("order", "in whatever order requests arrive", _order),
        Law("rows", "with as few rows as one", _rows),
        Law("pool", "in the smallest pool that the door admits", _pool),
        Law("block size", "on blocks of any size", _block_size),
        Law("budget", "whole and cut into chunks", _budget),
        Law("captures", "with few graphs, padded or missing", _captures),
        Law("graphs", "replayed and eager", _graphs),
        Law("persistent batch", "moved to the first rows and not moved", _persistent_batch),
        Law("prefix cache", "computed and found in the prefix cache", _prefix_cache),
        Law("warm", "the first time and asked again", _warm),
        Law("preemption", "preempted again and again and not at all", _preemption),
        Law("aborts", "whoever leaves beside it", _aborts),
        Law("restart", "by an engine that was made again", _restart),
        Law("choices", "as one of n choices and by the seed of that choice", _choices),
        Law("mixture", "with many of these changed at once", _mixture),
    )
}
