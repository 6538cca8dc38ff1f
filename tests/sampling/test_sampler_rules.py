"""The sampler's rules one by one: ties, masks, penalties at the prompt's border, filters at their ends, reports."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import slow_reference as slow
import torch

from engine.compute.sampler import Sampler, argmax
from engine.compute.staging import finite_argmax
from engine.control.plan import NO_TOKEN, Sampled, Seat
from engine.request import SamplingParams, SamplingSpec

VOCAB = 32
INF = math.inf
BROKEN: dict[str, tuple[list[float], str]] = {
    "one NaN": ([0.0] * 5 + [math.nan] + [9.0] * (VOCAB - 6), f"hold 1 NaN among {VOCAB}"),
    "all NaN": ([math.nan] * VOCAB, f"hold {VOCAB} NaN among {VOCAB}"),
    "infinity": ([0.0] * 7 + [INF] * 2 + [0.0] * (VOCAB - 9), f"hold 2 times infinity among {VOCAB}"),
    "nothing left": ([-INF] * VOCAB, "leave no token that may be sampled"),
}
WISHES = {
    "greedy": SamplingParams(temperature=0.0),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=3),
    "sampled": SamplingParams(logprobs=2, logits_digest=True),
    "filtered": SamplingParams(top_k=3, top_p=0.5, min_p=0.1),
}


def one(
    logits: list[float] | torch.Tensor,
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (1,),
    out: tuple[int, ...] = (),
    masked: tuple[int, ...] = (),
    seed: int = 0,
) -> Sampled:
    logits = torch.as_tensor(logits, dtype=torch.float32)
    sampler = Sampler(1, len(logits))
    sampler.seat(Seat(0, 0, prompt + out, len(prompt), (), SamplingSpec(params, seed, masked)))
    return sampler.sample(logits[None], [0], [len(prompt) + len(out)])[0]


def peaked(**at: float) -> list[float]:
    logits = [0.0] * VOCAB
    for name, value in at.items():
        logits[int(name[1:])] = value
    return logits


@pytest.mark.parametrize("vocab", [1, 2, 7, 16, 31, 33, 100, 1000, 4097, 49152])
@pytest.mark.parametrize("dtype", [torch.float32])
def test_argmax_takes_the_first_of_equals(vocab: int, dtype: torch.dtype) -> None:
    """At every place of the pair, on the path in use and on torch's, which a GPU takes."""
    rng = np.random.default_rng(vocab)
    for _ in range(40):
        i, j = sorted(rng.integers(0, vocab, 2))
        logits = torch.zeros(2, vocab, dtype=dtype)
        logits[0, [i, j]] = 1.0
        assert argmax(logits) == [i, 0]
        assert logits.argmax(dim=1).tolist() == [i, 0]


def test_top_k_one_is_greedy_also_in_ties() -> None:
    logits = peaked(t9=2.0, t4=2.0, t20=2.0)
    for seed in range(30):
        assert one(logits, SamplingParams(top_k=1), seed=seed).token == 4


def test_top_k_keeps_exactly_k_lowest_ids_first() -> None:
    seen = {one(peaked(t9=1.0), SamplingParams(top_k=3), seed=seed).token for seed in range(200)}
    assert seen == {9, 0, 1}


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 2**31 - 1])
def test_top_k_off(top_k: int) -> None:
    for seed in range(20):
        assert one([0.0] * VOCAB, SamplingParams(top_k=top_k), seed=seed) == one(
            [0.0] * VOCAB, SamplingParams(), seed=seed
        )


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-9, 0.03])
def test_tiny_top_p_keeps_one_token(top_p: float) -> None:
    for seed in range(20):
        assert one(peaked(t7=0.25, t8=0.25), SamplingParams(top_p=top_p), seed=seed).token == 7


def test_top_p_just_below_one_drops_only_weightless_tokens() -> None:
    seen = {one([0.0] * 8, SamplingParams(top_p=math.nextafter(1.0, 0.0)), seed=seed).token for seed in range(300)}
    assert seen == set(range(8))


def test_min_p_one_keeps_the_maxima() -> None:
    seen = {one(peaked(t3=1.0, t5=1.0), SamplingParams(min_p=1.0, temperature=5.0), seed=s).token for s in range(60)}
    assert seen == {3, 5}


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-45, 1e-30, 1e-9])
def test_freezing_is_greedy(temperature: float) -> None:
    """Quotients overflow; the answer is still the maximum, and of equal maxima either may win."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 10
    for seed in range(10):
        token = one(logits, SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1), seed=seed).token
        assert token == int(logits.argmax())
        assert one(logits, SamplingParams(temperature=temperature), seed=seed).token == token


def test_penalties_know_the_border_of_the_prompt() -> None:
    """Frequency and presence punish what was generated, repetition the prompt too (B081)."""
    logits = peaked(t5=2.0, t6=1.5)
    prompt = (5, 5, 5, 5)
    amount = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    factor = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert one(logits, amount, prompt=prompt).token == 5
    assert one(logits, amount, prompt=prompt, out=(5,)).token == 6
    assert one(logits, factor, prompt=prompt).token == 6
    assert one(logits, factor, prompt=(1,), out=(5,)).token == 6
    assert one(logits, factor, prompt=(1,)).token == 5


def test_repetition_penalty_of_a_negative_logit_lowers_it() -> None:
    logits = [-1.0] * VOCAB
    logits[5] = -0.9
    assert one(logits, SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=(5,)).token == 0


def test_frequency_counts_and_presence_does_not() -> None:
    logits = peaked(t5=2.0, t6=1.0)
    assert one(logits, SamplingParams(temperature=0.0, frequency_penalty=0.4), out=(5, 5)).token == 5
    assert one(logits, SamplingParams(temperature=0.0, frequency_penalty=0.4), out=(5, 5, 5)).token == 6
    assert one(logits, SamplingParams(temperature=0.0, presence_penalty=0.9), out=(5,) * 40).token == 5
    assert one(logits, SamplingParams(temperature=0.0, presence_penalty=1.1), out=(5,)).token == 6


def test_many_distinct_tokens() -> None:
    """The counts grow past their first arrays."""
    tokens = tuple(range(1000))
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=0.5)
    logits = torch.zeros(1001)
    assert one(logits, params, prompt=(1000,), out=tokens).token == 1000
    sampler = Sampler(1, 1001)
    sampler.seat(Seat(0, 0, (1000,), 1, (), SamplingSpec(params, 0)))
    assert [sampler.sample(logits[None], [0], [1 + i])[0].token for i in range(1001)] == list(range(1001))


def test_min_tokens_counts_generated_tokens_only() -> None:
    """A prompt longer than min_tokens does not satisfy it, and the last id of the vocabulary is not touched (B097)."""
    logits = peaked(t2=3.0, t31=2.0)
    params = SamplingParams(temperature=0.0, min_tokens=3)
    prompt = (1,) * 20
    for generated in range(5):
        token = one(logits, params, prompt=prompt, out=(9,) * generated, masked=(2, -1, 99)).token
        assert token == (31 if generated < 3 else 2)


def test_all_end_tokens_are_masked() -> None:
    """Every end-of-sequence id of a model, not just the first (B096)."""
    logits = peaked(t2=5.0, t5=6.0, t7=4.0, t9=1.0)
    assert one(logits, SamplingParams(temperature=0.0, min_tokens=1), masked=(2, 5, 7)).token == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_of_everything_is_not_obeyed(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=4, top_p=0.9)
    assert one(peaked(t6=50.0), params, masked=tuple(range(VOCAB))).token == 6


@pytest.mark.parametrize(("logits", "why"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("params", WISHES.values(), ids=WISHES)
def test_a_row_without_a_finite_maximum_has_no_token(logits: list[float], why: str, params: SamplingParams) -> None:
    """Rule 13.7: never the place of the first NaN, whatever the request asks for, and nothing is reported of the row."""
    got = one(logits, params)
    assert got == Sampled(NO_TOKEN, failure=f"the logits for position 1 {why}")


@pytest.mark.parametrize("params", WISHES.values(), ids=WISHES)
def test_what_is_broken_ends_in_its_own_row(params: SamplingParams) -> None:
    """The rows around broken ones get what they get alone, on torch's way to the argmax as well."""
    good = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = [good[0], torch.tensor(BROKEN["one NaN"][0]), good[1], torch.tensor(BROKEN["nothing left"][0]), good[2]]
    sampler = Sampler(5, VOCAB)
    for row in range(5):
        sampler.seat(Seat(row, row, (1,), 1, (), SamplingSpec(params, row, ())))
    together = sampler.sample(torch.stack(rows), range(5), [1] * 5)
    assert [got.failure is None for got in together] == [True, False, True, False, True]
    for row, at in ((0, 0), (2, 1), (4, 2)):
        assert together[row] == one(good[at], params, seed=row)
    assert finite_argmax(torch.stack(rows)).tolist() == argmax(torch.stack(rows))


def test_a_mask_that_hides_the_nan_does_not_mend_the_row() -> None:
    got = one(BROKEN["one NaN"][0], SamplingParams(temperature=0.0, min_tokens=3), masked=(5,))
    assert got.failure == f"the logits for position 1 hold 1 NaN among {VOCAB}"


def test_a_prompt_that_has_no_logprobs_ends_its_request() -> None:
    """Rule 13.7: whoever asked for all of them gets no answer with a NaN in it; the row beside has its token."""
    sampler = Sampler(2, VOCAB)
    for row in range(2):
        spec = SamplingSpec(SamplingParams(temperature=0.0, prompt_logprobs=1), row, ())
        sampler.seat(Seat(row, row, (1, 2, 3), 3, (), spec))
        assert sampler.prompt_positions(row, 0, 3) == [0, 1]
        broken = torch.tensor(BROKEN["one NaN"][0])
        sampler.note_prompt(row, [0, 1], torch.stack([torch.zeros(VOCAB), broken if row else torch.ones(VOCAB)]))
    good, bad = sampler.sample(torch.zeros(2, VOCAB), [0, 1], [3, 3])
    assert (good.token, len(good.prompt or ())) == (0, 2)
    assert bad == Sampled(NO_TOKEN, failure=f"the logits of prompt position 1 hold 1 NaN among {VOCAB}")


def test_a_mask_may_leave_nothing() -> None:
    logits = [-INF] * VOCAB
    logits[3] = 1.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=3)
        assert (
            one(logits, params, masked=(3,)).failure == "the logits for position 1 leave no token that may be sampled"
        )
        assert one(logits, params).token == 3


@pytest.mark.filterwarnings("error")
def test_masked_greedy_rows_beside_random_rows() -> None:
    """No division by a greedy row's temperature, no NaN, and the neighbours are as alone (B078)."""
    greedy = SamplingParams(temperature=0.0, logit_bias={3: -100.0}, min_tokens=2)
    rows = [greedy, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(repetition_penalty=1e-38)]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, 10:20] = -INF
    sampler = Sampler(4, VOCAB)
    for row, params in enumerate(rows):
        sampler.seat(Seat(row, row, (1, 5), 1, (), SamplingSpec(params, row, (2, 3))))
    together = [s.token for s in sampler.sample(logits, range(4), [2] * 4)]
    alone = [
        one(logits[row], params, prompt=(1,), out=(5,), masked=(2, 3), seed=row).token
        for row, params in enumerate(rows)
    ]
    assert together == alone
    assert not set(together) & set(range(10, 20))


def test_seeds_and_positions_give_different_streams() -> None:
    """Neighbouring seeds, as choices of one request have them, are unrelated; the same seed repeats (B067, B075)."""

    def stream(seed: int) -> list[int]:
        return [one([0.0] * 97, SamplingParams(), out=(0,) * i, seed=seed).token for i in range(30)]

    streams = [stream(seed) for seed in (0, 1, -1, 2**31, 2**63 - 1, -(2**63))]
    assert all(len(set(s)) > 15 for s in streams)
    assert all(sum(a == b for a, b in zip(s, t, strict=True)) < 5 for i, s in enumerate(streams) for t in streams[:i])
    assert stream(1) == streams[1]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_logprobs_are_of_the_raw_logits(top: int, temperature: float) -> None:
    """Parameters choose the token and leave the report alone (B088, B090)."""
    logits = torch.round(torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 4) / 2  # with ties
    params = SamplingParams(
        temperature=temperature, logprobs=top, top_k=1, logit_bias={4: -100.0, 6: 100.0}, repetition_penalty=2.0
    )
    sampled = one(logits, params)
    expected = slow.logprobs(logits.tolist())
    order = sorted(range(VOCAB), key=lambda i: (-expected[i], i))
    assert sampled.token == 6
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen == pytest.approx(expected[6], abs=1e-12)
    assert sampled.logprobs.rank == order.index(6) + 1
    assert [i for i, _ in sampled.logprobs.top] == order[:top]
    assert [p for _, p in sampled.logprobs.top] == pytest.approx([expected[i] for i in order[:top]], abs=1e-12)
    assert all(math.isfinite(p) for _, p in sampled.logprobs.top)


def test_more_logprobs_than_tokens() -> None:
    sampled = one([1.0, 2.0, 3.0], SamplingParams(temperature=0.0, logprobs=20), prompt=(0,))
    assert sampled.logprobs is not None
    assert [i for i, _ in sampled.logprobs.top] == [2, 1, 0]
    assert sampled.logprobs.rank == 1


def test_digest_is_of_the_raw_bytes() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(logits_digest=True, logit_bias={0: 5.0})
    expected = hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest()
    assert one(logits, params).digest == expected
    logits[3] = torch.nextafter(logits[3], torch.tensor(100.0))
    assert one(logits, params).digest != expected
    assert one(logits, SamplingParams()).digest is None


def test_a_seat_without_a_sampling_spec_is_refused() -> None:
    with pytest.raises(TypeError, match="request 3"):
        Sampler(1, 4).seat(Seat(3, 0, (1,), 1, (), None))


def test_plain_greedy_rows_never_leave_the_batch(monkeypatch) -> None:
    """The fast path is the argmax alone."""
    sampler = Sampler(2, VOCAB)
    for row in range(2):
        params = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5, seed=4)
        sampler.seat(Seat(row, row, (1,), 1, (), SamplingSpec(params, row, (2,))))
    monkeypatch.setattr(sampler, "_sample_row", None)
    assert [s.token for s in sampler.sample(torch.eye(VOCAB)[[4, 9]], [0, 1], [1, 1])] == [4, 9]
