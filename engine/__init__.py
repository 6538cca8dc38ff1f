"""Lockstep's engine. ``from engine import LLM, SamplingParams`` is the offline way in.

torch is imported when ``LLM`` or ``Engine`` is first asked for, so that ``--help`` and the control plane never wait for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from engine.request import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.llm import LLM

# Threads of the CPU kernels wait for each other at every operator. GNU OpenMP spins there by default, and on a machine that
# is shared with anything else it then spins for a thread that is not running: a decode step was measured 3-4 times slower.
# A short spin, then sleep, costs a quiet machine little. Read once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__all__ = ["LLM", "Engine", "EngineConfig", "InvalidRequest", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_LAZY = {"LLM": "engine.llm", "Engine": "engine.engine", "EngineConfig": "engine.config"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
