"""GET /debug/*: the inside of the engine for whoever runs it, behind the admin key; without one there is no such path.

The control state holds no text and no token ids, only who has which blocks, so nothing that a client said is told here.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.check import audit_without_tokens
from server.context import context_of
from server.errors import ApiError
from server.phase import Phase
from server.strict_json import dumps

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.engine import Engine

router = APIRouter(include_in_schema=False)


@router.get("/debug/ledger", response_class=Response)
async def ledger(request: Request) -> Response:
    """Queue, rows, block tables and pool between two iterations, and what the engine's audit says about them."""
    if not request.state.admin:  # the front door has asked already; a second look costs nothing
        raise ApiError(404, "there is no such path", code="not_found")
    bridge = context_of(request).bridge
    if bridge.phase not in (Phase.READY, Phase.DRAINING):
        raise bridge.refusal() or ApiError(503, "the engine has stopped", code="engine_dead")
    answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    bridge.between_steps(partial(_look, answer))
    while not answer.done():
        await asyncio.wait({answer}, timeout=0.5)
        if not answer.done() and bridge.phase not in (Phase.READY, Phase.DRAINING):
            raise bridge.refusal() or ApiError(503, "the engine has stopped", code="engine_dead")
    return Response(dumps(answer.result()), media_type="application/json")


def _look(answer: asyncio.Future[dict[str, Any]], engine: Engine) -> Callable[[], None]:
    """On the engine thread; the result is for the event loop."""
    try:
        state: dict[str, Any] | Exception = _state(engine)
    except Exception as error:  # noqa: BLE001 - a broken state is what this is for, and must not end the engine
        state = error

    def settle() -> None:
        if answer.done():  # nobody waits any more
            return
        if isinstance(state, Exception):
            answer.set_exception(state)
        else:
            answer.set_result(state)

    return settle


def _state(engine: Engine) -> dict[str, Any]:
    ledger = engine.ledger()
    return {
        "iteration": engine.scheduler.iteration,
        "audit": audit_without_tokens(engine),
        "waiting": list(ledger.waiting),
        "running": list(ledger.running),
        "requests": {
            str(request): {
                "status": status,
                "row": ledger.rows.get(request),
                "computed": ledger.computed[request],
                "num_tokens": ledger.num_tokens[request],
                "blocks": list(ledger.tables[request]),
            }
            for request, status in ledger.status.items()
        },
        "blank": list(ledger.blank),
        "references": list(ledger.references),
        "cached": list(ledger.cached),
        "published": sorted(ledger.published),
    }
