"""What the server says about itself, in two sections that must not be mixed up.

    promises   decided at start, and true until the end: sizes, the recorded shapes, what is switched on
    readings   counted while it runs: totals since start, and how things stand after the latest iteration

Whoever claims something about a run takes the readings before and after it; the difference is what happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.control.door import most_tokens
from engine.control.limits import Limits
from engine.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)
from server.metrics import Metrics

if TYPE_CHECKING:
    from engine.engine import Engine


# What one request may ask for, whatever the model; more is a 400.
REQUEST_LIMITS = {
    "n": MAX_CHOICES,
    "logprobs": MAX_LOGPROBS,
    "stop_strings": MAX_STOP_STRINGS,
    "stop_string_chars": MAX_STOP_CHARS,
    "logit_bias_entries": MAX_LOGIT_BIAS,
    "cache_salt_chars": MAX_SALT_CHARS,
}


def longest(limits: Limits) -> int:
    """Tokens of the longest request that the door lets in: the context's, or the pool's and one more, which needs no K/V."""
    return most_tokens(limits, 0)


def shortfall(limits: Limits) -> list[tuple[str, str]]:
    """For people at start: that the pool holds less than a request may want."""
    most = longest(limits)
    if most == limits.max_model_len:
        return []
    return [("longest request", f"{most} tokens, prompt and answer: the KV cache holds no more (--num-kv-blocks)")]


def promises(engine: Engine) -> dict[str, Any]:
    """``max_model_len`` is the most that one request can hold, prompt and answer: the context, or what the pool has room for."""
    limits = engine.limits
    return {
        "max_model_len": longest(limits),
        "context_len": limits.max_model_len,
        "kv_cache_tokens": limits.num_blocks * limits.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_waiting": limits.max_waiting,
        "block_size": limits.block_size,
        "num_kv_blocks": limits.num_blocks,
        "watermark": limits.watermark,
        "vocab_size": limits.vocab_size,
        "persistent_batch": limits.persistent_batch,
        "enable_prefix_caching": limits.prefix_cache,
        "captures": [list(shape) for shape in limits.captures],
        "capture": engine.capture,
    }


def readings(metrics: Metrics) -> dict[str, Any]:
    reading, counters = metrics.reading, metrics.reading.counters
    return {
        "running": reading.running,
        "waiting": reading.waiting,
        "free_kv_blocks": reading.free_blocks,
        "cached_kv_blocks": reading.cached_blocks,
        "free_rows": reading.free_rows,
        "iterations": counters.iterations,
        "decode_steps": counters.decode_steps,
        "decode_rows": {str(rows): count for rows, count in sorted(counters.decode_rows.items())},
        "replays": {f"{rows}x{width}": count for (rows, width), count in sorted(counters.replays.items())},
        "eager_steps": dict(sorted(counters.eager.items())),
        "recorded_graphs": reading.recorded,
        "padded_rows": counters.padded_rows,
        "row_moves": counters.row_moves,
        "preemptions": counters.preemptions,
        "prefill_tokens": counters.prefill_tokens,
        "recomputed_tokens": counters.recomputed_tokens,
        "prefix_hit_tokens": counters.prefix_hit_tokens,
        "sampled_tokens": counters.sampled_tokens,
        "finished": dict(sorted(metrics.ended().items())),
        "refused": dict(sorted(metrics.refused().items())),
        "failed_steps": counters.failed_steps,
    }
