"""What a GPU has to spare, and how torch must compute on it."""

from __future__ import annotations

import math

import torch

from engine.loading.model import ModelConfig

SHARE = 0.9  # of the free memory: the rest is the driver's, the libraries' and fragmentation's
WORKSPACE = 512 * 2**20  # a step's scratch and the matrix library's own


def exact_products() -> None:
    """fp32 products stay fp32 (no TF32) and narrow ones are added in fp32, in the whole process, whatever was set before."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """All tensors of a model, once."""
    return sum(math.prod(shape) for shape in config.tensors().values()) * dtype.itemsize


def cache_bytes(free: int, weights: int, graphs: int) -> int:
    """What the KV pool may take of ``free`` bytes, when weights are still to come and graphs are recorded afterwards."""
    return int(free * SHARE) - weights - graphs - WORKSPACE
