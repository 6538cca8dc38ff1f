"""SGLang's answer to ``/generate``, and beside its facts ours: seed, iterations, preemptions, replayed steps, digests.

As there, streamed ``text`` and ``output_ids`` are cumulative. One object for one answer, a list for several.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from engine.control.plan import Sampled
from engine.control.record import Finished
from server import logprobs
from server.live import Delta, Generation
from server.logprobs import Namer


@attrs.define
class _SoFar:
    text: str = ""
    tokens: list[Sampled] = attrs.field(factory=list)


class GenerateShape:
    """``many``: the request held a list, or asked for several answers."""

    def __init__(
        self,
        generation: Generation,
        *,
        model: str,
        namer: Namer,
        rid: str | None,
        many: bool,
        with_logprobs: bool,
        logprob_start: int,
        with_digests: bool,
    ) -> None:
        self.generation = generation
        self.model = model
        self.namer = namer
        self.many = many
        self.with_logprobs = with_logprobs
        self.logprob_start = logprob_start  # of the prompt; negative: none
        self.with_digests = with_digests
        self._id = rid or uuid.uuid4().hex
        self._so_far = [_SoFar() for _ in generation.choices]

    def first(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield self._result(delta) | ({"index": delta.index} if self.many else {})

    def last(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def whole(self, deltas: Sequence[Delta]) -> Any:
        results = [self._result(delta) for delta in deltas]
        return results if self.many else results[0]

    def _result(self, delta: Delta) -> dict[str, Any]:
        so_far = self._so_far[delta.index]
        so_far.text += delta.text
        so_far.tokens += delta.tokens
        return {
            "text": so_far.text,
            "output_ids": [sampled.token for sampled in so_far.tokens],
            "meta_info": self._meta(delta.index, so_far.tokens, delta.end),
        }

    def _meta(self, index: int, tokens: Sequence[Sampled], end: Finished | None) -> dict[str, Any]:
        choice = self.generation.choices[index]
        meta: dict[str, Any] = {
            "id": self._id if len(self._so_far) == 1 else f"{self._id}-{index}",
            "model": self.model,
            "finish_reason": _reason(end, len(tokens)),
            "prompt_tokens": len(self.generation.prompts[choice.prompt]),
            "completion_tokens": len(tokens),
            "seed": choice.seed,
        }
        if self.with_logprobs:
            meta |= {"input_token_logprobs": [], **logprobs.of_generate(tokens, self.namer)}
            if self.logprob_start >= 0 and tokens:
                prompt = self.generation.prompts[choice.prompt]
                meta |= logprobs.of_input(prompt, tokens[0].prompt or (), self.logprob_start, self.namer)
        if self.with_digests and end is not None:  # with the last event only: cumulative text is long enough
            meta["logits_digests"] = [sampled.digest for sampled in tokens]
        if end is not None:
            meta["e2e_latency"] = round(time.monotonic() - self.generation.arrived, 6)
            if end.facts is not None:
                meta |= {
                    "first_iteration": end.facts.first_iteration,
                    "last_iteration": end.facts.last_iteration,
                    "cached_tokens": end.facts.cached_tokens,
                    "preemptions": end.facts.preemptions,
                    "recomputed_tokens": end.facts.recomputed_tokens,
                    "replayed_steps": end.facts.replayed_steps,
                }
        return meta


def _reason(end: Finished | None, generated: int) -> dict[str, Any] | None:
    if end is None:
        return None
    if end.reason == "length":
        return {"type": "length", "length": generated}
    return {"type": end.reason, "matched": end.stop}
