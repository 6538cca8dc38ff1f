"""Drives a runner by hand-made plans and keeps the logits of every sampled row, without a scheduler; torch or native kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine.compute.runner import ModelRunner
from engine.compute.weights import Weights, load_weights
from engine.control.limits import Limits
from engine.control.plan import Chunk, Decode, Eager, Grow, Move, Plan, Replay, Sampled, Seat
from engine.loading.synthetic import synthetic_model
from engine.native.library import Library, Pool
from engine.native.runner import NativeRunner, library
from engine.native.weights import NativeWeights, load_native

ODD = {"hidden_size": 40, "intermediate_size": 36, "num_heads": 5, "num_kv_heads": 1, "head_dim": 8, "vocab_size": 283}
"""Sizes at which the vectors of every instruction set leave a tail."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "window": ("mistral", {"sliding_windows": (9, None)}),
    "odd": ("llama", ODD),
}
NATIVE = tuple(f"native {name}" for name in MODELS)
"""The same models on native kernels."""


@functools.cache
def shared_weights(name: str) -> Any:
    """Weights of a small model, made once per test process: ``Weights`` with their probe, or ``NativeWeights``."""
    family, overrides = MODELS[name.removeprefix("native ")]
    if name in NATIVE:
        return load_native(synthetic_model(family, **overrides), library())
    with torch.inference_mode():
        return load_weights(synthetic_model(family, **overrides), torch.device("cpu"), torch.float32)


@functools.cache
def native_threads(kernels: Library, count: int) -> Pool:
    return kernels.pool(count)


def runner_for(
    weights: Weights | NativeWeights, limits: Limits, threads: int = 1, kv_dtype: torch.dtype = torch.float32
) -> Any:
    """``threads`` and ``kv_dtype`` are for native kernels; torch's threads are set once per process."""
    model = synthetic_model()  # not read: the weights are given
    if isinstance(weights, NativeWeights):
        pool = native_threads(weights.library, threads)
        return NativeRunner(model, limits, weights=weights, pool=pool, kv_dtype=kv_dtype)
    return ModelRunner(model, limits, weights=weights)


class Spy:
    """Stands in for the sampler: keeps raw logits by (row, position of the new token), samples the argmax."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, int], bytes] = {}
        self.events: list[Any] = []

    def vacate(self, row: int) -> None:
        self.events.append(("vacate", row))

    def move(self, move: Move) -> None:
        self.events.append(move)

    def seat(self, seat: Seat) -> None:
        self.events.append(("seat", seat.row))

    def reports_prompt(self, row: int) -> bool:
        return False

    def prompt_positions(self, row: int, start: int, count: int) -> list[int]:
        return []

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[Sampled]:
        for row, position, values in zip(rows, positions, logits.cpu().numpy(), strict=True):
            self.logits[row, position] = values.tobytes()
        return [Sampled(int(values.argmax())) for values in logits.cpu().numpy()]


class Driver:
    """One runner over ``weights``; blocks are handed out from ``order`` (a list of block ids), never given back."""

    def __init__(
        self,
        weights: Weights | NativeWeights,
        *,
        rows: int = 4,
        block_size: int = 4,
        num_blocks: int = 256,
        max_model_len: int = 160,
        captures: tuple[tuple[int, int], ...] = (),
        order: Sequence[int] | None = None,
        poison: float | None = None,
        threads: int = 2,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=512,
            max_model_len=max_model_len,
            vocab_size=weights.config.vocab_size,
            captures=captures,
        )
        self.runner = runner_for(weights, limits, threads, kv_dtype)
        self.spy = Spy()
        self.runner.sampler = self.spy  # type: ignore[assignment]
        if poison is not None:
            for layer in self.runner.pool.layers:
                layer[:, : self.runner.pool.zero_block] = poison
        self.runner.warm()
        self._free = list(range(num_blocks)) if order is None else list(order)
        self.tables: dict[int, list[int]] = {}
        self._iteration = 0

    def blocks(self, row: int, tokens: int) -> tuple[int, ...]:
        """The missing blocks for ``tokens`` positions, taken now."""
        table = self.tables.setdefault(row, [])
        new = [self._free.pop(0) for _ in range(self.runner.limits.blocks_for(tokens) - len(table))]
        table += new
        return tuple(new)

    def execute(self, **parts: Any) -> list[Sampled]:
        self._iteration += 1
        return list(self.runner.execute(Plan(self._iteration, **parts)))

    def start(self, prompts: Mapping[int, Sequence[int]], chunk: int = 10**6) -> None:
        """Seats and prefills prompts, by row, in chunks of at most ``chunk`` tokens; all rows advance together."""
        seats = []
        for row, prompt in prompts.items():
            self.tables[row] = []
            self.blocks(row, len(prompt))
            seats.append(Seat(row, row, tuple(prompt), len(prompt), tuple(self.tables[row]), None))
        done = 0
        while done < max(map(len, prompts.values())):
            chunks = tuple(
                Chunk(row, row, done, tuple(prompt[done : done + chunk]), done + chunk >= len(prompt))
                for row, prompt in prompts.items()
                if done < len(prompt)
            )
            self.execute(seated=tuple(seats) if done == 0 else (), chunks=chunks)
            done += chunk

    def decode(self, tokens: dict[int, tuple[int, int]], launch: Replay | Eager | None = None) -> list[Sampled]:
        """One step: row -> (position, token)."""
        grown = [
            Grow(row, row, block) for row, (position, _) in tokens.items() for block in self.blocks(row, position + 1)
        ]
        decodes = tuple(Decode(row, row, position, token) for row, (position, token) in sorted(tokens.items()))
        return self.execute(grown=tuple(grown), decodes=decodes, launch=launch or Eager("test"))


def text(seed: int, length: int, vocab: int = 283) -> tuple[int, ...]:
    """Pseudo-random token ids."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, vocab, length))


@functools.cache
def solo(name: str, tokens: tuple[int, ...], prompt: int) -> dict[int, bytes]:
    """Logits by position of the new token: the request alone, prompt in one chunk, then one eager decode per token."""
    driver = Driver(shared_weights(name), rows=1, threads=1)
    driver.start({0: tokens[:prompt]})
    for position in range(prompt, len(tokens)):
        driver.decode({0: (position, tokens[position])})
    return {position: logits for (_, position), logits in driver.spy.logits.items()}


def differences(driver: Driver, name: str, requests: dict[int, tuple[tuple[int, ...], int]]) -> list[str]:
    """Where the logits that ``driver`` saw differ from solo runs; ``requests``: row -> (tokens, prompt length)."""
    wrong = []
    for (row, position), logits in sorted(driver.spy.logits.items()):
        tokens, prompt = requests[row]
        if logits != solo(name, tokens, prompt)[position]:
            wrong.append(f"row {row}, position {position}")
    return wrong
