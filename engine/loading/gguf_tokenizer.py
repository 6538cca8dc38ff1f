"""A tokenizer rebuilt from the ``tokenizer.ggml.*`` keys of a GGUF file.

Two kinds are known. ``gpt2`` is byte-level BPE with explicit merges, after a split by the rule that
``tokenizer.ggml.pre`` names. ``llama`` is SentencePiece BPE: no merges, but a score per piece, and the adjacent pair
with the best score is joined first. Every way to split a piece in two becomes a merge, ranked by the score of the
whole, which gives the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.loading.gguf_header import Strings
from engine.loading.model import LoadError
from engine.loading.template import ChatTemplate
from engine.loading.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE_MARK = "\u2581"
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
# Words with one leading mark, digits in groups, punctuation with the newlines after it, runs of space.
_WORDS = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "llama3": (_WORDS % "{1,3}",),
    "qwen2": (_WORDS % "",),
    "smollm": (r"\p{N}",),
    "gpt-2": (),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
}
_THEN_GPT2 = ("smollm", "gpt-2")  # these finish with the GPT-2 rule that is built into ByteLevel
_ALIASES = {"llama-bpe": "llama3", "llama-v3": "llama3", "smaug-bpe": "llama3", "deepseek-r1-qwen": "qwen2"}
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def gguf_tokenizer(metadata: Mapping[str, Any], vocab_size: int, where: str) -> Tokenizer:
    """The tokenizer that ``metadata`` describes. Raises ``LoadError`` naming the key that is missing or unknown."""
    tokens = list(_strings(metadata, "tokens", where))
    if len(tokens) > vocab_size:
        raise LoadError(f"{where}: {len(tokens)} tokens, but the embedding has {vocab_size} rows")
    types = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = [int(kind) for kind in _numbers(metadata, "token_type", len(tokens), where)]
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            backend, bos_by_default = _byte_level(metadata, tokens, types, where)
        elif kind == "llama":
            backend, bos_by_default = _sentencepiece(metadata, tokens, types, where), True
        else:
            raise LoadError(f"{where}: tokenizer.ggml.model is {kind!r}, but must be 'gpt2' or 'llama'")
    except LoadError:
        raise
    except Exception as error:  # noqa: BLE001 (the library raises bare Exception)
        raise LoadError(f"{where}: the tokenizer cannot be rebuilt: {error}") from None
    for code, special in ((_CONTROL, True), (_UNKNOWN, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, types, strict=True) if k == code
        ]
        (backend.add_special_tokens if special else backend.add_tokens)([token for token in added if token.content])
    bos = _special_id(metadata, "bos", tokens, where)
    _frame(backend, metadata, tokens, bos, bos_by_default, where)
    return Tokenizer(backend, bos_id=bos, eos_ids=_end_ids(metadata, tokens, types, where), vocab_size=vocab_size)


def gguf_template(metadata: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> ChatTemplate | None:
    """``tokenizer.chat_template`` and its named siblings, or None where the file has none."""
    prefix = "tokenizer.chat_template"
    sources = {key[len(prefix) + 1 :] or "default": text for key, text in metadata.items() if _is_template(key, prefix)}
    if not sources:
        return None
    for name, text in sources.items():
        if not isinstance(text, str):
            raise LoadError(f"{where}: chat template {name!r} is not a string")
    tokens = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if not isinstance(token, int) or not 0 <= token < tokenizer.vocab_size:
            continue
        text = tokenizer.backend.id_to_token(token)
        if text is not None:
            tokens[f"{name}_token"] = text
    return ChatTemplate(sources, tokens, where=f"{where}: chat template")


def _is_template(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(prefix + ".")


def _strings(metadata: Mapping[str, Any], name: str, where: str) -> Sequence[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if isinstance(value, Strings) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise LoadError(f"{where}: tokenizer.ggml.{name} is missing or not a list of strings")


def _numbers(metadata: Mapping[str, Any], name: str, count: int, where: str) -> list[float]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, np.ndarray) or len(value) != count or not np.isfinite(value).all():
        raise LoadError(f"{where}: tokenizer.ggml.{name} is missing or not a list of {count} numbers, one per token")
    numbers: list[float] = value.tolist()
    return numbers


def _vocabulary(tokens: Sequence[str], types: Sequence[int], where: str) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:
            continue
        if token in vocab:
            raise LoadError(f"{where}: tokens {vocab[token]} and {i} are both {token!r}")
        vocab[token] = i
    return vocab


class _Merges(Sequence[tuple[str, str]]):
    """The two halves of each line, made when the library comes to it (see ``Strings``)."""

    def __init__(self, lines: Sequence[str], where: str) -> None:
        self._lines, self._where = lines, where

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for i, line in enumerate(self._lines):
            space = line.find(" ", 1)
            if space < 0:
                raise LoadError(f"{self._where}: merge {i} is {line!r}, without a space between its two halves")
            yield line[:space], line[space + 1 :]


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tuple[tokenizers.Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rule = _ALIASES.get(pre, pre)
    if rule not in _SPLITS:
        known = ", ".join(sorted({*_SPLITS, *_ALIASES}))
        raise LoadError(f"{where}: tokenizer.ggml.pre is {pre!r}, but must be one of {known}")
    merges: Any = _Merges(_strings(metadata, "merges", where), where)
    vocab = _vocabulary(tokens, types, where)
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama3")
    except Exception:
        for _ in merges:  # raises what was wrong with a line, which the library does not hand on as it was
            pass
        raise
    backend = tokenizers.Tokenizer(model)
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[rule]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in _THEN_GPT2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, rule == "llama3"


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tokenizers.Tokenizer:
    scores = _numbers(metadata, "scores", len(tokens), where)
    vocab = _vocabulary(tokens, types, where)
    mergeable = {token: i for token, i in vocab.items() if types[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    merges = []
    for token, i in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-scores[i], i, mergeable[left], mergeable[right], (left, right)))
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    byte_fallback = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if unknown is None and not byte_fallback:
        raise LoadError(f"{where}: the vocabulary has neither an unknown token nor all 256 byte tokens")
    pairs = [merge[-1] for merge in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Prepend(_SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE_MARK)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _special_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str], where: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
        raise LoadError(f"{where}: tokenizer.ggml.{name}_token_id is {value!r}, but must be in [0, {len(tokens)})")
    return value


def _frame(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    bos: int | None,
    bos_by_default: bool,
    where: str,
) -> None:
    """BOS in front and EOS behind, where the file asks for them."""
    eos = _special_id(metadata, "eos", tokens, where)
    front = bos if metadata.get("tokenizer.ggml.add_bos_token", bos_by_default) else None
    back = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if front is None and back is None:
        return
    single = [*([tokens[front]] if front is not None else []), "$A", *([tokens[back]] if back is not None else [])]
    used = {tokens[token]: token for token in (front, back) if token is not None}
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=list(used.items())
    )


def _end_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> frozenset[int]:
    """EOS, end of turn and end of message. Older files do not name their end of turn; its usual spellings are known."""
    ids = {_special_id(metadata, name, tokens, where) for name in ("eos", "eot", "eom")}
    if "tokenizer.ggml.eot_token_id" not in metadata:
        ids |= {i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_OF_TURN}
    return frozenset(token for token in ids if token is not None)
