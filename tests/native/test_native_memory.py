"""What an engine keeps in memory: weights once, in their own type, and of the pool what was used."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.compute.kv import KVPool
from engine.loading.synthetic import synthetic_config, synthetic_model
from engine.native.runner import library
from engine.native.weights import load_native


def resident() -> int:
    """Bytes of this process that are in memory."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


def test_pool_costs_what_was_used_of_it() -> None:
    before = resident()
    pool = KVPool(synthetic_config(num_layers=4), 100_000, 16, torch.device("cpu"), torch.float32)
    assert pool.nbytes > 1.5e9
    assert resident() - before < 50e6
    assert all(layer.data_ptr() % 64 == 0 for layer in pool.layers)
    assert pool.layers[3][1, 70_000].eq(0).all()
    pool.layers[0][:, :5_000] = 1.0
    assert resident() - before > 20e6


def test_tied_head_is_packed_once() -> None:
    tied, apart = (load_native(synthetic_model(tie_word_embeddings=tie), library()) for tie in (True, False))
    assert tied.head is tied.embedding
    assert apart.nbytes - tied.nbytes == tied.embedding.nbytes
