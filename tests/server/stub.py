"""An engine with real control and text, and a runner made of arithmetic: the next token is a hash of seed and tokens.

So an answer is a function of prompt, parameters and seed, as with a model, and a test decides when a step fails,
blocks or says a given token.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from engine.control.limits import Limits
from engine.control.plan import Logprobs, Plan, Sampled
from engine.engine import Engine
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from engine.request import SamplingSpec

VOCAB = 512
NO_TEXT = range(500, 512)  # ids without a token in the synthetic vocabulary


class StubRunner:
    """``fail_at``: iterations that raise. ``gate``: when set to an Event, each step waits for it. ``script``: for a
    prompt's ids, the tokens to say; then the hash goes on."""

    def __init__(self, script: Callable[[tuple[int, ...]], Sequence[int]] = lambda prompt: ()) -> None:
        self.rows: dict[int, tuple[list[int], int, SamplingSpec]] = {}
        self.fail_at: set[int] = set()
        self.fail_requests: set[int] = set()
        self.gate: threading.Event | None = None
        self.script = script
        self.plans: list[Plan] = []

    def execute(self, plan: Plan) -> list[Sampled]:
        self.plans.append(plan)
        if self.gate is not None:
            self.gate.wait(30)
        for row in plan.vacated:
            self.rows.pop(row, None)
        for move in plan.moves:
            other = self.rows.pop(move.dst, None)
            self.rows[move.dst] = self.rows.pop(move.src)
            if other is not None:
                self.rows[move.src] = other
        for seat in plan.seated:
            assert isinstance(seat.sampling, SamplingSpec)
            self.rows[seat.row] = (list(seat.tokens), seat.prompt_len, seat.sampling)
        if plan.iteration in self.fail_at or self.fail_requests & _requests(plan):
            raise RuntimeError("secret detail of the failure")
        sampled = [self._sample(*self.rows[entry.row]) for entry in plan.sampling]
        for entry, one in zip(plan.sampling, sampled, strict=True):
            self.rows[entry.row][0].append(one.token)
        return sampled

    def _sample(self, tokens: list[int], prompt_len: int, spec: SamplingSpec) -> Sampled:
        script = self.script(tuple(tokens[:prompt_len]))
        at = len(tokens) - prompt_len
        seed = 0 if spec.params.greedy else spec.seed
        digest = hashlib.sha256(repr((seed, tokens)).encode()).digest()
        token = script[at] if at < len(script) else 3 + int.from_bytes(digest[:4], "little") % 90
        logprobs = None
        if spec.params.logprobs is not None:
            top = tuple((t, -0.5 * (i + 1)) for i, t in enumerate(range(10, 10 + spec.params.logprobs)))
            logprobs = Logprobs(float("-inf") if token % 7 == 0 else -1.25, 1, top)
        prompt = None
        if spec.params.prompt_logprobs is not None and at == 0:
            best = tuple((t, -0.25 * (i + 1)) for i, t in enumerate(range(20, 20 + spec.params.prompt_logprobs)))
            prompt = tuple(Logprobs(-0.125 * t, 2, best) for t in tokens[1:prompt_len])
        return Sampled(token, logprobs, digest.hex() if spec.params.logits_digest else None, prompt)


def _requests(plan: Plan) -> set[int]:
    return {chunk.request for chunk in plan.chunks} | {decode.request for decode in plan.decodes}


def stub_engine(runner: StubRunner | None = None, model: LoadedModel | None = None, **limits: Any) -> Engine:
    """16 blocks of 4, 4 rows, a context of 48 and a queue of 16, unless ``limits`` say otherwise."""
    sizes: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "vocab_size": VOCAB,
        "max_waiting": 16,
        "prefix_cache": True,
        "captures": tuple((rows, 12) for rows in (1, 2, 4)),
    }
    model = model or synthetic_model()
    return Engine(
        Limits(**sizes | limits),
        runner or StubRunner(),
        eos_token_ids=model.eos_token_ids,
        model=model,
        capacity=[("device", "stub")],
    )
