"""What a benchmark sends: fixed request lists, so that two servers, or two days, are asked the same.

A list is JSON: {"name": [{"prompt": [token ids] or "text", "gen": tokens to generate}, ...], ...}. The lists that come
along are in SmolLM2's vocabulary; a server with another model is sent text, made of common words by a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

# Short and common, so that most tokenizers spend one token on each: no outside tokenizer is needed.
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people my "
    "than first water been call who oil its now find long down day did get come made may part"
)


class ListError(ValueError):
    """A request list that cannot be used; the message says which and why."""


@attrs.frozen
class Ask:
    """One request: a prompt, as token ids or as text, and how many tokens to generate."""

    prompt: tuple[int, ...] | str
    gen: int

    def salted(self, salt: int) -> Ask:
        """The same request with another beginning, so that no prefix cache knows it from an earlier run."""
        if isinstance(self.prompt, str):
            return attrs.evolve(self, prompt=f"{salt} {self.prompt}")
        return attrs.evolve(self, prompt=(1000 + salt, *self.prompt[1:]))


def bundled() -> Mapping[str, tuple[Ask, ...]]:
    """``single``, ``batch16``, ``prefill1024`` and ``shared16`` (16 requests with 512 common tokens)."""
    return parse(
        resources.files("server.bench").joinpath("lists.json").read_text(encoding="utf-8"), "the bundled lists"
    )


def load(path: Path) -> Mapping[str, tuple[Ask, ...]]:
    """Raises ``ListError``."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ListError(f"{path} cannot be read: {error}") from None


def parse(text: str, name: str) -> Mapping[str, tuple[Ask, ...]]:
    """Raises ``ListError``."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ListError(f"{name}: this is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ListError(f"{name}: a JSON object of lists is needed")
    return {
        key: tuple(_ask(entry, f"{name}: {key}[{at}]") for at, entry in enumerate(entries))
        for key, entries in document.items()
    }


def _ask(entry: Any, where: str) -> Ask:
    prompt, gen = (entry.get("prompt"), entry.get("gen")) if isinstance(entry, dict) else (None, None)
    if not isinstance(gen, int) or gen < 1:
        raise ListError(f"{where}.gen is {gen!r}, but must be an integer from 1")
    if isinstance(prompt, str) and prompt:
        return Ask(prompt, gen)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and token >= 0 for token in prompt):
        return Ask(tuple(prompt), gen)
    raise ListError(f"{where}.prompt is neither text nor a list of token ids")


def drawn(count: int, seed: int, prompt_words: tuple[int, int], gen: tuple[int, int], shared: int = 0) -> Sequence[Ask]:
    """Text requests by a seed: lengths uniform between the two bounds, the first ``shared`` words common to all."""
    draw = random.Random(seed)
    words = _WORDS.split()
    common = [draw.choice(words) for _ in range(shared)]
    return [
        Ask(" ".join([*common, *(draw.choice(words) for _ in range(draw.randint(*prompt_words)))]), draw.randint(*gen))
        for _ in range(count)
    ]
