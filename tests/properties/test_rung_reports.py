"""Logprobs, those of prompts and digests of logits are asked for where there is a sampler, and are those of the request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest

from engine.control.plan import Sampled
from engine.native.build import BuildError
from engine.native.runner import library
from engine.trace import Shape, Submit, Workload
from properties.checks import Finding
from properties.floors import ENOUGH, ON_RUNG, Floors
from properties.generate import RandomSource, workload
from properties.killing import numbered, outcome
from properties.lockstep import run
from properties.rung_tiny import NativeRung, TinyRung
from properties.sampled import FAR, PROMPT_LOGPROBS, REPORTS, STYLES, sampling_of, with_sampling

Answers = list[Sampled]
COUNT = 16


@pytest.fixture(params=[TinyRung, NativeRung], ids=["tiny", "native"])
def rung(request: pytest.FixtureRequest) -> type[TinyRung]:
    if request.param is NativeRung:
        try:
            library()
        except BuildError as error:
            pytest.skip(f"no C++ compiler for the native kernels: {error}")
    kind: type[TinyRung] = request.param
    return kind


def drawn(count: int = COUNT) -> Iterator[Workload]:
    return (with_sampling(workload(RandomSource(f"reports {number}"))) for number in range(count))


def test_they_are_asked_for_often_enough_and_hold(rung: type[TinyRung]) -> None:
    floors = Floors(rung.name)
    for number, given in enumerate(drawn()):
        ran = run(given, make_rung=rung)
        assert ran.first is None, number
        floors.add(ran.occurred)
    rare = {name: floors.hits[name] for name, share in ON_RUNG[rung.name].items() if floors.hits[name] < share * COUNT}
    assert rare == {}


# Mistakes ---------------------------------------------------------------------------------------------------------


def _of_a_neighbour(field: str) -> Callable[[Answers, Answers], Answers]:
    """Who asked is told what the one before it in the batch was to be told."""

    def mix(now: Answers, before: Answers) -> Answers:
        asked = [at for at, got in enumerate(now) if getattr(got, field) is not None]
        mixed = list(now)
        for at, other in zip(asked, (*asked[-1:], *asked[:-1]), strict=True):
            mixed[at] = attrs.evolve(now[at], **{field: getattr(now[other], field)})
        return mixed

    return mix


def _stale(field: str) -> Callable[[Answers, Answers], Answers]:
    """Who asked is told what somebody was told in the step before."""

    def mix(now: Answers, before: Answers) -> Answers:
        told = [getattr(got, field) for got in before if getattr(got, field) is not None]
        return [
            attrs.evolve(got, **{field: told[0]}) if told and getattr(got, field) is not None else got for got in now
        ]

    return mix


def _prompt(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[Answers, Answers], Answers]:
    return lambda now, before: [
        got if got.prompt is None else attrs.evolve(got, prompt=change(got.prompt)) for got in now
    ]


MISTAKES: dict[str, Callable[[Answers, Answers], Answers]] = {
    "logprobs of a neighbour": _of_a_neighbour("logprobs"),
    "digest of a neighbour": _of_a_neighbour("digest"),
    "logprobs of the step before": _stale("logprobs"),
    "digest of the step before": _stale("digest"),
    "prompt logprobs one place too far": _prompt(lambda told: (*told[1:], *told[-1:])),
    "prompt logprobs without the last": _prompt(lambda told: told[:-1]),
    "prompt logprobs never": lambda now, before: [attrs.evolve(got, prompt=None) for got in now],
    "one more than was asked": lambda now, before: [
        got if got.logprobs is None else attrs.evolve(got, logprobs=attrs.evolve(got.logprobs, top=((0, 0.0),)))
        for got in now
    ],
    "digest for all": lambda now, before: [attrs.evolve(got, digest=got.digest or "0" * 32) for got in now],
    "last bit": lambda now, before: [
        got
        if got.logprobs is None
        else attrs.evolve(got, logprobs=attrs.evolve(got.logprobs, chosen=got.logprobs.chosen * (1 + 2**-52)))
        for got in now
    ],
}


def _mistaken(rung: type[TinyRung], mix: Callable[[Answers, Answers], Answers]) -> type[TinyRung]:
    """A rung whose own sampler tells what ``mix`` makes of this step's answers and the last one's."""

    class Mistaken(rung):  # type: ignore[valid-type, misc]
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            sampler: Any = self.runner.sampler
            honest, last = sampler.sample, Answers()

            def sample(logits: Any, rows: Sequence[int], positions: Sequence[int]) -> Answers:
                now = honest(logits, rows, positions)
                mixed = mix(now, last)
                last[:] = now
                return mixed

            sampler.sample = sample

    return Mistaken


def _seen(rung: type[TinyRung], mistake: str) -> Finding | None:
    mistaken = _mistaken(rung, MISTAKES[mistake])
    return next((found for given in drawn() if (found := run(given, make_rung=mistaken).first) is not None), None)


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_report_that_is_not_its_own_is_seen(rung: type[TinyRung], mistake: str) -> None:
    found = _seen(rung, mistake)
    assert found is not None
    assert found.check == "tokens"
    assert all("logprobs" in fact.name or "digest" in fact.name for fact in found.facts)


# What is asked ----------------------------------------------------------------------------------------------------


def test_what_a_request_asks_follows_from_its_seed_and_its_hits() -> None:
    for seed in (*range(len(STYLES) * len(REPORTS)), 5 - FAR, 12 - FAR):
        for takes_hits in (True, False):
            (plain,) = sampling_of(Submit(0, (("a", 2),), 3, seed=seed, takes_hits=takes_hits), frozenset())
            params = plain.spec.params
            assert params.prompt_logprobs == (None if takes_hits else PROMPT_LOGPROBS)
            asked = REPORTS[seed // len(STYLES) % len(REPORTS)]
            assert (params.logprobs, params.logits_digest) == (asked.get("logprobs"), asked.get("logits_digest", False))
            assert plain.asks == (bool(asked) or not takes_hits)
            assert plain.style == seed % len(STYLES)


def test_far_seeds_and_every_report_come_up() -> None:
    seeds = {event.seed or 0 for given in drawn(60) for event in given.events if isinstance(event, Submit)}
    assert min(seeds) < -(2**62)
    assert {seed // len(STYLES) % len(REPORTS) for seed in seeds} == set(range(len(REPORTS)))


def test_a_rung_on_which_nobody_asks_misses_its_floors() -> None:
    floors = Floors("native")
    floors.merge({"runs": ENOUGH, "hits": {}})
    assert sum("compared:" in line for line in floors.missed()) == 3


def test_on_rows_nobody_is_told_what_whoever_sat_there_before_asked_for() -> None:
    """There logits are digests, so what a report says is of no account; whether there is one is compared (fault L08)."""
    reused = outcome(numbered("rows", 1, 5), "L08", rung="rows")
    assert reused.first is not None
    assert "told" in {fact.engine for fact in reused.first.facts}
    assert outcome(numbered("rows", 1, 5), None, rung="rows").first is None
