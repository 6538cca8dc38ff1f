"""Lockstep's engine. ``from engine import LLM, SamplingParams`` is the offline way in.

torch is imported when ``LLM`` or ``Engine`` is first asked for, so that ``--help`` and the control plane never wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.request import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.llm import LLM

__all__ = ["LLM", "Engine", "EngineConfig", "InvalidRequest", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_LAZY = {"LLM": "engine.llm", "Engine": "engine.engine", "EngineConfig": "engine.config"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
