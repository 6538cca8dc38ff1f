"""Arrays of strings in a GGUF file stay bytes until they are asked for, and are gone once the model is loaded."""

from __future__ import annotations

import gc
import struct
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import engine.loading.gguf_file as gguf_file
import engine.loading.gguf_header as gguf_header
from engine.loading import LoadError, load_model
from engine.loading.gguf_header import GGUFHeader, Strings
from engine.loading.gguf_tokenizer import _Merges
from tests.models import write_gguf

WORDS = ["", "a", "", "naïve", "日本語", " x y ", "🎉", ""]


def strings(words: Sequence[str]) -> Strings:
    raw, ends = b"", array("q")
    for word in words:
        raw += struct.pack("<Q", len(word.encode())) + word.encode()
        ends.append(len(raw))
    return Strings(raw, ends)


@pytest.mark.parametrize("words", [WORDS, WORDS[:1], []])
def test_strings_are_the_list_that_they_stand_for(words: list[str]) -> None:
    made = strings(words)
    assert list(made) == words
    assert len(made) == len(words)
    assert [made[i] for i in range(-len(words), len(words))] == words * 2
    assert made[1:-1] == words[1:-1]
    assert list(reversed(made)) == words[::-1]
    for outside in (len(words), -len(words) - 1):
        with pytest.raises(IndexError):
            made[outside]


def test_merges_are_pairs_and_name_the_line_that_is_none() -> None:
    merges = _Merges(strings(["a b", "  ", "ab c d"]), "place")
    assert list(merges) == [("a", "b"), (" ", ""), ("ab", "c d")]
    assert (len(merges), merges[2], merges[-1]) == (3, ("ab", "c d"), ("ab", "c d"))
    with pytest.raises(LoadError, match="place: merge 1 is ' ab', without a space"):
        list(_Merges(["a b", " ab"], "place"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """What a header consists of, for every header that is read from here on."""
    found: list[weakref.ref[Any]] = []
    real = gguf_header.read_header

    def noted(path: Path, block_sizes: Any) -> GGUFHeader:
        header = real(path, block_sizes)
        kept = [value for value in header.metadata.values() if isinstance(value, Strings)]
        assert len(kept) >= 2  # tokens and merges
        found.extend(weakref.ref(value) for value in (header, *kept))
        return header

    monkeypatch.setattr(gguf_file, "read_header", noted)
    return found


def test_nothing_of_the_header_outlives_loading(read: list[weakref.ref[Any]], tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "a.gguf"))
    gc.collect()
    assert model.tokenizer is not None
    assert read
    assert [ref() for ref in read if ref() is not None] == []


def test_what_is_kept_would_be_seen(
    read: list[weakref.ref[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    real = vars(gguf_file)["gguf_template"]

    def keeping(*given: Any) -> Any:
        kept.append(given)
        return real(*given)

    monkeypatch.setattr(gguf_file, "gguf_template", keeping)
    load_model(write_gguf(tmp_path / "a.gguf"))
    gc.collect()
    assert sum(ref() is not None for ref in read) >= 2
