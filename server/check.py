"""``--check off|log|raise``: the engine's own audit between iterations, on the live engine.

    off     nothing is looked at
    log     a violation is logged and counted, and serving goes on
    raise   a violation ends the engine, as an error of its own loop does: /health fails and the process exits with 3

The audit walks every block, row and request, so it costs more the more there are; ``interval`` says in which iterations
it runs, and the metrics say what it cost.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import attrs
import structlog

if TYPE_CHECKING:
    from engine.engine import Engine

MODES = ("off", "log", "raise")
_TOKENS = re.compile(r"\([0-9, ]*\)")  # as one sentence of the audit shows them
_LOGGED = 20  # violations of one audit that are written out: the first says what happened, later ones are its echoes

log = structlog.get_logger("lockstep.check")


def audit_without_tokens(engine: Engine) -> list[str]:
    """What the audit says, without token ids: they are what clients said, and have no place in a log."""
    return [_TOKENS.sub("(...)", sentence) for sentence in engine.audit()]


class InvariantViolated(RuntimeError):
    """The engine broke one of its invariants; the message is the audit's first sentence."""


@attrs.define
class Checker:
    """Counts of what was looked at; ``seconds`` is the clock time that it took. Used on the engine thread only."""

    mode: str = "off"
    interval: int = 1
    checks: int = 0
    violations: int = 0
    seconds: float = 0.0

    def after(self, engine: Engine, iteration: int) -> None:
        """Call after an iteration was published. Raises ``InvariantViolated`` in mode ``raise``."""
        if self.mode == "off" or iteration % self.interval:
            return
        began = time.perf_counter()
        violated = audit_without_tokens(engine)
        self.seconds += time.perf_counter() - began
        self.checks += 1
        if not violated:
            return
        self.violations += len(violated)
        for sentence in violated[:_LOGGED]:
            log.error("an invariant is violated", iteration=iteration, violation=sentence)
        if self.mode == "raise":
            raise InvariantViolated(f"after iteration {iteration}: {violated[0]}")
