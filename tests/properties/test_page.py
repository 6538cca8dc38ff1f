"""The page as a file: self-contained, nothing in it can leave its place, and its data is both ledgers of every iteration.

What it looks like and does in a browser is for tests/browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from engine.trace import Shape, Submit, Workload, load
from properties import corpus
from properties.__main__ import main
from properties.decided import of_record, of_step
from properties.faults import armed
from properties.lockstep import Run, run
from properties.page import page
from properties.sides import sides

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(2)> & "quoted" \u2028'
SHARING = Workload(
    Shape(6, 2, 3, budget=8, capture_rows=(1, 2, 3), capture_widths=(4,), prefix_cache=True),
    (Submit(0, (("sys", 4), ("a", 1)), 4), Submit(1, (("sys", 4), ("b", 1)), 4), Submit(0, (("c", 5),), 4)),
    title=HOSTILE,
)
LONG = Workload(
    Shape(64, 4, 2, budget=64, max_model_len=160, prefix_cache=True),
    tuple(Submit(2 * (k % 3), (("sys", 16), ("abcdef"[k % 6], 3 + k * 7 % 50)), 20 + k % 30) for k in range(32)),
)


class Reader(HTMLParser):
    """Tags with their attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.texts[self._open][-1] += data


def made(workload: Workload = SHARING, fault: str | None = None) -> tuple[str, Run]:
    with armed(fault):
        outcome = run(workload)
    return page(workload, outcome, f"replay {HOSTILE}"), outcome


def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Reader(text).texts["script"][0])
    return found


def test_what_a_file_says_stays_text() -> None:
    text, _ = made()
    reader = Reader(text)
    assert len(reader.texts["script"]) == 2
    assert "img" not in reader.texts
    assert reader.texts["h1"] == [HOSTILE]
    assert [attributes.get("type") for tag, attributes in reader.tags if tag == "script"] == ["application/json", None]
    handlers = [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    assert handlers == []
    assert "<" not in reader.texts["script"][0]
    assert "innerHTML" not in reader.texts["script"][1]


def test_nothing_comes_from_outside() -> None:
    text, _ = made()
    assert re.findall(r"\b(?:https?:|//[a-z])", text) == []
    references = [(tag, a[name]) for tag, a in Reader(text).tags for name in ("src", "href") if name in a]
    assert references == [("link", "data:,")]


def test_the_policy_allows_exactly_the_script_and_style_that_stand_there() -> None:
    text, _ = made()
    reader = Reader(text)
    (policy,) = (a["content"] or "" for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for kind, written in (("script-src", reader.texts["script"][1]), ("style-src", reader.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(written.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy


def test_the_data_is_both_ledgers_of_every_iteration() -> None:
    """Decoded as the script decodes it: each iteration sends what changed, of a mapping its changed entries."""
    text, outcome = made()
    data = data_of(text)
    assert data["names"] == ["engine", "specification"]
    assert len(data["steps"]) == len(outcome.steps) > 5
    held: list[dict[str, Any]] = [{}, {}]
    shared = published = 0
    for sent, (step, mine, theirs) in zip(data["steps"], sides(outcome.steps), strict=True):
        assert sent["it"] == step.iteration
        for which, side in enumerate((mine, theirs)):
            assert side is not None
            for name, change in sent["sides"][which].items():
                whole = change if isinstance(change, list) else {**held[which].get(name, {}), **change}
                held[which][name] = (
                    whole if isinstance(whole, list) else {key: v for key, v in whole.items() if v is not None}
                )
            assert held[which]["blank"] == list(side.blank)
            assert held[which]["cached"] == list(side.cached)
            assert held[which]["waiting"] == list(side.waiting)
            assert held[which]["tables"] == {str(r): list(table) for r, table in side.tables.items() if table}
            assert held[which]["rows"] == {str(r): row for r, row in side.rows.items()}
            assert held[which]["published"].keys() == {str(block) for block in side.published}
        references = [block for table in held[0]["tables"].values() for block in table]
        shared += len(references) > len(set(references))
        published += bool(held[0]["published"])
    assert shared
    assert published


def test_both_sides_tell_their_decisions_in_the_same_words() -> None:
    """Over the corpus, fault-free: whatever is decided is written alike, so a difference on the page is one."""
    told: set[str] = set()
    for workload in corpus.workloads().values():
        for step in run(workload).steps:
            if step.record is not None:
                assert of_record(step.record) == of_step(step.step)
                told |= {name for name, text in of_step(step.step).items() if text}
    every = {"aborted", "reaped", "grown", "preempted", "moves", "admitted", "chunks", "decodes", "launch", "execute"}
    assert told == every | {"sampled", "finished"}


def test_a_finding_is_marked_and_told() -> None:
    workload = load(next(corpus.REGRESS.glob("A03-*.json")))
    text, outcome = made(workload, "A03")
    assert outcome.first is not None
    data = data_of(text)
    assert data["finding"]["iteration"] == outcome.first.iteration
    marked = [step["it"] for step in data["steps"] if step["differs"]]
    assert marked == [outcome.first.iteration]
    (blank,) = (line for line in data["steps"][-1]["differs"] if line[0] == "blank")
    assert "has no owner and is not free" in blank[3]
    reader = Reader(text)
    assert f"</strong> {escape(outcome.first.headline)}</p>" in text
    assert f"replay {HOSTILE}" in reader.texts["code"]
    assert any("last to hold block" in pre for pre in reader.texts["pre"])


def test_a_long_run_stays_a_small_file() -> None:
    text, outcome = made(LONG)
    assert len(outcome.steps) >= 500
    assert len(text) < 1_000_000


def test_replay_and_show_write_it(tmp_path: Path) -> None:
    file = str(next(corpus.REGRESS.glob("A03-*.json")))
    out, alone = tmp_path / "run.html", tmp_path / "alone.html"
    assert main(["replay", file, "--arm", "A03", "--html", str(out)]) == 1
    assert main(["show", file, "--html", str(alone)]) == 0
    assert data_of(out.read_text(encoding="utf-8"))["names"] == ["engine", "specification"]
    shown = data_of(alone.read_text(encoding="utf-8"))
    assert (shown["names"], shown["finding"]) == (["specification"], None)
    assert main(["replay", file, "--html", str(tmp_path / "no" / "folder.html")]) == 2
