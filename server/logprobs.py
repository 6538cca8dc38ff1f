"""Log probabilities as the three endpoints write them. JSON has no minus infinity: -9999.0 stands for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.control.plan import Logprobs, Sampled
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


def of_echo(ids: Sequence[int], reports: Sequence[Logprobs], namer: Namer, top: int) -> tuple[dict[str, Any], int]:
    """The prompt as ``of_completion`` writes the answer; of its first token nothing can be said."""
    rest = [Sampled(token, _best(report, top)) for token, report in zip(ids[1:], reports, strict=True)]
    name = namer.text(ids[0])
    table, offset = of_completion(rest, namer, len(name))
    first = {"tokens": [name], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    return joined(first, table), offset


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two tables of one text, one after the other."""
    return {name: [*one[name], *other[name]] for name in one}


def of_prompt(ids: Sequence[int], reports: Sequence[Logprobs], namer: Namer, top: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token the chosen and the likeliest, by id; null for the first."""
    table: list[dict[str, Any] | None] = [None]
    for token, report in zip(ids[1:], reports, strict=True):
        values = {token: (report.chosen, report.rank)}
        for rank, (other, value) in enumerate(report.top[:top], start=1):
            values.setdefault(other, (value, rank))
        table.append(
            {
                str(one): {"logprob": finite(value), "rank": rank, "decoded_token": namer.text(one)}
                for one, (value, rank) in values.items()
            }
        )
    return table


def _best(report: Logprobs, top: int) -> Logprobs:
    return Logprobs(report.chosen, report.rank, report.top[:top])


def of_chat(tokens: Sequence[Sampled], namer: Namer) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": namer.text(token), "logprob": finite(value), "bytes": namer.bytes(token)}

    content = []
    for sampled in tokens:
        assert sampled.logprobs is not None
        top = [entry(token, value) for token, value in sampled.logprobs.top]
        content.append({**entry(sampled.token, sampled.logprobs.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_input(ids: Sequence[int], reports: Sequence[Logprobs], start: int, namer: Namer) -> dict[str, Any]:
    """SGLang's triples for the prompt from token ``start`` on; null for its very first."""
    chosen: list[list[Any]] = [[None, ids[0], namer.text(ids[0])]]
    tops: list[Any] = [None]
    for token, report in zip(ids[1:], reports, strict=True):
        chosen.append([finite(report.chosen), token, namer.text(token)])
        tops.append([[finite(value), other, namer.text(other)] for other, value in report.top])
    return {"input_token_logprobs": chosen[start:], "input_top_logprobs": tops[start:]}


def of_generate(tokens: Sequence[Sampled], namer: Namer) -> dict[str, Any]:
    """SGLang's triples of (logprob, token id, text)."""
    chosen, tops = [], []
    for sampled in tokens:
        assert sampled.logprobs is not None
        chosen.append([finite(sampled.logprobs.chosen), sampled.token, namer.text(sampled.token)])
        tops.append([[finite(value), token, namer.text(token)] for token, value in sampled.logprobs.top])
    return {"output_token_logprobs": chosen, "output_top_logprobs": tops}
