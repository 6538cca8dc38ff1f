"""The small random transformer of the rungs ``tiny``, ``native``, ``triton`` and ``gpu``, on the kernels that each is about."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine.compute.network import MakeNetwork
from engine.compute.tiles import TILE
from engine.compute.transformer import Transformer
from engine.compute.weights import load_weights
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from engine.trace import VOCAB
from properties.arming import disarmed
from properties.rungs import Unavailable

KERNELS = ("torch", "native", "triton", "cuda")
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,  # with one layer, keys and values would not depend on what attention read
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "sliding_windows": (9, None),  # both kinds of layer
}


def tiny_model() -> LoadedModel:
    """Random fp32 weights, the same on every machine, over the vocabulary of workloads."""
    return synthetic_model("mistral", **SMALL)


@functools.cache
def tiny_network(kernels: str) -> MakeNetwork:
    """Weights are loaded, probed or packed once per process and shared by all runs: nothing writes to them. One thread.

    Raises ``Unavailable`` where this machine has no such kernels.
    """
    with disarmed(), torch.inference_mode():
        if kernels == "native":
            return _native()
        if kernels == "triton":
            return _triton(torch.device("cpu"))
        if kernels == "cuda":
            return _cuda()
        weights = load_weights(tiny_model(), torch.device("cpu"), torch.float32)
    return lambda sizes: Transformer(weights, sizes)


def _native() -> MakeNetwork:
    from engine.native.build import BuildError
    from engine.native.network import NativeNetwork
    from engine.native.runner import library
    from engine.native.weights import load_native

    try:
        weights = load_native(tiny_model(), library())
    except BuildError as error:
        raise Unavailable(f"no native kernels: {error}") from None
    threads = weights.library.pool(1)
    return lambda sizes: NativeNetwork(weights, sizes, threads, torch.float16)  # as the default model is served


def _cuda() -> MakeNetwork:
    """What serves on a GPU: Triton's kernels, or torch's where Triton is absent."""
    from engine.cuda.kernels import has_triton

    if not torch.cuda.is_available():
        raise Unavailable("no CUDA device")
    device = torch.device("cuda")
    if has_triton():
        return _triton(device)
    weights = load_weights(tiny_model(), device, torch.float32)
    return lambda sizes: Transformer(weights, sizes)


def _triton(device: torch.device) -> MakeNetwork:
    """Batch-invariant, and with splits of one attention tile, so that contexts of more than one come up."""
    from engine.cuda.kernels import NoTriton, triton_device
    from engine.cuda.network import TritonNetwork
    from engine.cuda.weights import load_triton

    try:
        triton_device(device)
    except NoTriton as error:
        raise Unavailable(str(error)) from None
    weights = load_triton(tiny_model(), device, torch.float32)
    return lambda sizes: TritonNetwork(weights, sizes, split=TILE)
