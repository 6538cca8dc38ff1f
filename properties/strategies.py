"""Hypothesis draws the choices of ``generate.workload``, so that what it finds is shrunk and remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from engine.trace import Workload
from properties import generate
from properties.generate import Source

T = TypeVar("T")

# Hypothesis takes the first alternatives more often than the others, here and everywhere below, so crowds are rarely large and
# often untroubled; more of them make up for it.
SHAPES = ("mixed", "crowd", "churn", "crowd", "family", "crowd", "crowd", "churn", "crowd")


class HypothesisSource:
    """Lists go through ``st.lists``, never through a drawn count and a loop: that would shrink badly."""

    def __init__(self, draw: DrawFn) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def many(self, make: Callable[[Source], T], low: int, high: int) -> list[T]:
        return self._draw(st.lists(_made(make), min_size=low, max_size=high))


@st.composite
def _made(draw: DrawFn, make: Callable[[Source], T]) -> T:
    return make(HypothesisSource(draw))


@st.composite
def workloads(draw: DrawFn) -> Workload:
    return generate.workload(HypothesisSource(draw), SHAPES)
