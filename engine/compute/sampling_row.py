"""What the sampler knows about one request: one object per cache row, so a row that moves cannot leave a part behind.

Everything is rebuilt from the seat (parameters, settled seed, tokens so far), so a request that comes back after a
preemption is the same as one that was never preempted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.compute.sampling_noise import MASK
from engine.control.plan import Logprobs, Seat
from engine.request import SamplingParams, SamplingSpec

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_WISH = "<Qdddq"  # seed, temperature, top_p, min_p, top_k: the front of Wish in engine/native/sampling.h
_FLOAT_MAX = np.finfo(np.float32).max
_FLOAT_TINY = np.finfo(np.float32).smallest_normal


class Penalties:
    """Repetition, frequency and presence penalties over the tokens seen so far, kept sparse: a request touches few ids.

    ``_ids[:n]`` are the distinct tokens of prompt and generation, ``_counts[:n]`` how often each was generated. A repetition
    penalty below the smallest normal float counts as that: 0 would make NaN of a masked token.
    """

    def __init__(self, params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> None:
        self._repetition = max(np.float32(params.repetition_penalty), _FLOAT_TINY)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._slots: dict[int, int] = {}
        self._ids: I64 = np.empty(64, dtype=np.int64)
        self._counts: F32 = np.zeros(64, dtype=np.float32)
        for token in tokens[:prompt_len]:
            self._slot(token)
        for token in tokens[prompt_len:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Counts one generated token."""
        slot = self._slot(token)  # first, since it may replace the arrays
        self._counts[slot] += 1

    def apply(self, logits: F32) -> None:
        """Penalises ``logits`` [vocab] in place: repetition by factor (of prompt and generated tokens), then frequency
        and presence by amount (of generated tokens)."""
        size = len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        values = logits[ids]
        with np.errstate(over="ignore", under="ignore"):
            if self._repetition != 1:
                values = np.where(values > 0, values / self._repetition, values * self._repetition)
            values -= self._frequency * counts + self._presence * (counts > 0)
        # A tiny factor can overflow; the largest float still orders and subtracts without NaN.
        logits[ids] = np.minimum(values, _FLOAT_MAX)

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        return slot


class RowState:
    """One request's sampling state. ``bare`` rows adjust nothing and report nothing; ``plain`` ones are greedy as well, so
    argmax is all. ``wish`` tells a native kernel how the row is drawn."""

    def __init__(self, seat: Seat, vocab_size: int) -> None:
        spec = seat.sampling
        if not isinstance(spec, SamplingSpec):
            raise TypeError(f"the seat of request {seat.request} carries {type(spec).__name__}, not a SamplingSpec")
        self.params = params = spec.params
        self.seed = spec.seed
        # A mask that leaves no token at all cannot be obeyed.
        masked = {token for token in spec.masked if 0 <= token < vocab_size}
        self._masked = np.array(sorted(masked) if len(masked) < vocab_size else [], dtype=np.int64)
        self._min_len = seat.prompt_len + params.min_tokens if len(self._masked) else 0
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        penalised = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        self._penalties = Penalties(params, seat.tokens, seat.prompt_len) if penalised else None
        # A request that comes back after a preemption has reported its prompt, unless it never sampled.
        asked = params.prompt_logprobs is not None and len(seat.tokens) == seat.prompt_len
        self._prompt: tuple[int, ...] | None = seat.tokens if asked else None
        self._prompt_reports: list[Logprobs] = []
        self.failure: str | None = None  # why nothing can be drawn for it, whatever comes
        reports = params.logprobs is not None or params.logits_digest or asked
        self.bare = not reports and not self.adjusts(seat.prompt_len)
        self.plain = params.greedy and self.bare
        self.wish = struct.pack(_WISH, self.seed & MASK, params.temperature, params.top_p, params.min_p, params.top_k)

    def adjusts(self, position: int) -> bool:
        """Whether the token at ``position`` is drawn from logits that differ from the model's."""
        return position < self._min_len or len(self._bias) > 0 or self._penalties is not None

    def adjust(self, logits: F32, position: int) -> None:
        """min_tokens mask, logit bias and penalties, in this order, on ``logits`` [vocab] in place."""
        if position < self._min_len:
            logits[self._masked] = -np.inf
        logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.apply(logits)

    @property
    def reports_prompt(self) -> bool:
        """Whether logprobs of the prompt are wanted and have not been told."""
        return self._prompt is not None

    def prompt_successor(self, position: int) -> int | None:
        """The prompt token whose logprob the logits at ``position`` give; None behind the prompt or when none is wanted."""
        prompt = self._prompt
        return prompt[position + 1] if prompt is not None and position + 1 < len(prompt) else None

    def note_prompt(self, report: Logprobs) -> None:
        """The report of the next prompt token: positions come in order, whatever chunks they come in."""
        self._prompt_reports.append(report)

    def spoil(self, failure: str) -> None:
        """A prompt token has no report, so the request, which asked for all of them, cannot have its answer (rule 13.7)."""
        self.failure = self.failure or failure

    def tell_prompt(self) -> tuple[Logprobs, ...] | None:
        """All reports of the prompt, once: when the first token is sampled."""
        if self._prompt is None:
            return None
        told, self._prompt, self._prompt_reports = tuple(self._prompt_reports), None, []
        return told

    def append(self, token: int) -> None:
        """Takes note of the token that was just sampled."""
        if self._penalties is not None:
            self._penalties.append(token)
