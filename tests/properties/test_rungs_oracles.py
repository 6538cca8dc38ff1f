"""The oracles of ``rows`` and ``tiny`` against something that shares no code with them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.compute.network import Sizes, Span, Tokens
from engine.compute.sampler import Sampler
from engine.control.plan import Sampled, Seat
from engine.request import SamplingParams, SamplingSpec
from engine.trace import VOCAB, Shape, Submit, prompt_tokens
from properties.digest_network import DigestNetwork, _mix, ladder
from properties.digests import Chain, allowed, mix
from properties.rung_rows import DigestOracle
from properties.rung_tiny import SoloOracle
from properties.rungs import Unavailable
from properties.sampled import STYLES, Sampling
from properties.solo_transformer import Question, SoloRunner, alone
from properties.tiny_network import tiny_model
from tests.properties.naive_forward import naive_logits

SHAPE = Shape(blocks=16, block_size=4, rows=2, max_model_len=48)
SIZES = Sizes(
    num_blocks=12, block_size=3, rows=4, width=6, prefill_tokens=32, prefill_samples=4, positions=18, span=(0, 18)
)


def i64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_the_kernels_and_the_pure_function_agree() -> None:
    """Two requests on scattered blocks: prefilled in two chunks, then decoded together."""
    source = random.Random(1)
    texts = [[source.randrange(VOCAB) for _ in range(length)] for length in (11, 8)]
    tables = [[7, 2, 9, 0, 12, 12], [5, 11, 3, 12, 12, 12]]
    network = DigestNetwork(SIZES)

    def slots(row: int, positions: range) -> list[int]:
        return [tables[row][position // 3] * 3 + position % 3 for position in positions]

    for start, end in ((0, 4), (4, 7)):
        where = [(row, range(start, end)) for row in (0, 1)]
        step = Tokens(
            i64([token for row, span in where for token in texts[row][start:end]]),
            i64([position for _, span in where for position in span]),
            i64([slot for row, span in where for slot in slots(row, span)]),
        )
        spans = [Span(at * (end - start), end - start, start, i64([tables[row]])) for at, row in enumerate((0, 1))]
        logits = network.prefill(
            lambda kernel, *given: kernel(*given), step, spans, i64([end - start - 1, 2 * (end - start) - 1])
        )
    assert logits is not None
    assert logits.argmax(1).tolist() == [Chain(text[:7]).following for text in texts]
    decode = Tokens(i64([text[7] for text in texts]), i64([7, 7]), i64([slots(row, range(7, 8))[0] for row in (0, 1)]))
    logits = network.decode(lambda kernel, *given: kernel(*given), decode, i64(tables))
    assert logits.argmax(1).tolist() == [Chain(text[:8]).following for text in texts]
    for row, text in enumerate(texts):
        held = [network.pool.rows[slot, 0].item() % 2**64 for slot in slots(row, range(8))]
        assert held == Chain(text[:8]).digests


def test_digests_depend_on_order_place_and_every_token() -> None:
    text = list(range(20))
    known = Chain(text)
    assert Chain(text[:5]).digests == known.digests[:5]
    for changed in (text[1:], [*text[:3], 4, 3, *text[5:]], [99, *text[1:]]):
        assert Chain(changed).digests[-1] != known.digests[-1]
        assert Chain(changed).following != known.following
    numbers = [random.Random(2).randrange(2**64) for _ in range(50)]
    assert _mix(torch.tensor([n - 2**63 for n in numbers]).numpy().view("uint64") ^ 2**63).tolist() == [
        mix(n) for n in numbers
    ]  # type: ignore[operator]
    assert allowed(3, [3, 4]) == 5
    assert allowed(VOCAB - 1, [VOCAB - 1]) == 0


def test_stop_tokens_of_the_digest_oracle() -> None:
    oracle = DigestOracle(SHAPE)
    plain = Submit(0, (("a", 5),), 6)
    assert oracle.stop_ids(0, plain) == frozenset()
    told = [oracle.token(0, k) for k in range(6)]
    assert oracle.stop_ids(1, Submit(0, (("a", 5),), 6, stop_at=3, n=2)) == {told[2]}
    assert [oracle.token(2, k) for k in range(6)] == told
    oracle.stop_ids(3, Submit(0, (("a", 5),), 6, stop_at=3, min_tokens=4))
    assert oracle.token(3, 2) == (told[2] + 1) % VOCAB  # the next likely one, while the stop token is held back
    assert oracle.stop_ids(4, Submit(0, (("a", 5),), None, stop_at=1000)) == frozenset()  # never reached
    for refused in ((), (("!", 1),), (("a", 48),)):
        assert oracle.stop_ids(5, Submit(0, refused, 6, stop_at=1)) == frozenset()


@pytest.mark.parametrize(("kernels", "bound"), [("torch", 2e-4), ("native", 2e-2)])
def test_the_solo_run_is_full_attention(kernels: str, bound: float) -> None:
    """Prefill and each decode step, beyond the sliding window; native kernels keep keys and values in fp16 there."""
    prompt = prompt_tokens((("sys", 12),))
    try:
        solo = SoloRunner(kernels, 48)
    except Unavailable as missing:
        pytest.skip(f"no C++ compiler for the native kernels: {missing}")
    seen: list[torch.Tensor] = []

    def sample(logits: torch.Tensor, rows: Any, positions: Any) -> list[Sampled]:
        seen.append(logits.clone())
        return [Sampled(int(logits.argmax()))]

    solo.runner.sampler.sample = sample  # type: ignore[method-assign]
    samples = solo.run(prompt, SamplingSpec(SamplingParams(temperature=0.0), 0), 12)
    naive = naive_logits(tiny_model(), [*prompt, *(one.token for one in samples[:-1])])[len(prompt) - 1 :]
    assert torch.allclose(torch.cat(seen).double(), naive, atol=bound, rtol=0)
    assert float(naive.std()) > 1  # flat logits would agree with anything


def test_solo_runs_repeat_and_differ_where_they_must() -> None:
    prompt = prompt_tokens((("a", 6),))
    key = Question("torch", 48, prompt, Sampling(0.8, 1, 0, ()))
    runner = SoloRunner("torch", 48)
    told = tuple(one.token for one in runner.run(prompt, key.sampling.spec, 8))
    assert alone(key).tokens(8) == told
    assert tuple(one.token for one in runner.run(prompt, key.sampling.spec, 8)) == told  # the runner is used again
    assert alone(key).tokens(3) == told[:3]
    assert alone(Question("torch", 48, prompt, Sampling(0.8, 2, 0, ()))).tokens(8) != told
    with pytest.raises(ValueError, match="6 \\+ 43 tokens, at most 48"):
        runner.run(prompt, key.sampling.spec, 43)


def test_choices_of_the_solo_oracle_have_seeds_of_their_own() -> None:
    oracle = SoloOracle("torch", SHAPE)
    stops = oracle.stop_ids(0, Submit(0, (("a", 5),), 6, temperature=0.9, seed=4, stop_at=3, n=3))
    told = [[oracle.token(request, k) for k in range(6)] for request in range(3)]
    assert len({tuple(tokens) for tokens in told}) == 3
    assert stops == {tokens[2] for tokens in told}


@pytest.mark.parametrize("style", range(len(STYLES)))
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5, 100.0])
def test_nothing_but_a_mask_changes_the_order_of_digest_logits(style: int, temperature: float) -> None:
    """Whatever a request asks of the sampler, though its prompt holds the likely tokens and so is penalised for them."""
    sampler = Sampler(1, VOCAB)
    prompt = (3, 4, 5, 5, 6)
    sampler.seat(Seat(0, 0, prompt, len(prompt), (), Sampling(temperature, 9, 2, (3, 4, 6), style).spec))
    logits = torch.from_numpy(ladder()[[3]])
    assert [one.token for one in sampler.sample(logits, [0], [5])] == [allowed(3, [3, 4, 6])] == [5]
    assert [one.token for one in sampler.sample(logits, [0], [6])] == [5]
    assert [one.token for one in sampler.sample(logits, [0], [7])] == [3]  # min_tokens is over
