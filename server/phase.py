"""The life of a server, from loading to its end, and what a request is told in each part of it."""

from __future__ import annotations

from enum import StrEnum

from server.errors import ApiError


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"  # the engine could not be made
    DEAD = "dead"  # the engine's own loop raised


_REFUSALS = {
    Phase.LOADING: ("the model is still loading", "loading"),
    Phase.DRAINING: ("the server is shutting down", "server_shutdown"),
    Phase.STOPPED: ("the server is shutting down", "server_shutdown"),
    Phase.FAILED: ("the engine could not be started", "engine_dead"),
    Phase.DEAD: ("the engine has stopped after an error", "engine_dead"),
}


def refusal_in(phase: Phase) -> ApiError | None:
    """Why no request is taken in ``phase``; None where they are."""
    if phase is Phase.READY:
        return None
    message, code = _REFUSALS[phase]
    return ApiError(503, message, code=code)
