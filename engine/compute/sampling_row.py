"""What the sampler knows about one request: one object per cache row, so a row that moves cannot leave a part behind.

Everything is rebuilt from the seat (parameters, settled seed, tokens so far), so a request that comes back after a
preemption is the same as one that was never preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.control.plan import Seat
from engine.request import SamplingParams, SamplingSpec

_FLOAT_MAX = float(np.finfo(np.float32).max)


class Penalties:
    """Repetition, frequency and presence penalties over the tokens seen so far, kept sparse: a request touches few ids.

    ``_ids[:n]`` are the distinct tokens of prompt and generation, ``_counts[:n]`` how often each was generated.
    """

    def __init__(self, params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._slot: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        for token in tokens[:prompt_len]:
            self._place(token)
        for token in tokens[prompt_len:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Counts one generated token."""
        slot = self._place(token)  # first, since it may replace the arrays
        self._counts[slot] += 1

    def apply(self, logits: torch.Tensor) -> None:
        """Penalises ``logits`` [vocab] fp32 in place: repetition by factor, then frequency and presence by amount."""
        size = len(self._slot)
        ids = torch.from_numpy(self._ids[:size]).to(logits.device)
        values = logits[ids]
        if self._repetition != 1.0:
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency or self._presence:
            counts = torch.from_numpy(self._counts[:size]).to(logits.device)
            values = values - (self._frequency * counts + self._presence * (counts > 0))
        # A tiny factor can overflow; the largest float still orders and subtracts without NaN.
        logits[ids] = values.clamp(max=_FLOAT_MAX)

    def _place(self, token: int) -> int:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        return slot


class RowState:
    """One request's sampling state. ``plain`` rows are greedy, adjust nothing and report nothing: argmax is all."""

    def __init__(self, seat: Seat, vocab_size: int, device: torch.device) -> None:
        spec = seat.sampling
        if not isinstance(spec, SamplingSpec):
            raise TypeError(f"the seat of request {seat.request} carries {type(spec).__name__}, not a SamplingSpec")
        self.params = params = spec.params
        self.seed = spec.seed
        self.prompt_len = seat.prompt_len
        masked = sorted({token for token in spec.masked if 0 <= token < vocab_size})
        # A mask that leaves no token at all cannot be obeyed.
        self._masked = _index(masked, device) if len(masked) < vocab_size else None
        self._bias_ids = _index(list(params.logit_bias), device)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        penalised = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        self._penalties = Penalties(params, seat.tokens, seat.prompt_len) if penalised else None
        self._min_len = seat.prompt_len + params.min_tokens if self._masked is not None else 0
        self.plain = (
            params.greedy
            and params.logprobs is None
            and not params.logits_digest
            and self._min_len <= seat.prompt_len
            and self._bias_ids is None
            and self._penalties is None
        )

    def adjusts(self, position: int) -> bool:
        """Whether the token at ``position`` is drawn from logits that differ from the model's."""
        return position < self._min_len or self._bias_ids is not None or self._penalties is not None

    def adjust(self, logits: torch.Tensor, position: int) -> None:
        """min_tokens mask, logit bias and penalties, in this order, on ``logits`` [vocab] fp32 in place."""
        if position < self._min_len:
            logits[self._masked] = -torch.inf
        if self._bias_ids is not None:
            logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.apply(logits)

    def append(self, token: int) -> None:
        """Takes note of the token that was just sampled."""
        if self._penalties is not None:
            self._penalties.append(token)


def _index(ids: Sequence[int], device: torch.device) -> torch.Tensor | None:
    return torch.tensor(ids, dtype=torch.int64, device=device) if ids else None
