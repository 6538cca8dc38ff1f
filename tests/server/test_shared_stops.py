"""The stop strings of a request are compiled once, however many answers it asks for: a set costs megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from engine.request import SamplingParams
from engine.text import stops
from server.prompts import Prompt, make_choices
from tests.server.stub import stub_engine

LONG = [f"{i:02d}" + "x" * 498 for i in range(16)]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Every automaton that is built, by its stop strings."""
    calls: list[Sequence[str]] = []
    build = stops._automaton

    def counted(given: Sequence[str]) -> Any:
        calls.append(given)
        return build(given)

    monkeypatch.setattr(stops, "_automaton", counted)
    return calls


def test_all_choices_of_a_request_share_one_automaton(built: list[Sequence[str]]) -> None:
    params = attrs.evolve(SamplingParams(), n=4, stop=tuple(LONG))
    choices = make_choices([Prompt((1, at)) for at in range(64)], params, stub_engine().model)
    assert len(choices) == 256
    assert built == [params.stop]
    assert len({id(choice.text._stops._root) for choice in choices}) == 1
    assert len({id(choice.text._stops) for choice in choices}) == 256  # but each has a place of its own
