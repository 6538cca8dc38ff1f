"""Which row counts the two products of an attention tile may be run with; both are probed as one (probe.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.compute.kernels import batched_product
from engine.compute.probe import Ladder, UnstableMachine, probe, pseudo_random, same_bytes
from engine.compute.tiles import TILE
from engine.loading.model import ModelConfig

QUERY_ROWS = 256  # at most, in one product; bounds the scratch of a long context


def probe_attention(config: ModelConfig, device: torch.device) -> Ladder:
    """Raises ``UnstableMachine`` if no usable row count gives bits that are independent of row, batch and stride."""
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    keys = pseudo_random(TILE, dim, device, torch.float32)
    values = pseudo_random(TILE, dim + 1, device, torch.float32)[:, 1:].contiguous()
    queries = pseudo_random(QUERY_ROWS, dim, device, torch.float32)

    def tile(rows: Tensor) -> Tensor:
        return _tiles(rows, keys, values, 1)[0]

    ladder = probe(f"attention {TILE}x{dim}", tile, queries, backend="batched matmul")
    if ladder.rungs[-1] < group:
        raise UnstableMachine(
            f"attention: at most {ladder.rungs[-1]} rows have stable bits, but {group} query heads share a K/V head"
        )
    for rung in ladder.rungs:
        alone = tile(queries[:rung])
        for items in (2, 3, 16, 50):
            together = _tiles(queries[:rung], keys, values, items)
            if not all(same_bytes(item, alone) for item in together):
                raise UnstableMachine(f"attention: {items} tiles at once give other bits than one tile ({rung} rows)")
    return ladder


def _tiles(queries: Tensor, keys: Tensor, values: Tensor, items: int) -> Tensor:
    """``items`` equal tiles in one batch, scores beside outputs: [items, rows, TILE + dim]."""
    rows = len(queries)
    scores = torch.empty(items, rows, TILE, device=queries.device)
    out = torch.empty(items, rows, keys.shape[1], device=queries.device)
    batched_product(queries.expand(items, -1, -1), keys.expand(items, -1, -1).contiguous().transpose(1, 2), scores)
    batched_product(scores, values.expand(items, -1, -1).contiguous(), out)
    return torch.cat([scores, out], dim=2)
