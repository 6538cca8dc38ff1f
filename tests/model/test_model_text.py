"""SPEC.md as a text that stands alone: it refers to nothing that is not here, and says of numbers what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import model_sim
from engine.control.limits import Limits
from engine.trace import Shape, Submit, Workload
from model_sim import Model
from properties.lockstep import run
from properties.report import timeline

SPEC = (Path(model_sim.__file__).parent / "SPEC.md").read_text(encoding="utf-8")
CLAUSES = set(re.findall(r"^- (\d+\.\d+) ", SPEC, re.MULTILINE)) | set(re.findall(r"^## (\d+) ", SPEC, re.MULTILINE))
ENGINE: dict[str, Any] = {
    "num_blocks": 8,
    "block_size": 4,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 16,
    "vocab_size": 9,
}
MODEL = {"blocks": 8, "block_size": 4, "rows": 2, "budget": 16, "max_model_len": 16, "vocab": 9}


def glossary() -> list[str]:
    return re.findall(r"^- (\*.*?)(?=^- |\Z)", SPEC.partition("## Glossary")[2], re.MULTILINE | re.DOTALL)


def test_it_refers_to_no_other_document() -> None:
    assert not re.findall(r"\bthe design\b|design\.md", SPEC, re.IGNORECASE)
    named = set(re.findall(r"`([\w/]+\.(?:py|md|txt))`", SPEC))
    assert named == {"model_sim/model.py"}


def test_numbers_in_brackets_are_rules() -> None:
    cited = {number for text in re.findall(r"\(([^()]*)\)", SPEC) for number in re.findall(r"\b\d+\.\d+\b", text)}
    assert len(cited) >= 30
    assert cited <= CLAUSES


def test_the_glossary_is_in_order_and_uses_words_of_the_rules() -> None:
    entries = glossary()
    rules = SPEC.partition("## Glossary")[0].lower()
    first = [re.findall(r"\*([^*]+)\*", entry)[0] for entry in entries]
    assert len(first) > 20
    assert first == sorted(first, key=str.lower)
    assert [word for word in first if word.split(",")[0].lower().split()[-1] not in rules] == []


@pytest.mark.parametrize(
    ("change", "refused_by_model"),
    [
        ({"max_num_batched_tokens": 1}, True),
        ({"watermark": -1}, True),
        ({"watermark": 8}, False),
        ({"max_waiting": 0}, False),
        ({"max_waiting": -1}, True),
        ({"num_blocks": 0}, True),
        ({"block_size": 0}, True),
        ({"max_num_seqs": 0}, True),
        ({"max_model_len": 0}, True),
        ({"vocab_size": 0}, True),
    ],
)
def test_what_is_refused_at_start(change: dict[str, int], refused_by_model: bool) -> None:
    """Rule 9.1, on both sides."""
    Limits(**ENGINE)
    Limits(**ENGINE | {"watermark": 7, "max_waiting": 1})
    with pytest.raises(ValueError, match="must be"):
        Limits(**ENGINE | change)
    names = dict(zip(ENGINE, MODEL, strict=True)) | {"max_num_batched_tokens": "budget"}
    sizes: dict[str, Any] = MODEL | {names.get(name, name): value for name, value in change.items()}
    if refused_by_model:
        with pytest.raises(ValueError, match="at least"):
            Model(**sizes)
    else:
        Model(**sizes)


def test_iteration_0_is_line_1_of_a_timeline() -> None:
    """Rule 3.2."""
    assert Model(**MODEL).step(lambda request, k: 0)["iteration"] == 0
    shape = Shape(blocks=8, block_size=4, rows=2)
    outcome = run(Workload(shape, (Submit(0, (("a", 2),), 2),)), make_rung=None)
    lines = list(timeline(outcome))
    assert [line.split()[0] for line in lines[:3]] == ["it", "1", "2"]
    assert outcome.steps[0].step["iteration"] == 0
