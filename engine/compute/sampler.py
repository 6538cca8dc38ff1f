"""The sampler: logits of many rows in, one token per row out, each a function of its own row and request alone.

Order for one row: the raw logits give digest and logprobs; then the min_tokens mask, logit bias, repetition penalty,
frequency and presence penalty; then argmax when greedy, else temperature, top-k, top-p, min-p and Gumbel-max.

A row that holds NaN or has no finite maximum cannot be drawn from: it gets ``NO_TOKEN`` and a sentence that says why, and the
rows beside it their tokens (rule 13.7).

Native kernels, where the network has them, draw all rows in one call (``Draw``); numpy then only changes logits before, on
copies, and reports after. Without them the common case, every row plainly greedy, is one argmax where the logits are. All
other rows go to the host in one copy and are worked there one by one, on as many threads as given: a row fits into the
processor's cache, rows share no arithmetic, and a GPU's answers differ from the CPU's only by its logits. Both ways give the
same token for the same logits, to the bit (tests/native/test_native_sampling.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.sampling_choice import choose, first
from engine.compute.sampling_noise import counters, stream_key
from engine.compute.sampling_row import F32, RowState
from engine.compute.staging import Readback, finite_argmax
from engine.control.plan import NO_TOKEN, Logprobs, Move, Sampled, Seat

_WORTH_A_THREAD = 2**17  # logits; below it handing rows to threads costs more than it saves


class Draw(Protocol):
    """Draws a token from each row of ``logits`` [n, vocab] fp32: what ``choose`` would, or argmax where a row is greedy; and
    ``NO_TOKEN`` as they do."""

    def __call__(self, logits: torch.Tensor, wishes: Sequence[bytes], positions: Sequence[int]) -> list[int]:
        """``wishes[i]`` is ``RowState.wish`` of row i, ``positions[i]`` the index that its new token will occupy."""
        ...


class Sampler:
    """Sampling state of ``rows`` cache rows over a vocabulary of ``vocab_size`` ids; ``device`` is the logits'.

    ``threads`` share the rows that are not plainly greedy, ``draw`` takes all rows instead; neither changes an answer.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: str | torch.device = "cpu",
        *,
        threads: int = 1,
        draw: Draw | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._draw = draw
        self._pool = ThreadPoolExecutor(threads, "sampler") if threads > 1 else None
        self._states: list[RowState | None] = [None] * rows
        self._counters = counters(vocab_size)
        self._checked: torch.Tensor | None = None
        self._num_checked = 0
        self._readback: Readback | None = None
        if torch.device(device).type == "cuda":
            self._readback = Readback(rows, vocab_size, torch.device(device))

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
        self._states[seat.row] = RowState(seat, self._vocab_size)

    def prompt_positions(self, row: int, start: int, count: int) -> list[int]:
        """Those of ``start .. start + count - 1`` whose logits say how likely the prompt's next token was, ascending;
        none for a row that did not ask."""
        if not self.reports_prompt(row):
            return []
        state = self._state(row)
        return [p for p in range(start, start + count) if state.prompt_successor(p) is not None]

    def reports_prompt(self, row: int) -> bool:
        """Whether the request of ``row`` still has logprobs of its prompt to collect."""
        state = self._states[row]
        return state is not None and state.reports_prompt

    def note_prompt(self, row: int, positions: Sequence[int], logits: torch.Tensor) -> None:
        """``logits`` [n, vocab_size] fp32 at the n ``positions`` that ``prompt_positions`` named, in order."""
        state = self._state(row)
        top = state.params.prompt_logprobs
        for position, raw in zip(positions, logits.cpu().numpy(), strict=True):
            token = state.prompt_successor(position)
            assert token is not None
            assert top is not None
            if np.isfinite(raw.max()):
                state.note_prompt(report(raw, token, top))
            else:
                state.spoil(f"the logits of prompt position {position} {flaw(raw)}")

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[Sampled]:
        """One token, or why there is none, per row of ``logits`` [n, vocab_size] fp32, which are not changed.

        ``rows[i]`` is the cache row of ``logits[i]``, ``positions[i]`` the index that the new token will occupy. Raises
        ``ValueError`` on a wrong shape or type and ``LookupError`` on a row without a request.
        """
        if logits is not self._checked or len(rows) != self._num_checked or len(positions) != len(rows):
            self._check(logits, len(rows), len(positions))
        seated = self._states
        states = [seated[row] or self._state(row) for row in rows]
        if self._draw is not None:
            return self._draw_rows(self._draw, logits, states, positions)
        special = [i for i, state in enumerate(states) if not state.plain]
        tokens, host = self._to_host(logits, special)
        sampled = [Sampled(token) for token in tokens]
        if NO_TOKEN in tokens:
            tell_flaws(logits, positions, sampled)
            host = [raw for raw, i in zip(host, special, strict=True) if sampled[i].failure is None]
            special = [i for i in special if sampled[i].failure is None]

        def work(k: int) -> Sampled:
            i = special[k]
            return self._sample_row(host[k], states[i], positions[i], sampled[i].token)

        pool = self._pool if len(special) * self._vocab_size >= _WORTH_A_THREAD else None
        results: Iterable[Sampled] = (pool.map if pool else map)(work, range(len(special)))
        for i, result in zip(special, list(results), strict=True):
            sampled[i] = result
        return sampled

    def _check(self, logits: torch.Tensor, num_rows: int, num_positions: int) -> None:
        """Once for each tensor, since decode steps bring the same again, and asking one for its shape and type costs a step of
        native kernels a twentieth of the host's time."""
        if logits.shape != (num_rows, self._vocab_size) or num_positions != num_rows:
            raise ValueError(
                f"logits are {tuple(logits.shape)} with {num_positions} positions, "
                f"but must be {(num_rows, self._vocab_size)} with {num_rows}"
            )
        if logits.dtype != torch.float32:
            raise ValueError(f"logits are {logits.dtype}, but must be torch.float32")
        self._checked, self._num_checked = logits, num_rows

    def _draw_rows(
        self, draw: Draw, logits: torch.Tensor, states: Sequence[RowState], positions: Sequence[int]
    ) -> list[Sampled]:
        """All rows where their logits are; those whose logits are changed once more, from copies."""
        tokens = draw(logits, [state.wish for state in states], positions)
        special = [i for i, state in enumerate(states) if not state.bare]
        adjusted = [i for i in special if states[i].adjusts(positions[i])]
        if adjusted:
            copies = logits[adjusted]
            for i, copy in zip(adjusted, copies.numpy(), strict=True):
                states[i].adjust(copy, positions[i])
            redrawn = draw(copies, [states[i].wish for i in adjusted], [positions[i] for i in adjusted])
            for i, token in zip(adjusted, redrawn, strict=True):
                tokens[i] = token if tokens[i] != NO_TOKEN else NO_TOKEN
        sampled = [Sampled(token) for token in tokens]
        if NO_TOKEN in tokens:
            tell_flaws(logits, positions, sampled)
        for i in special:
            if sampled[i].failure is None:
                sampled[i] = self._note(logits[i].numpy(), states[i], tokens[i])
        return sampled

    def _state(self, row: int) -> RowState:
        state = self._states[row]
        if state is None:
            raise LookupError(f"row {row} is sampled, but no request is seated there")
        return state

    def _to_host(self, logits: torch.Tensor, chosen: list[int]) -> tuple[list[int], Sequence[F32]]:
        """The argmax of each row, and the logits of those ``chosen``: from a GPU in one copy."""
        if self._readback is not None:
            tokens, whole = self._readback.read(logits, chosen)
            return tokens, list(whole)
        tokens = argmax(logits)
        if not chosen:
            return tokens, ()
        host: F32 = logits.cpu().numpy()
        return tokens, [host[i] for i in chosen]

    def _sample_row(self, raw: F32, state: RowState, position: int, token: int) -> Sampled:
        """One row that needs more than ``token``, the argmax of its raw logits [vocab]."""
        params = state.params
        logits = raw
        if state.adjusts(position):
            logits = raw.copy()
            state.adjust(logits, position)
        if not params.greedy:
            token = choose(logits, params, stream_key(state.seed, position), self._counters)
        elif logits is not raw:
            token = int(logits.argmax())
            token = token if np.isfinite(logits[token]) else NO_TOKEN
        if token == NO_TOKEN:
            return unsampled(position, logits)
        return self._note(raw, state, token)

    def _note(self, raw: F32, state: RowState, token: int) -> Sampled:
        """Takes note of a row's new token and reports what its request wants to know of the ``raw`` logits [vocab]."""
        params = state.params
        if state.failure is not None:
            return Sampled(NO_TOKEN, failure=state.failure)
        state.append(token)
        return Sampled(
            token=token,
            logprobs=None if params.logprobs is None else report(raw, token, params.logprobs),
            digest=digest(raw) if params.logits_digest else None,
            prompt=state.tell_prompt(),
        )


def argmax(logits: torch.Tensor) -> list[int]:
    """Index of the largest entry in each row of ``logits`` [n, vocab]; of equal ones the first. ``NO_TOKEN`` where that is not
    finite: both libraries take NaN for the largest."""
    # Both libraries promise the first of equals; on CPU numpy's is an order of magnitude faster.
    if logits.device.type != "cpu":
        there: list[int] = finite_argmax(logits).tolist()
        return there
    values = logits.numpy()
    best = values.argmax(axis=1)
    best[~np.isfinite(values[np.arange(len(best)), best])] = NO_TOKEN
    tokens: list[int] = best.tolist()
    return tokens


def unsampled(position: int, logits: F32) -> Sampled:
    """What a row [vocab] without a finite maximum is told; ``position`` is where its token would have stood."""
    return Sampled(NO_TOKEN, failure=f"the logits for position {position} {flaw(logits)}")


def tell_flaws(logits: torch.Tensor, positions: Sequence[int], sampled: list[Sampled]) -> None:
    """Says of each of ``sampled`` without a token what is wrong with its row of ``logits`` [n, vocab]."""
    for i, got in enumerate(sampled):
        if got.token == NO_TOKEN:
            sampled[i] = unsampled(positions[i], logits[i].cpu().numpy())


def flaw(logits: F32) -> str:
    """Why nothing can be drawn from a row [vocab], as the end of a sentence."""
    if wrong := int(np.count_nonzero(np.isnan(logits))):
        return f"hold {wrong} NaN among {len(logits)}"
    if wrong := int(np.count_nonzero(logits == np.inf)):
        return f"hold {wrong} times infinity among {len(logits)}"
    return "leave no token that may be sampled"


def report(raw: F32, token: int, top: int) -> Logprobs:
    """Log-softmax of ``raw`` [vocab], in fp64: of ``token``, and of the ``top`` likeliest ids.

    The order is (logprob descending, id ascending); ``rank`` is the 1-based place of ``token`` in it.
    """
    values: npt.NDArray[np.float64] = raw.astype(np.float64)
    peak = values.max()
    normaliser = peak + np.log(np.exp(values - peak).sum())
    rank = 1 + int(np.count_nonzero(raw > raw[token])) + int(np.count_nonzero(raw[:token] == raw[token]))
    best = first(raw, min(top, len(raw))) if top else np.empty(0, dtype=np.int64)
    best = best[np.argsort(-raw[best], kind="stable")]
    return Logprobs(
        chosen=float(values[token] - normaliser),
        rank=rank,
        top=tuple((int(i), float(values[i] - normaliser)) for i in best),
    )


def digest(raw: F32) -> str:
    """Hex digest of one row's raw logits, 128 bits: equal digests mean equal bytes."""
    return hashlib.blake2b(np.ascontiguousarray(raw).tobytes(), digest_size=16).hexdigest()
