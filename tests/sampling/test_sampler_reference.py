"""The sampler against its slow second writing, over generated parameters, histories and logits."""

from __future__ import annotations

import slow_reference as slow
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine.compute import sampling_choice, sampling_noise
from engine.compute.sampler import Sampler
from engine.control.plan import Seat
from engine.request import SamplingParams, SamplingSpec

VOCAB = 24


def _real(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, width=32)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.just(1.0), _real(2.0**-20, 4.0), st.sampled_from([1e-300, 1e-9, 100.0])),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-300, 1e-9, 0.5, 0.9]), st.floats(0.01, 0.99)),
    top_k=st.integers(-1, VOCAB + 2),
    min_p=st.one_of(st.just(0.0), st.sampled_from([1e-300, 0.05, 1.0]), st.floats(0.0, 1.0)),
    repetition_penalty=st.one_of(st.just(1.0), st.sampled_from([5e-324, 1e-38, 0.5, 1.1, 2.0, 100.0])),
    frequency_penalty=st.one_of(st.just(0.0), _real(-2.0, 2.0)),
    presence_penalty=st.one_of(st.just(0.0), _real(-2.0, 2.0)),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), _real(-100.0, 100.0), max_size=3),
    min_tokens=st.integers(0, 5),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
# Steps of a quarter make ties common; the extremes are what masks and broken models produce.
LOGIT = st.one_of(st.integers(-32, 32).map(lambda n: n / 4), st.sampled_from([float("-inf"), 3e38, -3e38]))
CASE = st.tuples(
    PARAMS,
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(-1, VOCAB + 1), max_size=4),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    TOKENS,
    st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB),
)


def _engine(cases: list) -> list[int]:
    sampler = Sampler(len(cases), VOCAB)
    for row, (params, seed, masked, prompt, out, _) in enumerate(cases):
        sampler.seat(Seat(row, row, (*prompt, *out), len(prompt), (), SamplingSpec(params, seed, tuple(masked))))
    logits = torch.tensor([case[5] for case in cases], dtype=torch.float32)
    before = logits.clone()
    sampled = sampler.sample(logits, range(len(cases)), [len(c[3]) + len(c[4]) for c in cases])
    assert torch.equal(logits, before)  # the graph's output buffer is not the sampler's to change
    return [s.token for s in sampled]


def _reference(case: tuple) -> int:
    params, seed, masked, prompt, out, logits = case
    return slow.sample([slow.f32(x) for x in logits], params, seed, masked, prompt, out)


PLAIN = (SamplingParams(), 5, [], [1], [], [0.0] * VOCAB)
TIED = (SamplingParams(top_p=0.5, seed=1), 7, [], [1], [], [1.0, 1.0] + [float("-inf")] * (VOCAB - 2))


@given(st.lists(CASE, min_size=1, max_size=4))
@example([PLAIN])
@settings(max_examples=250, deadline=None)
def test_every_row_is_what_the_slow_sampler_says(cases: list) -> None:
    try:
        expected = [_reference(case) for case in cases]
    except slow.Borderline:
        assume(False)
    assert _engine(cases) == expected


def test_an_exact_border_of_top_p_excludes() -> None:
    """Two equal tokens and top_p 0.5: the first holds just half of the mass, so the second is not needed."""
    assert all(_engine([(TIED[0], seed, *TIED[2:])]) == [0] for seed in range(50))


def _mismatches(trials: int = 120) -> int:
    """How many of a fixed set of cases differ from the reference; the test of this file's test."""
    wrong = 0
    for seed in range(trials):
        params = SamplingParams(
            temperature=0.7, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0}
        )
        logits = [((seed * 31 + i * 17) % 64) / 8 - 4 for i in range(VOCAB)]
        case = (params, seed, [], [1, 2, 3], [3, 5, 5], logits)
        wrong += _engine([case]) != [_reference(case)]
    return wrong


def test_a_changed_hash_gumbel_or_cut_is_seen(monkeypatch) -> None:
    assert _mismatches() == 0
    for module, name, value in (
        (sampling_noise, "MIX_2", sampling_noise.MIX_2 ^ (1 << 40)),
        (sampling_choice, "gumbel", lambda bits: -sampling_noise.gumbel(bits)),
        (sampling_choice, "nucleus", lambda logits, *_: len(logits)),
        (sampling_choice, "_MARGIN", 0.0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert _mismatches() > 0, name
    assert _mismatches() == 0
