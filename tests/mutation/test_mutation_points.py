"""What counts as a mutant, how it is found again after an edit, and how a sample is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.mutation_points import Mutant, draw, mutants

TEXT = '''\
def f(a: int, b: int) -> int:
    """What it does: 1 + 1."""
    if a > 0 and b:
        g(a, 1)
    return a + b
'''
CONTROL = Path(__file__).parents[2] / "engine" / "control"


def news(text: str) -> list[str]:
    return [mutant.new.strip() for mutant in mutants("f.py", text)]


def test_every_place_in_a_small_function() -> None:
    assert set(news(TEXT)) == {
        "if a >= 0 and b:",
        "if a > 1 and b:",
        "if a > 0 or b:",
        "if not (a > 0 and b):",
        "pass",
        "g(None, 1)",
        "g(a, None)",
        "g(1)",
        "g(a, )",
        "g(a, 2)",
        "return a - b",
        "return None",
    }


@pytest.mark.parametrize(
    "text",
    [
        '"""Doc."""\nimport os\n__all__ = ["a", "b"]\n',
        "def f(a: Literal['x'], b: list[int]) -> None:\n    '''Doc.'''\n    assert a is not None\n",
        "@frozen(eq=False)\nclass A:\n    'Doc.'\n    b: int\n",
        "def f(a):\n    yield f'{a + 1} is wrong'\n".replace("yield ", "return "),
    ],
)
def test_what_only_people_and_type_checkers_read_is_left_alone(text: str) -> None:
    assert [new for new in news(text) if new != "return None"] == []


def test_of_a_refusal_the_word_is_mutated_and_the_sentence_is_not() -> None:
    found = news('raise Refusal("pool", f"{1 + 1} blocks", "more than there are")\n')
    assert found == ["pass", 'raise Refusal("XXpoolXX", f"{1 + 1} blocks", "more than there are")'] + [
        'raise Refusal("POOL", f"{1 + 1} blocks", "more than there are")'
    ]


def test_a_long_statement_keeps_only_the_lines_that_change() -> None:
    call = "def f():\n    return g(\n        one,\n        two,\n    )\n"
    changed = {(m.old.strip(), m.new.strip()) for m in mutants("f.py", call)}
    assert ("one,", "None,") in changed
    assert ("one,", "") in changed
    for mutant in mutants("f.py", call):
        compile(mutant.apply(call) or "(", "f.py", "exec")


def test_a_mutant_is_found_again_when_lines_move_and_not_when_they_change() -> None:
    mutant = next(m for m in mutants("f.py", TEXT) if m.new.strip() == "return a - b")
    moved = "x = 1\n\n\n" + TEXT
    assert mutant.apply(moved) == moved.replace("a + b", "a - b")
    assert mutant in mutants("f.py", moved)
    assert mutant.apply(TEXT.replace("a + b", "b + a")) is None
    assert mutant.apply(TEXT.replace("def f", "def g")) is None


def test_equal_lines_are_told_apart() -> None:
    text = "def f(a):\n    a.b(1)\n    a.b(1)\n\n\ndef g(a):\n    a.b(1)\n"
    applied = [m.apply(text) for m in mutants("f.py", text) if m.new.strip() == "a.b(2)"]
    lines = text.splitlines()
    assert applied == [
        "\n".join(line.replace("1", "2") if i == at else line for i, line in enumerate(lines)) + "\n"
        for at in (1, 2, 6)
    ]
    assert len({m.key for m in mutants("f.py", text)}) == len(mutants("f.py", text))


def test_a_sample_changes_only_where_the_text_does() -> None:
    before = mutants("f.py", TEXT)
    after = mutants("f.py", TEXT.replace("a + b", "a + b + a"))
    chosen = draw(before, 6, seed=1)
    assert chosen == draw(reversed(before), 6, seed=1)
    assert chosen != draw(before, 6, seed=2)
    assert {m for m in chosen if m in after} <= {*draw(after, 6 + len(after) - len(before) + 1, seed=1)}


def test_every_drawn_mutant_of_control_compiles_and_is_another_text() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in CONTROL.glob("*.py")}
    everyone = [mutant for name, text in texts.items() for mutant in mutants(name, text)]
    assert len(everyone) > 1000
    assert len({mutant.key for mutant in everyone}) == len(everyone)
    for mutant in draw(everyone, 40, seed=0):
        text = mutant.apply(texts[mutant.file])
        assert text not in (None, texts[mutant.file]), mutant
        compile(str(text), mutant.file, "exec")


def test_a_mutant_with_an_unknown_scope_fits_nowhere() -> None:
    assert Mutant("f.py", "h", "number", "x = 1", "x = 2", 0).apply(TEXT) is None
