"""The third oracle: what a request gets when it runs alone. It knows no blocks, no rows, no queue and no iteration.

Each rung brings an oracle of its own, since what a token is depends on how much of the engine is real. The oracle is asked
first and feeds the specification; what the engine samples is only ever compared with it.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from engine.trace import VOCAB, Submit, answer_token


@attrs.frozen
class Outcome:
    """What a caller is told: the generated tokens, why it ended, and the stop token or string if one ended it."""

    tokens: tuple[int, ...]
    reason: str
    stop: int | str | None = None


class StoppedText(Protocol):
    """What the text of a request that runs alone says of its end."""

    @property
    def stop(self) -> str | None: ...

    @property
    def after(self) -> int | None: ...


class Oracle(Protocol):
    """What the driver asks. Nothing that the engine does may reach an oracle."""

    def stop_ids(self, first_id: int, event: Submit) -> frozenset[int]:
        """The stop tokens of a submission whose first choice is ``first_id``: of each choice the ``stop_at``-th token.

        Asked once for every submission, in the order of ids and before anybody else sees it, refused ones included: so this
        is also where an oracle learns what each request is.
        """
        ...

    def token(self, request: int, k: int) -> int:
        """The k-th generated token (from 0) of a request that runs alone, in 0..VOCAB-1."""
        ...


def askable(prompt: tuple[int, ...]) -> bool:
    """Whether it has tokens, all of them in the vocabulary: the door refuses the others, and no oracle knows them."""
    return bool(prompt) and min(prompt) >= 0 and max(prompt) < VOCAB


def outcome(
    oracle: Oracle,
    request: int,
    stops: frozenset[int],
    min_tokens: int,
    max_tokens: int,
    text: StoppedText | None = None,
    fails: tuple[int, str] | None = None,
) -> Outcome:
    """The undisturbed run of one choice. ``max_tokens`` is what the door settled; without ``text`` no stop string ends it.
    ``fails``: at which token and how, as ``Submit`` has it (SPEC 13.7, 13.8)."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        if fails == (len(tokens) + 1, "sampling"):
            return Outcome(tuple(tokens), "error")
        tokens.append(oracle.token(request, len(tokens)))
        if tokens[-1] in stops and len(tokens) >= min_tokens:
            return Outcome(tuple(tokens), "stop", tokens[-1])
        if fails == (len(tokens), "text"):
            return Outcome(tuple(tokens), "error")
        if text is not None and len(tokens) == text.after:
            return Outcome(tuple(tokens), "stop", text.stop)
    return Outcome(tuple(tokens), "length")


class AffineOracle:
    """The oracle of the ledger rung, where nothing is computed and a token depends on the request's number alone."""

    def stop_ids(self, first_id: int, event: Submit) -> frozenset[int]:
        """The choices of one submission share one set of stop tokens."""
        if event.stop_at is None:
            return frozenset()
        return frozenset(answer_token(first_id + choice, event.stop_at - 1) for choice in range(event.n))

    def token(self, request: int, k: int) -> int:
        return answer_token(request, k)
