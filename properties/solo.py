"""The third oracle: what a request gets when it runs alone. It knows no blocks, no rows, no queue and no iteration.

On the ledger rung a token is an affine function of the request and of the token's number, without repetition within the
first ``VOCAB`` tokens of a request, so a token from the wrong request or the wrong position is a different token.
"""

from __future__ import annotations

import attrs

from engine.trace import VOCAB, Submit


def token(request: int, k: int) -> int:
    """The k-th generated token (from 0) of a request, in 0..VOCAB-1."""
    return (request * 97 + 11 + k * (1 + request * 31 % (VOCAB - 1))) % VOCAB


def stop_ids(first_id: int, submit: Submit) -> frozenset[int]:
    """The ``stop_at``-th token of each choice. The choices of one submission share one set of stop tokens."""
    if submit.stop_at is None:
        return frozenset()
    return frozenset(token(first_id + choice, submit.stop_at - 1) for choice in range(submit.n))


@attrs.frozen
class Outcome:
    """What a caller is told: the generated tokens, why it ended, and the stop token if one ended it."""

    tokens: tuple[int, ...]
    reason: str
    stop: int | None = None


def outcome(request: int, stops: frozenset[int], min_tokens: int, max_tokens: int) -> Outcome:
    """The undisturbed run of one choice. ``max_tokens`` is what the door settled."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token(request, len(tokens)))
        if tokens[-1] in stops and len(tokens) >= min_tokens:
            return Outcome(tuple(tokens), "stop", tokens[-1])
    return Outcome(tuple(tokens), "length")
