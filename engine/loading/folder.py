"""A Hugging Face model folder as a ``LoadedModel``: config.json, safetensors, tokenizer.json and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.loading.hf_config import parse_config, read_json
from engine.loading.model import LoadedModel, LoadError
from engine.loading.template import ChatTemplate
from engine.loading.tokenizer import Tokenizer
from engine.loading.weights import open_weights

MAX_TEMPLATE_BYTES = 1 << 20
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_folder(folder: Path) -> LoadedModel:
    """Checks everything in ``folder`` and returns the model; no weights are read. Raises ``LoadError``.

    A folder without tokenizer.json still loads, with ``tokenizer`` None: such a model takes token ids only.
    """
    path = folder / "config.json"
    if not path.is_file():
        ggufs = sorted(place.name for place in folder.glob("*.gguf"))
        hint = f"; to load {ggufs[0]}, give its own path" if ggufs else ""
        raise LoadError(f"{folder}: no config.json, so this is not a model folder{hint}")
    values = read_json(path)
    config = parse_config(values, str(path))
    source = open_weights(folder, config)
    settings = _optional(folder / "tokenizer_config.json")
    eos = _eos_ids(path, values, config.vocab_size)
    generation = folder / "generation_config.json"
    eos |= _eos_ids(generation, _optional(generation), config.vocab_size)
    tokenizer, template, named = None, None, _named_tokens(folder, settings)
    if (folder / "tokenizer.json").is_file():
        backend = _backend(folder, settings, named)
        eos_token = backend.token_to_id(named.get("eos_token", ""))
        if not eos and eos_token is not None:
            eos = frozenset({eos_token})
        bos = backend.token_to_id(named.get("bos_token", ""))
        tokenizer = Tokenizer(backend, bos_id=bos, eos_ids=eos, vocab_size=config.vocab_size)
        template = _template(folder, settings, named)
    return LoadedModel(
        name=folder.resolve().name,
        config=config,
        source=source,
        tokenizer=tokenizer,
        template=template,
        eos_token_ids=eos,
        weight_types=source.weight_types(),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _eos_ids(path: Path, values: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    value = values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise LoadError(f"{path}: eos_token_id is {value!r}, but must be an integer, a list of integers or null")
    # An id outside the vocabulary can never be sampled; some files carry one (-1 for "none").
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def _named_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like as plain strings, from tokenizer_config.json or special_tokens_map.json."""
    merged = {**_optional(folder / "special_tokens_map.json"), **settings}
    named = {}
    for name in _NAMED:
        value = merged.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            named[name] = value
        elif value is not None:
            raise LoadError(f"{folder / 'tokenizer_config.json'}: {name} is {value!r}, but must be a string or null")
    return named


def _backend(folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]) -> tokenizers.Tokenizer:
    """tokenizer.json, plus the tokens that only tokenizer_config.json lists. Whether BOS is added is tokenizer.json's
    decision; ``add_bos_token`` beside it is history that ``transformers`` ignores too."""
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises bare Exception)
        raise LoadError(f"{path}: not a tokenizer: {error}") from None
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise LoadError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must be an object")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0]) if item[0].isdigit() else -1):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise LoadError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder[{key!r}] has no content")
        if entry["content"] in known:
            continue
        special = bool(entry.get("special", False))
        flags = {flag: bool(entry.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip")}
        normalized = bool(entry.get("normalized", not special))
        token = AddedToken(entry["content"], special=special, normalized=normalized, **flags)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
        if backend.token_to_id(entry["content"]) != int(key):
            raise LoadError(f"{folder / 'tokenizer_config.json'}: token {entry['content']!r} cannot have the id {key}")
    missing = [text for text in named.values() if text and text not in known]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(missing)])
    return backend


def _template(folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]) -> ChatTemplate | None:
    """The template, from the first place that has one: chat_template.jinja (with its named siblings),
    chat_template.json, tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        sources = {"default": _text(path)}
        for sibling in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[sibling.stem] = _text(sibling)
        return ChatTemplate(sources, named, where=str(path))
    path = folder / "chat_template.json"
    value = _optional(path).get("chat_template")
    if value is None:
        path, value = folder / "tokenizer_config.json", settings.get("chat_template")
    if value is None:
        return None
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    if isinstance(value, str):
        value = {"default": value}
    texts = isinstance(value, dict) and all(isinstance(text, str) for item in value.items() for text in item)
    if not texts or not value:
        raise LoadError(f"{path}: chat_template must be a string or a list of objects with a name and a template")
    return ChatTemplate(value, named, where=f"{path}: chat_template")


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise LoadError(f"{path}: {path.stat().st_size} bytes, but at most {MAX_TEMPLATE_BYTES} are allowed")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot be read: {error}") from None
