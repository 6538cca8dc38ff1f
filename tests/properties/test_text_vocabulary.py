"""The nasty vocabulary decodes as the library does, is as nasty as it says, and its oracle shares nothing with the engine."""

from __future__ import annotations

import ast
import random
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from engine.loading.tokenizer import CHAR_OF_BYTE, Tokenizer
from engine.text.stream import TextStream
from engine.trace import VOCAB
from properties import solo_text
from properties.solo_text import NEVER, REPLACEMENT, stop_strings
from properties.toy_text import FALLBACK, PIECES, SPECIAL, UNKNOWN, vocabulary

KINDS = pytest.mark.parametrize("fallback", [False, True], ids=["byte level", "byte fallback"])


@cache
def real(fallback: bool) -> tuple[Tokenizer, tuple[int, ...]]:
    """The library's tokenizer of the same pieces, and its id for each id of ours: it takes each spelling once."""
    spellings: dict[str, int] = {}
    ids = []
    for token in range(VOCAB):
        found, raw = FALLBACK[token], PIECES[token]
        if found is None or raw is None:
            ids.append(-1)
            continue
        spelling = found[0].replace(" ", "\u2581") if fallback else "".join(CHAR_OF_BYTE[byte] for byte in raw)
        if token in SPECIAL:
            spelling = f"<s{token}>"
        ids.append(spellings.setdefault(spelling, len(spellings)))
    backend = tokenizers.Tokenizer(models.BPE(spellings, [], byte_fallback=fallback))
    backend.decoder = (
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        if fallback
        else decoders.ByteLevel()
    )
    backend.add_special_tokens([AddedToken(f"<s{token}>", special=True) for token in sorted(SPECIAL)])
    size = len(spellings) + 1
    return Tokenizer(backend, vocab_size=size), tuple(size - 1 if at < 0 else at for at in ids)


def drawn(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(30))]


@KINDS
def test_it_decodes_as_the_library_does(fallback: bool) -> None:
    tokenizer, ids = real(fallback)
    for seed in range(400):
        tokens = drawn(seed)
        mine = vocabulary(fallback).decode(tokens)
        assert mine == tokenizer.decode([ids[token] for token in tokens]), tokens
    for token in sorted(set(range(VOCAB)) - UNKNOWN):
        assert vocabulary(fallback).token_bytes(token) == tokenizer.token_bytes(ids[token]), token


@KINDS
def test_production_text_over_the_real_library_is_what_the_oracle_says(fallback: bool) -> None:
    """So nothing of the engine's text is right by courtesy of the vocabulary that stands in."""
    tokenizer, ids = real(fallback)
    stopped = 0
    for seed in range(300):
        prompt, tokens = drawn(-1 - seed)[:6], drawn(seed)
        stops = stop_strings(prompt, tokens, seed % 9 + 1, byte_fallback=fallback)
        include, least, at_length = seed % 3 == 0, seed % 5, seed % 2 == 0 and bool(tokens)
        alone = solo_text.solo_text(
            prompt,
            tokens,
            stops=stops,
            include_stop=include,
            min_tokens=least,
            byte_fallback=fallback,
            at_length=at_length,
        )
        stream = TextStream(tokenizer, [ids[token] for token in prompt], stop=stops, include_stop=include)
        for k, token in enumerate(tokens, 1):
            ended = stream.push(ids[token], k >= least, at_length and k == len(tokens))
            assert ended == (alone.after == k)
            if ended:
                break
            assert stream.text == alone.told(k), (prompt, tokens, stops, k)
        stream.finish()
        assert (stream.text, stream.matched) == (alone.text, alone.stop)
        stopped += alone.after is not None
    assert stopped > 50


def test_it_is_as_nasty_as_it_says() -> None:
    loud = [piece for token, piece in enumerate(PIECES) if piece is not None and token not in SPECIAL]
    broken = [piece for piece in loud if REPLACEMENT in piece.decode("utf-8", "replace")]
    assert len(broken) > VOCAB // 2
    assert sum(piece.startswith(b" ") for piece in loud) > 10
    assert sum(found is not None and found[1] is not None for found in FALLBACK) > VOCAB // 3
    kept = {piece: piece.decode("utf-8", "ignore") for piece in loud}
    made = sum((a + b).decode("utf-8", "ignore") != kept[a] + kept[b] for a in loud for b in loud)
    assert made > len(loud) ** 2 // 50, "characters that two tokens make together"
    assert not any(NEVER.encode() in piece for piece in loud)


def test_the_first_request_says_something_of_everything() -> None:
    text = b"".join(PIECES[token] or b"" for token in range(11, 27) if token not in SPECIAL).decode("utf-8", "replace")
    for part in ("caf\u00e9", "\U0001f389", "STOP", REPLACEMENT):
        assert part in text, part


@KINDS
def test_what_is_told_only_grows_and_is_a_prefix_of_the_whole(fallback: bool) -> None:
    for seed in range(200):
        tokens = drawn(seed)
        stops = stop_strings((), tokens, seed % 7 + 1, byte_fallback=fallback)
        alone = solo_text.solo_text((), tokens, stops=stops, byte_fallback=fallback)
        assert list(alone.lengths) == sorted(alone.lengths)
        assert len(alone.lengths) == len(tokens) + 1
        assert alone.text.startswith(alone.told(len(tokens)))


def test_a_stop_string_lies_across_a_token_border() -> None:
    tokens = [11, 12, 13, 15, 16, 18, 19, 20]
    first, longer, hope = stop_strings((), tokens, 7)
    alone = solo_text.solo_text((), tokens, stops=(first,))
    assert (alone.after, alone.stop) == (7, first)
    assert first not in solo_text.solo_text((), tokens[:6]).text
    assert first[0] in solo_text.solo_text((), tokens[:6]).text, "it begins in the text of an earlier token"
    assert longer.startswith(first[0]) or first[0] in longer
    assert hope.endswith(NEVER)
    assert stop_strings((), tokens, 99) == (hope,)


def test_the_oracle_knows_nothing_of_the_engines_text() -> None:
    imported = set()
    for name in ("solo_text", "toy_text"):
        tree = ast.parse((Path(solo_text.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {module for module in imported if module.startswith("engine")} == {"engine.trace"}
