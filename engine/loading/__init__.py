"""From a file on disk to a ``LoadedModel``: ``load_model`` for folders, GGUF files and the default model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.loading.model import LoadedModel, LoadError, ModelConfig, RopeScaling, TensorSource

if TYPE_CHECKING:
    from engine.loading.load import load_model
    from engine.loading.synthetic import synthetic_model

__all__ = [
    "LoadError",
    "LoadedModel",
    "ModelConfig",
    "RopeScaling",
    "TensorSource",
    "load_model",
    "synthetic_model",
]


def __getattr__(name: str) -> Any:
    """``load_model`` and ``synthetic_model`` import torch, so they are fetched when they are first asked for."""
    if name == "load_model":
        from engine.loading.load import load_model

        return load_model
    if name == "synthetic_model":
        from engine.loading.synthetic import synthetic_model

        return synthetic_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
