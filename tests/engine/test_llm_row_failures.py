"""A request that cannot go on, on real kernels: its answer is an error with a reason, and its neighbours are as alone.

The model is broken in one place, the embedding of one token: whoever has it in the prompt gets NaN in K/V and logits.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from engine.build import assemble, resolve_compute
from engine.config import ConfigError, EngineConfig
from engine.llm import LLM
from engine.loading.model import LoadedModel, StoredTensor
from engine.loading.synthetic import synthetic_model
from engine.request import InvalidRequest, SamplingParams
from engine.text.stream import TextStream

POISON = 77  # a token id
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ASKS = (
    GREEDY,
    attrs.evolve(GREEDY, temperature=1.0, seed=5, n=2),
    attrs.evolve(GREEDY, temperature=0.9, seed=6, top_k=7, logprobs=2),
    attrs.evolve(GREEDY, repetition_penalty=1.3),
)


@attrs.frozen
class OneBadRow:
    """A source whose embedding of ``POISON`` is NaN; the head is another tensor."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> Any:
        return iter(self.inner)

    def load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.inner.load(name)
        if name == "model.embed_tokens.weight":
            tensor = tensor.clone()
            tensor[POISON] = float("nan")
        return tensor

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor("F32", self.load(name).view(torch.uint8))


def llm(compute: str, *, broken: bool) -> LLM:
    model: LoadedModel = synthetic_model(tie_word_embeddings=False)
    if broken:
        model = attrs.evolve(model, source=OneBadRow(model.source))
    config = EngineConfig(
        max_num_seqs=8, num_kv_blocks=64, block_size=4, max_model_len=64, compute=compute, threads=1, dtype="float32"
    )
    return LLM(engine=assemble(config, model))


def prompts() -> list[list[int]]:
    return [[10 + k, 20, 30, 40, 50 + k, 60] for k in range(len(ASKS))]


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_nan_of_one_request_is_nobody_elses(compute: str) -> None:
    """Beside it, after it on the blocks that it wrote, and with its prompt as a prefix: every answer is that of a sound model."""
    sound = llm(compute, broken=False).generate(prompts(), list(ASKS), progress=False)
    engine = llm(compute, broken=True)
    bad = [[10, 20, 30, POISON, 50, 60, 70, 80, 90], [POISON], [9, 9, 9, 9, 9, 9, 9, 9, 9, POISON]]
    for _ in range(2):
        mixed = engine.generate(
            [*prompts(), *bad],
            [*ASKS, GREEDY, attrs.evolve(GREEDY, n=2), attrs.evolve(GREEDY, temperature=1.0)],
            progress=False,
        )
        for mine, theirs in zip(mixed, sound, strict=False):
            assert [c.token_ids for c in mine.choices] == [c.token_ids for c in theirs.choices]
            assert [c.error for c in mine.choices] == [None] * len(theirs.choices)
        for output in mixed[len(ASKS) :]:
            for choice in output.choices:
                assert (choice.token_ids, choice.text, choice.finish_reason) == ((), "", "error")
                assert choice.error is not None
                assert "NaN among 512" in choice.error
    counters = engine.engine.counters
    assert (counters.finished["error"], counters.failed_steps) == (8, 0)
    assert engine.engine.audit() == []
    assert engine.engine.ledger().running == ()
    published = engine.engine.ledger().published.values()
    assert not any(POISON in key.tokens for key in published)


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_a_prompt_whose_logprobs_are_nan(compute: str) -> None:
    wish = attrs.evolve(GREEDY, prompt_logprobs=1)
    good, bad = llm(compute, broken=True).generate([[5, 6, 7, 8], [5, 6, POISON, 8]], wish, progress=False)
    assert len(good.prompt_logprobs or ()) == 3
    assert (bad.finish_reason, bad.prompt_logprobs) == ("error", None)


@pytest.mark.parametrize("stop", [(), ("never comes",)])
def test_a_text_that_raises_ends_its_own_request(stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In commit, where there are stop strings, and where the answer is put together."""
    engine = llm("torch", broken=False)
    wish = attrs.evolve(GREEDY, stop=stop)
    (whole,) = engine.generate([[1, 2, 3]], wish, progress=False)
    push, first = TextStream.push, []

    def broken(text: TextStream, token: int, may_stop: bool = True, last: bool = False) -> bool:
        first.append(text)
        if text is first[0] and first.count(text) == 3:
            raise LookupError("no such piece")
        return push(text, token, may_stop, last)

    monkeypatch.setattr(TextStream, "push", broken)
    bad, good = engine.generate([[1, 2, 3], [1, 2, 3]], wish, progress=False)
    assert (good.token_ids, good.text) == (whole.token_ids, whole.text)
    assert (bad.finish_reason, bad.token_ids) == ("error", whole.token_ids[:2])
    assert bad.choices[0].error == "the text of output token 3 failed: LookupError: no such piece"
    assert whole.text.startswith(bad.text)
    assert engine.engine.ledger().running == ()


def test_a_stream_does_not_end_a_failed_answer_as_if_it_were_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm("torch", broken=True)
    with pytest.raises(RuntimeError, match="NaN among 512"):
        list(engine.stream([5, POISON, 6], GREEDY))

    def broken(text: TextStream, token: int, may_stop: bool = True, last: bool = False) -> bool:
        raise LookupError("no such piece")

    monkeypatch.setattr(TextStream, "push", broken)
    with pytest.raises(RuntimeError, match="LookupError: no such piece"):
        list(engine.stream([5, 6], GREEDY))
    assert engine.engine.ledger().running == ()


@pytest.mark.parametrize("stop", ["", [""], ("a", "")])
def test_an_empty_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(InvalidRequest, match="1 to 500 characters"):
        SamplingParams(stop=stop)
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_misspelt_tiles_are_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TILES", "maybe")
    with pytest.raises(ConfigError, match="LOCKSTEP_TILES is 'maybe', but must be on or off"):
        resolve_compute("auto", "cpu", torch.float32)
