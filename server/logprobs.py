"""Log probabilities as the three endpoints write them. JSON has no minus infinity: -9999.0 stands for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.control.plan import Sampled
from engine.loading.tokenizer import Tokenizer

LOWEST = -9999.0


def finite(value: float) -> float:
    return max(value, LOWEST) if not math.isnan(value) else LOWEST


class Namer:
    """The text of one token: its own bytes, or ``token_id:N`` on demand and where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._bytes_of = tokenizer

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def bytes(self, token: int) -> list[int] | None:
        return None if self._bytes_of is None else list(self._bytes_of.token_bytes(token))


def of_completion(tokens: Sequence[Sampled], namer: Namer, offset: int) -> tuple[dict[str, Any], int]:
    """OpenAI's four parallel lists, and the offset for what follows. ``top_logprobs`` always holds the chosen token."""
    names, chosen, tops, offsets = [], [], [], []
    for sampled in tokens:
        assert sampled.logprobs is not None
        name = namer.text(sampled.token)
        names.append(name)
        chosen.append(finite(sampled.logprobs.chosen))
        offsets.append(offset)
        offset += len(name)
        top: dict[str, float] = {}
        for token, value in sampled.logprobs.top:  # best first: of two tokens with one text, the likelier stays
            top.setdefault(namer.text(token), finite(value))
        top.setdefault(name, chosen[-1])
        tops.append(top)
    return {"tokens": names, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}, offset


def of_chat(tokens: Sequence[Sampled], namer: Namer) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": namer.text(token), "logprob": finite(value), "bytes": namer.bytes(token)}

    content = []
    for sampled in tokens:
        assert sampled.logprobs is not None
        top = [entry(token, value) for token, value in sampled.logprobs.top]
        content.append({**entry(sampled.token, sampled.logprobs.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_generate(tokens: Sequence[Sampled], namer: Namer) -> dict[str, Any]:
    """SGLang's triples of (logprob, token id, text)."""
    chosen, tops = [], []
    for sampled in tokens:
        assert sampled.logprobs is not None
        chosen.append([finite(sampled.logprobs.chosen), sampled.token, namer.text(sampled.token)])
        tops.append([[finite(value), token, namer.text(token)] for token, value in sampled.logprobs.top])
    return {"output_token_logprobs": chosen, "output_top_logprobs": tops}
