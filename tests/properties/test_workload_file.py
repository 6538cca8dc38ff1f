"""The workload value and its file: what is written is read back, and what is no workload is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings

from engine.trace import (
    VOCAB,
    Abort,
    FailStep,
    FormatError,
    Shape,
    Submit,
    Workload,
    dumps,
    load,
    loads,
    prompt_tokens,
    save,
    stream_token,
)
from properties import corpus
from properties.play import label
from properties.strategies import workloads

TEXT = """\
{"format": "workload/1", "title": "the third release leaks a block", "fault": "A05",
 "shape": {"blocks": 10, "block_size": 4, "rows": 3, "budget": 2048, "watermark": 0, "max_model_len": 64,
           "capture_rows": [1, 2, 4], "capture_widths": [4, 16], "persistent_batch": true, "prefix_cache": false, "max_waiting": 64},
 "events": [
  {"wait": 0, "submit": {"prompt": [["a", 4]], "max_tokens": 8}},
  {"wait": 2, "submit": {"prompt": [["sys", 12], ["b", 3]], "max_tokens": 5, "stop_at": 2, "priority": 1, "temperature": 0.8, "seed": 7, "salt": "t1"}},
  {"wait": 1, "abort": 0},
  {"wait": 3, "fail_step": 1}]}
"""  # noqa: E501
VALUE = Workload(
    Shape(10, 4, 3, capture_rows=(1, 2, 4), capture_widths=(4, 16)),
    (
        Submit(0, (("a", 4),), 8),
        Submit(2, (("sys", 12), ("b", 3)), 5, stop_at=2, priority=1, temperature=0.8, seed=7, salt="t1"),
        Abort(1, 0),
        FailStep(3, 1),
    ),
    title="the third release leaks a block",
    fault="A05",
)


def test_a_file_is_exactly_this_text() -> None:
    assert dumps(VALUE) == TEXT
    assert loads(TEXT) == VALUE


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(workloads())
def test_what_is_written_is_read_back(workload: Workload) -> None:
    text = dumps(workload)
    assert loads(text) == workload
    assert dumps(loads(text)) == text
    assert text.count("\n") == max(4, 4 + len(workload.events)) - (not workload.events)


@pytest.mark.parametrize("path", corpus.files(), ids=lambda path: path.name)
def test_the_corpus_is_in_the_written_form(path: Path) -> None:
    assert dumps(load(path)) == path.read_text(encoding="utf-8")


def _edited(**changes: object) -> str:
    return json.dumps({**json.loads(TEXT), **changes})


def _shaped(**changes: object) -> str:
    return _edited(shape={"blocks": 4, "block_size": 2, "rows": 2, **changes})


def _submitted(**changes: object) -> str:
    return _edited(events=[{"submit": {"prompt": [["a", 1]], "max_tokens": 1, **changes}}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON"),
        ("[]", "a workload is a JSON object, but this is a list"),
        (_edited(format="workload/9"), "format is 'workload/9', but must be 'workload/1'"),
        (_edited(colour=1), "the workload has the unknown key 'colour'"),
        (_shaped(pool=4), "shape has the unknown key 'pool'; allowed are blocks"),
        (_submitted(stop=1), "event 1: submit has the unknown key 'stop'"),
        (_edited(events=[{"wait": 0, "stall": 1}]), "event 1: it has the unknown key 'stall'"),
        (_edited(events=[{"wait": 0}]), "event 1: it has no kind"),
        (_edited(events=[{"abort": 0, "fail_step": 1}]), "event 1: it has .*abort.*fail_step"),
        (_edited(events={}), "events is an object, but must be a list"),
        (_edited(shape={"blocks": 4, "rows": 2}), "shape has no 'block_size', but it is needed"),
        (_edited(title=3), "title is 3, but must be text"),
        (_edited(fault=3), "fault is 3, but must be text"),
        (_edited(found={"seed": []}), r"found.seed is \[\], but must be text or an integer"),
        (_shaped(blocks=0), "shape.blocks is 0, but must be an integer in 1.."),
        (_shaped(blocks=True), "shape.blocks is True, but must be an integer"),
        (_shaped(watermark=4), "shape.watermark is 4, but must be an integer in 0..3"),
        (_shaped(budget=1), "shape.budget .* is 1, but must be an integer in 2.."),
        (_shaped(capture_rows=[2, 1]), r"shape.capture_rows is \[2, 1\], but must be ascending"),
        (_shaped(persistent_batch=1), "shape.persistent_batch is 1, but must be true or false"),
        (_shaped(prefix_cache=1), "shape.prefix_cache is 1, but must be true or false"),
        (_submitted(prompt=[["a"]]), r"submit.prompt holds \['a'\], but each piece must be \[stream, length\]"),
        (_submitted(prompt=[["a", -1]]), "submit.prompt length of 'a' is -1"),
        (_submitted(prompt=[["a", 2**20], ["b", 2**20]]), "submit.prompt has 2097152 tokens"),
        (_submitted(stop_at=0), "submit.stop_at is 0, but must be an integer in 1.."),
        (_submitted(n=65), "submit.n is 65, but must be an integer in 1..64"),
        (_submitted(temperature="hot"), "submit.temperature is 'hot'"),
        (_submitted(max_tokens=1.5), "submit.max_tokens is 1.5"),
        ('{"format": "workload/1", "format": "workload/1"}', "the key 'format' stands twice in one object"),
    ],
)
def test_what_is_no_workload_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        loads(text)


def test_a_refused_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}")
    with pytest.raises(FormatError, match=r"broken.json: format is None"):
        load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"broken.json: this is not UTF-8 text"):
        load(path)


def test_an_old_format_is_upgraded_step_by_step() -> None:
    def from_minus_1(document: dict[str, object]) -> dict[str, object]:
        return {**document, "format": "workload/0", "name": "renamed twice"}

    def from_0(document: dict[str, object]) -> dict[str, object]:
        changed = {**document, "format": "workload/1", "title": document["name"]}
        del changed["name"]
        return changed

    old = _edited(format="workload/-1")
    upgraded = loads(old, upgrades={"workload/-1": from_minus_1, "workload/0": from_0})
    assert upgraded.title == "renamed twice"
    assert upgraded.digest() == VALUE.digest()


def test_the_digest_is_of_the_run_not_of_its_title() -> None:
    assert VALUE.digest() == "3824b544563f05dc"
    assert VALUE.titled("another").digest() == VALUE.digest()
    assert Workload(VALUE.shape, VALUE.events[:3]).digest() != VALUE.digest()


def test_equal_streams_give_equal_prefixes() -> None:
    long, short = prompt_tokens((("sys", 9), ("a", 2))), prompt_tokens((("sys", 5),))
    assert long[:5] == short
    assert long[9:] == prompt_tokens((("a", 2),))
    assert {stream_token(name, at) < VOCAB for name in "ab" for at in range(500)} == {True}
    assert stream_token("!", 0) == VOCAB


def test_every_abort_means_somebody_or_nobody() -> None:
    assert [Abort(0, of).target(3) for of in (0, 2, 3, 7, -1)] == [0, 2, 0, 1, 2]
    assert Abort(0, 5).target(0) is None
    assert label(Abort(0, 5), 0) == "(abort nobody)"
    assert label(FailStep(0, 0), 0) == "(fail 0)"


def test_saving_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "found" / "deep" / "one.json"
    save(VALUE, path)
    assert load(path) == VALUE


@pytest.mark.parametrize("text", ['{"format": ["x"]}', '{"format": {}}', '{"format": "\\ud800"}'])
def test_a_format_that_is_no_text_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="format is "):
        loads(text)


HALVES: list[tuple[str, Callable[[str], object]]] = [
    ("submit.prompt stream", lambda text: Submit(0, ((text, 1),), 1)),
    ("submit.salt", lambda text: Submit(0, (("a", 1),), 1, salt=text)),
    ("submit.client", lambda text: Submit(0, (("a", 1),), 1, client=text)),
    ("submit.fail_by", lambda text: Submit(0, (("a", 1),), 1, fail_by=text)),
    ("title", lambda text: Workload(VALUE.shape, (), title=text)),
    ("title", lambda text: VALUE.titled(text, fault="A05")),
    ("fault", lambda text: Workload(VALUE.shape, (), fault=text)),
    ("found.by", lambda text: Workload(VALUE.shape, (), found={"by": text})),
    ("a key of found", lambda text: Workload(VALUE.shape, (), found={text: 1})),
    ("digests", lambda text: Workload(VALUE.shape, (), digests=("a", text))),
]


@pytest.mark.parametrize(("where", "make"), HALVES, ids=[f"{at}-{where}" for at, (where, _) in enumerate(HALVES)])
@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d\ude00"])
def test_half_of_a_surrogate_pair_is_refused_where_it_is_given(
    where: str, make: Callable[[str], object], text: str
) -> None:
    """In Python, too: it could be neither written nor hashed, and would be found out by whoever saves the run."""
    with pytest.raises(FormatError, match=f"^{where} is .*ud"):
        make(text)


def test_text_of_a_file_is_refused_with_its_place() -> None:
    text = dumps(VALUE)
    for old, where in (('"title": "', "title is"), ('"prompt": [["', r"event \d: submit.prompt stream is")):
        with pytest.raises(FormatError, match=f"{where} .*half of a surrogate pair"):
            loads(text.replace(old, old + "\\ud800", 1))
    VALUE.titled("a whole one \U0001f600 is a character")
