"""The sampler: logits of many rows in, one token per row out, each a function of its own row and request alone.

Order for one row, all of it the caller's contract: the raw logits give digest and logprobs; then the min_tokens mask,
logit bias, repetition penalty, frequency and presence penalty; then argmax when greedy, else temperature, top-k, top-p,
min-p and Gumbel-max. Rows share no arithmetic. The common case, every row plainly greedy, is one argmax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.sampling_choice import choose
from engine.compute.sampling_noise import counters, stream_key
from engine.compute.sampling_row import RowState
from engine.control.plan import Logprobs, Move, Sampled, Seat


class Sampler:
    """Sampling state of ``rows`` cache rows over a vocabulary of ``vocab_size`` ids."""

    def __init__(self, rows: int, vocab_size: int, device: str | torch.device = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._states: list[RowState | None] = [None] * rows
        self._counters = counters(vocab_size)

    def vacate(self, row: int) -> None:
        """The request of ``row`` left; nothing of it stays."""
        self._states[row] = None

    def move(self, move: Move) -> None:
        """Relabels row ``src`` as ``dst``; with ``swap`` the two change places, without it ``src`` ends empty."""
        states = self._states
        displaced = states[move.dst] if move.swap else None
        states[move.dst], states[move.src] = states[move.src], displaced

    def seat(self, seat: Seat) -> None:
        """A request takes ``seat.row``; whatever the row held before is gone."""
        self._states[seat.row] = RowState(seat, self._vocab_size, self._device)

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[Sampled]:
        """One token per row of ``logits`` [n, vocab_size] fp32, which are not changed.

        ``rows[i]`` is the cache row of ``logits[i]``, ``positions[i]`` the index that the new token will occupy. Raises
        ``ValueError`` on a wrong shape and ``LookupError`` on a row without a request.
        """
        if logits.shape != (len(rows), self._vocab_size) or len(positions) != len(rows):
            raise ValueError(
                f"logits {tuple(logits.shape)} with {len(positions)} positions, "
                f"but {len(rows)} rows of {self._vocab_size} are sampled"
            )
        states = [self._state(row) for row in rows]
        greedy = argmax(logits)
        sampled = [Sampled(token) for token in greedy]
        for i, (state, position) in enumerate(zip(states, positions, strict=True)):
            if not state.plain:
                sampled[i] = self._sample_row(logits[i], state, position, greedy[i])
        return sampled

    def _state(self, row: int) -> RowState:
        state = self._states[row]
        if state is None:
            raise LookupError(f"row {row} is sampled, but no request is seated there")
        return state

    def _sample_row(self, raw: torch.Tensor, state: RowState, position: int, token: int) -> Sampled:
        """One row that needs more than the argmax ``token`` of its raw logits."""
        params = state.params
        logits = raw
        if state.adjusts(position):
            logits = raw.clone()
            state.adjust(logits, position)
        if not params.greedy:
            key = stream_key(state.seed, position)
            token = choose(logits.cpu().numpy(), params, key, self._counters)
        elif logits is not raw:
            token = argmax(logits[None])[0]
        state.append(token)
        return Sampled(
            token=token,
            logprobs=None if params.logprobs is None else report(raw, token, params.logprobs),
            digest=digest(raw) if params.logits_digest else None,
        )


def argmax(logits: torch.Tensor) -> list[int]:
    """Index of the largest entry in each row of ``logits`` [n, vocab]; of equal ones the first."""
    if logits.device.type == "cpu":
        return [int(i) for i in logits.numpy().argmax(axis=1)]  # numpy's is vectorised, torch's on CPU is not
    return [int(i) for i in logits.argmax(dim=1).tolist()]


def report(raw: torch.Tensor, token: int, top: int) -> Logprobs:
    """Log-softmax of ``raw`` [vocab] fp32, in fp64: of ``token``, and of the ``top`` likeliest ids.

    The order is (logprob descending, id ascending); ``rank`` is the 1-based place of ``token`` in it.
    """
    values: npt.NDArray[np.float64] = raw.cpu().numpy().astype(np.float64)
    peak = values.max()
    values -= peak + np.log(np.exp(values - peak).sum())
    chosen = values[token]
    rank = 1 + int(np.count_nonzero(values > chosen)) + int(np.count_nonzero(values[:token] == chosen))
    best: tuple[tuple[int, float], ...] = ()
    if top:
        k = min(top, len(values))
        ids = np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
        ids = ids[np.argsort(-values[ids], kind="stable")[:k]]
        best = tuple((int(i), float(values[i])) for i in ids)
    return Logprobs(chosen=float(chosen), rank=rank, top=best)


def digest(raw: torch.Tensor) -> str:
    """Hex digest of one row's raw fp32 logits, 128 bits: equal digests mean equal bytes."""
    return hashlib.blake2b(raw.cpu().numpy().tobytes(), digest_size=16).hexdigest()
