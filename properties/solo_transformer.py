"""A request alone on the tiny transformer: one runner of one row and one block, so that the cache is contiguous; the whole
prompt in one chunk, every step eager, nobody beside it. No paging, no batch, no graph, no scheduler.

It runs the engine's kernels and sampler, so it cannot see a mistake in what they compute (tests/properties compares its
logits with a plain fp64 forward), and it runs them unharmed: a fault that is armed around it does not reach it.
"""

from __future__ import annotations

import functools

import attrs

from engine.compute.runner import PlanRunner
from engine.control.limits import Limits
from engine.control.plan import Chunk, Decode, Eager, Plan, Sampled, Seat
from engine.request import SamplingSpec
from engine.trace import VOCAB
from properties.arming import disarmed
from properties.sampled import Sampling
from properties.tiny_network import tiny_network


@attrs.frozen
class Question:
    """All that a solo run depends on, as a key. ``longest`` is the length limit."""

    kernels: str
    longest: int
    prompt: tuple[int, ...]
    sampling: Sampling


class SoloRunner:
    """``samples`` are what the sampler returned; one runner answers all questions on the same kernels and of one length limit."""

    def __init__(self, kernels: str, longest: int) -> None:
        limits = Limits(
            num_blocks=1,
            block_size=longest,
            max_num_seqs=1,
            max_num_batched_tokens=longest,
            max_model_len=longest,
            vocab_size=VOCAB,
        )
        self.runner = PlanRunner(limits, tiny_network(kernels))
        self._seated = False

    def run(self, prompt: tuple[int, ...], sampling: SamplingSpec, count: int) -> list[Sampled]:
        """The first ``count`` samples. Raises ``ValueError`` when they do not fit the length limit."""
        if len(prompt) + count > self.runner.limits.max_model_len:
            raise ValueError(f"{len(prompt)} + {count} tokens, at most {self.runner.limits.max_model_len}")
        seat = Seat(0, 0, prompt, len(prompt), (0,), sampling)
        vacated = (0,) if self._seated else ()
        self._seated = True
        chunk = Chunk(0, 0, 0, prompt, samples=True)
        samples = [*self.runner.execute(Plan(0, vacated=vacated, seated=(seat,), chunks=(chunk,)))]
        while len(samples) < count:
            decode = Decode(0, 0, len(prompt) + len(samples) - 1, samples[-1].token)
            samples += self.runner.execute(Plan(0, decodes=(decode,), launch=Eager("alone")))
        return samples


@functools.cache
def _runner(kernels: str, longest: int) -> SoloRunner:
    return SoloRunner(kernels, longest)


class Alone:
    """The answer to one question, as far as somebody asked. A longer one is computed from the beginning."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._samples: tuple[Sampled, ...] = ()
        self._tokens: tuple[int, ...] = ()

    def tokens(self, count: int) -> tuple[int, ...]:
        """The first ``count`` tokens of the solo run."""
        self.samples(count)
        return self._tokens[:count]

    def samples(self, count: int) -> tuple[Sampled, ...]:
        """At least the first ``count`` of them, with all that was told beside them."""
        if count > len(self._tokens):
            asked = self._question
            with disarmed():
                samples = _runner(asked.kernels, asked.longest).run(asked.prompt, asked.sampling.spec, count)
            self._samples, self._tokens = tuple(samples), tuple(sample.token for sample in samples)
        return self._samples


@functools.lru_cache(maxsize=20_000)
def alone(question: Question) -> Alone:
    """Shared by all workloads of a process: a solo run depends on its question and on nothing else."""
    return Alone(question)
