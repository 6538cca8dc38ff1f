"""P2 over logits, to the byte, on the model that everybody gets: rows, place, chunk, tape, threads and history, by name.

A subset of what test_native_pairs.py covers pairwise on two layers; ``pytest -s`` prints it. 8-bit activations are held to the
same. Minutes of arithmetic, so all but the first case are slow.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from engine.loading import load_model
from engine.native.runner import library
from engine.native.weights import NativeWeights, load_native
from tests.native.test_native_pairs import STEPS, Case, alone_on, crowd_on

PROMPT = 61  # decoding crosses the border of the first tile
PLAIN: dict[str, Any] = {
    "weights": "shipped",
    "kv": torch.float16,
    "rows": 1,
    "place": "first",
    "chunk": 1000,
    "prompt": PROMPT,
    "threads": 1,
    "tape": "exact",
    "history": "fresh",
}
CASES: dict[str, dict[str, Any]] = {
    "a tape, alone": {},
    "two threads, alone": {"threads": 2},
    "first of two, chunks of 7": {"rows": 2, "chunk": 7, "threads": 2},
    "in the middle of five, padded, chunks of 16": {"rows": 5, "place": "middle", "chunk": 16, "tape": "padded"},
    "last of sixteen, no tape": {"rows": 16, "place": "last", "threads": 2, "tape": "none"},
    "chunks of 64 across two tiles": {"rows": 2, "chunk": 64, "prompt": 125},
    "preempted and computed anew": {"rows": 2, "history": "preempted", "threads": 2},
    "a warm prefix cache": {"rows": 2, "history": "warm", "chunk": 16},
    "keys in fp32": {"rows": 2, "kv": torch.float32, "threads": 2, "tape": "padded"},
    "keys in bf16": {"rows": 2, "kv": torch.bfloat16, "threads": 2, "tape": "padded"},
}


@functools.cache
def weights(integer: bool) -> NativeWeights:
    return load_native(load_model(), library(), integer=integer)


@functools.cache
def alone(integer: bool, kv: torch.dtype, prompt: int) -> dict[int, bytes]:
    return alone_on(weights(integer), kv, prompt)


def compared(name: str, integer: bool) -> bool:
    case = Case(**PLAIN | CASES[name] | ({"weights": "8-bit activations"} if integer else {}))
    print(f"{name}: {case}")
    wanted = alone(integer, case.kv, case.prompt)
    assert len(wanted) == STEPS + 1
    return crowd_on(weights(integer), case) == wanted


@pytest.mark.timeout(600)
def test_a_tape_alone() -> None:
    assert compared("a tape, alone", integer=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("integer", [False, True], ids=["as shipped", "8-bit activations"])
@pytest.mark.parametrize("name", CASES)
def test_same_bytes(name: str, integer: bool) -> None:
    assert compared(name, integer)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_other_bytes_are_seen() -> None:
    """8-bit activations, keys in bf16 and another prompt each give others at every position that both have."""
    base = alone(False, torch.float32, PROMPT)
    narrow = [alone(False, kind, PROMPT) for kind in (torch.float16, torch.bfloat16)]
    for other in (alone(True, torch.float32, PROMPT), *narrow):
        assert all(base[position] != other[position] for position in base)
