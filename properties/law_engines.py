"""The engines that laws are held against: the production assembly around one model whose weights are loaded once.

The small one is random weights on the real kernels; its requests are drawn over its 512 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.build import assemble, resolve_compute
from engine.compute.weights import Weights, load_weights
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load_model
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from engine.native.runner import library
from engine.native.weights import NativeWeights, load_native
from properties.arming import disarmed
from properties.law_play import DEFAULT, TINY, Ask, draw_asks

CPU = torch.device("cpu")


class ModelEngines:
    """See ``MakeEngine``. ``compute`` is ``auto``, ``native`` or ``torch``, as ``EngineConfig`` has it.

    The weights are loaded without whatever fault is armed: it is the runs that must show it.
    """

    def __init__(self, load: Callable[[], LoadedModel], compute: str = "auto") -> None:
        self._load = load
        self.compute = resolve_compute(compute, "cpu", torch.float32)
        with disarmed(), torch.inference_mode():
            self.model = load()
            self.weights: Weights | NativeWeights = (
                load_native(self.model, library())
                if self.compute == "native"
                else load_weights(self.model, CPU, torch.float32)
            )

    def __call__(self, config: EngineConfig) -> Engine:
        return assemble(config, self.model, weights=self.weights)

    def reload(self) -> ModelEngines:
        return ModelEngines(self._load, self.compute)

    def lists(self, seeds: Sequence[int], count: int) -> list[list[Ask]]:
        """Request lists for this model, one for each seed. Ids near the ends of a vocabulary are left out: they are special."""
        ids = (3, min(self.model.config.vocab_size - 12, 40_000))
        return [draw_asks(seed, ids=ids, count=count) for seed in seeds]


def engines_of(name: str, compute: str = "auto") -> ModelEngines:
    """``tiny``, ``default`` (the model installed beside the engine), or a folder, .gguf file or hub id."""
    if name == TINY:
        return ModelEngines(synthetic_model, compute)
    return ModelEngines(lambda: load_model(None if name == DEFAULT else name), compute)
