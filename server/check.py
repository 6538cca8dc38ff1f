"""``--check off|log|raise``: the engine's own audit between iterations, on the live engine, and the server's books beside it.

    off     nothing is looked at
    log     a violation is logged and counted, and serving goes on
    raise   a violation ends the engine, as an error of its own loop does: /health fails and the process exits with 3

The audit walks every block, row and request, so it costs more the more there are; ``interval`` says in which iterations
it runs, and the metrics say what it cost. The books say which client waits for which request: a request that nobody waits
for, a client whose request is not there, and an answer handed to somebody else are mistakes of the server, not of the engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import structlog

from engine.control.request import Status

if TYPE_CHECKING:
    from engine.engine import Engine
    from server.live import Choice, Generation

MODES = ("off", "log", "raise")
_TOKENS = re.compile(r"\([0-9, ]*\)")  # as one sentence of the audit shows them
_LOGGED = 20  # violations of one audit that are written out: the first says what happened, later ones are its echoes

log = structlog.get_logger("lockstep.check")


def audit_without_tokens(engine: Engine) -> list[str]:
    """What the audit says, without token ids: they are what clients said, and have no place in a log."""
    return [_TOKENS.sub("(...)", sentence) for sentence in engine.audit()]


def audit_books(
    engine: Engine, live: Mapping[int, tuple[Generation, Choice]], left: frozenset[int] = frozenset()
) -> list[str]:
    """``live``: who waits for which request, between two iterations. ``left``: whose clients had left at an earlier audit:
    since then their aborts were applied."""
    found = []
    requests = engine.scheduler.requests
    for number, request in requests.items():
        if number not in live and not request.aborted and request.status is not Status.FINISHED:
            found.append(f"request {number} is {request.status}, but no client waits for it")
    for number, (generation, choice) in live.items():
        if number not in requests:
            found.append(f"a client waits for request {number}, which the engine does not have")
        elif tuple(requests[number].tokens[: requests[number].prompt_len]) != generation.prompts[choice.prompt]:
            found.append(f"request {number} has another prompt than the client that waits for it")
        if choice.request != number:
            found.append(f"request {number} is kept for choice {choice.index}, whose request is {choice.request}")
        if generation.closed and number in left:
            found.append(f"request {number} runs on, but its client left before the previous audit")
    for generation in {id(generation): generation for generation, _ in live.values()}.values():
        order = [choice.request for choice in generation.choices if choice.request is not None]
        if order != sorted(order):
            found.append(f"requests {order[:8]} are the choices of one answer, but not in the order of their seeds")
    return found


class InvariantViolated(RuntimeError):
    """An invariant of the engine, or the server's books, broke; the message is the audit's first sentence."""


@attrs.define
class Checker:
    """Counts of what was looked at; ``seconds`` is the clock time that it took. Used on the engine thread only."""

    mode: str = "off"
    interval: int = 1
    checks: int = 0
    violations: int = 0
    seconds: float = 0.0
    _left: frozenset[int] = frozenset()  # requests whose clients had left at the latest audit

    def after(
        self, engine: Engine, iteration: int, live: Mapping[int, tuple[Generation, Choice]] | None = None
    ) -> None:
        """Call after an iteration was published; ``live``: see ``audit_books``, which needs it. Raises ``InvariantViolated`` in
        mode ``raise``."""
        if self.mode == "off" or iteration % self.interval:
            return
        began = time.perf_counter()
        violated = audit_without_tokens(engine)
        if live is not None:
            violated += audit_books(engine, live, self._left)
            self._left = frozenset(number for number, (generation, _) in live.items() if generation.closed)
        self.seconds += time.perf_counter() - began
        self.checks += 1
        if not violated:
            return
        self.violations += len(violated)
        for sentence in violated[:_LOGGED]:
            log.error("an invariant is violated", iteration=iteration, violation=sentence)
        if self.mode == "raise":
            raise InvariantViolated(f"after iteration {iteration}: {violated[0]}")
