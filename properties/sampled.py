"""How a workload's requests are sampled, as a value that can be a key, and as what travels to the runner.

It is what ``Engine.submit`` makes of the same request, except that a seed which is not given is settled as 0: a workload
must say all that decides a run. For the same reason its filters and penalties follow from its seed (``STYLES``), and so does what
it wants to know beside its tokens (``REPORTS``): a workload has no words for them, and on the rungs with a real sampler every
kind of request must come up. Who takes no hits does so for the logprobs of its prompt, as over HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import attrs

from engine.engine import choice_seed
from engine.request import SamplingParams, SamplingSpec
from engine.trace import Submit, Workload

RUNGS_WITH_A_SAMPLER = ("rows", "staged", "tiny", "native", "triton", "gpu")
TEMPERATURES = (0.8, 0.0, 1.5, 0.0)  # in turn, so that every small workload has a sampled and a greedy request
STYLES: tuple[Mapping[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_p": 0.5},
    {"repetition_penalty": 3.0, "frequency_penalty": 1.5},
    {"min_p": 0.3},
    {"presence_penalty": 1.5, "logit_bias": {7: 2.0, 11: -2.0}},
    {"frequency_penalty": 1.0},
)
"""What a request with seed s asks for besides its temperature: the s-th, modulo their number."""
REPORTS: tuple[Mapping[str, Any], ...] = ({}, {"logprobs": 3}, {"logprobs": 0, "logits_digest": True})
"""The same, of the seed divided by the number of styles."""
PROMPT_LOGPROBS = 2  # likeliest ids beside each token of a prompt
FAR = len(STYLES) * len(REPORTS) * 2**58  # so far below, a seed is a different one of the same kind
PENALISED = len(STYLES) - 1
SEEDS = len(STYLES)  # few, so that solo runs are asked for again


@attrs.frozen
class Sampling:
    """``masked`` are the ids that cannot be sampled before ``min_tokens``."""

    temperature: float
    seed: int
    min_tokens: int
    masked: tuple[int, ...]
    style: int = 0
    reports: int = 0
    prompt: bool = False  # logprobs of the prompt are asked for

    @property
    def spec(self) -> SamplingSpec:
        params = SamplingParams(
            temperature=self.temperature,
            min_tokens=self.min_tokens,
            ignore_eos=True,
            prompt_logprobs=PROMPT_LOGPROBS if self.prompt else None,
            **STYLES[self.style],
            **REPORTS[self.reports],
        )
        return SamplingSpec(params, self.seed, self.masked)

    @property
    def asked(self) -> Mapping[str, bool]:
        """What is told beside the tokens."""
        reports = REPORTS[self.reports]
        return {
            "logprobs": "logprobs" in reports,
            "logits digest": "logits_digest" in reports,
            "prompt logprobs": self.prompt,
        }

    @property
    def asks(self) -> bool:
        """Whether anything beside tokens is told."""
        return self.prompt or bool(REPORTS[self.reports])


def sampling_of(event: Submit, stop_ids: frozenset[int]) -> list[Sampling]:
    """One for each choice of a submission."""
    masked = tuple(sorted(stop_ids)) if event.min_tokens else ()
    seed = event.seed or 0
    kind = seed % len(STYLES), seed // len(STYLES) % len(REPORTS), not event.takes_hits
    return [
        Sampling(event.temperature, choice_seed(seed, choice), event.min_tokens, masked, *kind)
        for choice in range(event.n)
    ]


def with_sampling(workload: Workload) -> Workload:
    """The same run with temperatures and seeds: only the rungs with a real sampler tell them apart, so the generator does not
    draw them. A workload that says how it is sampled stays as it is."""
    submits = [event for event in workload.events if isinstance(event, Submit)]
    if any(event.temperature or event.seed is not None for event in submits):
        return workload
    turn = int(workload.digest(), 16)  # where to begin, so that the first request is not always of the same kind
    asks = turn // 32 % 2 == 0
    warmed = {
        id(event): replace(
            event,
            temperature=0.8 if event.n > 1 else TEMPERATURES[(turn + number) % len(TEMPERATURES)],  # else all are equal
            seed=(turn // len(TEMPERATURES) + number) % SEEDS + (_asking(turn, number) if asks else 0),
            # without a prefix cache nobody takes hits, so that asking for the prompt's logprobs changes nothing else
            takes_hits=event.takes_hits and (workload.shape.prefix_cache or not asks or number % 2 == 0),
        )
        for number, event in enumerate(submits)
    }
    seeded = replace(workload, events=tuple(warmed.get(id(event), event) for event in workload.events))
    return _talkative(seeded) if turn % 6 == 0 else seeded


def _asking(turn: int, number: int) -> int:
    """What is added to the seeds of a workload that asks: most requests want more than tokens, some have a far seed."""
    return len(STYLES) * ((turn // 64 + number) % len(REPORTS)) - (FAR if (turn // 64 + number) % 5 == 4 else 0)


def _talkative(workload: Workload) -> Workload:
    """One answer of more different tokens than the sampler first has places for, penalised; and the room that it needs."""
    first = next((event for event in workload.events if isinstance(event, Submit)), None)
    if first is None:
        return workload
    long = replace(
        first,
        prompt=(("a", 2),),
        max_tokens=150,
        temperature=1.5,
        seed=PENALISED,
        stop_at=None,
        stop_text=None,
        min_tokens=0,
        n=1,
    )
    shape = workload.shape
    shape = replace(shape, max_model_len=192, blocks=max(shape.blocks, -(-152 // shape.block_size)))
    return replace(workload, shape=shape, events=tuple(long if event is first else event for event in workload.events))


def for_rung(workload: Workload, rung: str) -> Workload:
    return with_sampling(workload) if rung in RUNGS_WITH_A_SAMPLER else workload
