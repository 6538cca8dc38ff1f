"""Drawing in native kernels and in numpy: the same token for the same logits, to the bit, whatever is asked for.

Compared over generated parameters and rows that tempt: ties, plateaus, minus infinity, NaN, single tokens, tails. Peaks come
from the head or are found by the kernel. The last tests break the native rule on purpose and see the comparison fail.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.compute.sampler import Draw, Sampler
from engine.compute.sampling_choice import weigh
from engine.compute.sampling_noise import bits, counters, stream_key
from engine.compute.sampling_row import RowState
from engine.control.plan import Sampled, Seat
from engine.native.build import built
from engine.native.draw import NativeDraw
from engine.native.kernels import BadCall, panels_of
from engine.native.library import Library
from engine.native.runner import library
from engine.request import SamplingParams, SamplingSpec
from tests.native.kit import changed_source, kernels, kernels_of, numbers, same_bytes, weight

NOWHERE = torch.zeros(1)
ROWS = 12
SHAPES = {1: 2, 2: 2, 15: 4, 16: 4, 17: 4, 53: 12, 300: 12, 1000: 8}  # vocabulary: batches


def draw_of(vocab: int, of: Library | None = None, threads: int = 1) -> NativeDraw:
    """A drawer that finds the peaks itself."""
    chosen = kernels(threads) if of is None else kernels_of(of, threads)
    return NativeDraw(chosen, ROWS, vocab, NOWHERE, _no_peaks)


def _no_peaks(rows: int) -> Tensor:
    raise AssertionError("these logits are not the head's")


def peaks(logits: Tensor) -> Tensor:
    """What the head leaves, written down again in numpy."""
    values = logits.numpy()
    panels = [values[:, i : i + 16] for i in range(0, values.shape[1], 16)]
    tops = [np.where(np.isfinite(panel).all(axis=1), panel.max(axis=1), np.nan) for panel in panels]
    return torch.from_numpy(np.stack(tops, axis=1).astype(np.float32))


def some_logits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """One row of a kind that some rule turns on."""
    kind = rng.integers(0, 9)
    row = rng.standard_normal(vocab) * rng.choice([0.01, 1.0, 5.0, 40.0])
    if kind == 1:
        row = np.round(row * 2) / 2  # ties everywhere
    elif kind == 2:
        row[:] = rng.choice([0.0, -0.0, 3.5, -3e38])
    elif kind == 3:
        row[rng.random(vocab) < rng.choice([0.1, 0.9])] = -np.inf
    elif kind == 4:
        row[rng.integers(0, vocab, 3)] = row.max() + 1  # the first place is shared
    elif kind == 5:
        row[rng.integers(0, vocab)] += 30
    elif kind == 6:
        row[rng.integers(0, vocab, 1 + rng.integers(0, 3))] = rng.choice([np.nan, np.inf])
    elif kind == 7:
        row[:] = rng.choice([np.nan, np.inf, -np.inf])
    return row.astype(np.float32)


def some_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(0, len(values))]

    hot = one_of(0.0, 1.0, 1.0, 0.7, float(rng.uniform(0.01, 3)), 100.0, 1e-9, 5e-324)
    return SamplingParams(
        temperature=hot,
        top_k=int(one_of(0, 0, 1, 2, 5, 17, 40, vocab - 1, vocab, -1)),
        top_p=one_of(1.0, 1.0, 0.9, 0.5, float(rng.uniform(0.01, 0.99)), 1e-300, 1 - 2**-53),
        min_p=one_of(0.0, 0.0, 0.05, float(rng.random()), 1.0, 5e-324),
        repetition_penalty=one_of(1.0, 1.0, 1.0, 1.3, 0.5),
        frequency_penalty=one_of(0.0, 0.0, 0.0, 0.5, -1.0),
        presence_penalty=one_of(0.0, 0.0, 0.0, 1.5),
        logit_bias=one_of({}, {}, {}, {0: 5.0}, {vocab - 1: -100.0, vocab // 2: 3.25}),
        min_tokens=one_of(0, 0, 0, 9),
        logprobs=one_of(None, None, None, 0, 5),
        logits_digest=bool(rng.random() < 0.1),
    )


def batch(number: int, vocab: int) -> tuple[Tensor, list[Seat], list[int]]:
    rng = np.random.default_rng([number, vocab])
    logits = torch.from_numpy(np.stack([some_logits(rng, vocab) for _ in range(ROWS)]))
    seats = []
    for row in range(ROWS):
        prompt = tuple(int(token) for token in rng.integers(0, vocab, 3))
        seed = int(rng.integers(-(2**63), 2**63))
        spec = SamplingSpec(some_params(rng, vocab), seed, tuple({0, vocab - 1}))
        seats.append(Seat(row, row, prompt, int(rng.integers(1, 4)), (), spec))
    return logits, seats, [len(seat.tokens) for seat in seats]


def sampled(draw: Any, logits: Tensor, seats: list[Seat], positions: list[int]) -> list[Sampled]:
    sampler = Sampler(len(seats), logits.shape[1], draw=draw)
    for row, seat in enumerate(seats):
        sampler.seat(seat)
        assert seat.row == row
    return sampler.sample(logits, range(len(seats)), positions)


@functools.cache
def expected(number: int, vocab: int) -> list[int]:
    with np.errstate(invalid="ignore"):
        return [one.token for one in sampled(None, *batch(number, vocab))]


def differences(draw_for: Callable[[int], Draw]) -> int:
    """Tokens that differ from numpy's, over all batches."""
    wrong = 0
    for vocab, count in SHAPES.items():
        for number in range(count):
            with np.errstate(invalid="ignore"):
                got = [one.token for one in sampled(draw_for(vocab), *batch(number, vocab))]
            wrong += sum(a != b for a, b in zip(got, expected(number, vocab), strict=True))
    return wrong


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_tokens_as_numpy(threads: int) -> None:
    assert differences(lambda vocab: draw_of(vocab, threads=threads)) == 0
    drawn = [params for vocab, count in SHAPES.items() for n in range(count) for params in _asked(n, vocab)]
    for name, least in (("greedy", 40), ("top_k", 100), ("top_p", 100), ("min_p", 100), ("adjusts", 100)):
        assert drawn.count(name) >= least, f"too few rows with {name} for this to say anything"


def _asked(number: int, vocab: int) -> list[str]:
    found = []
    for seat in batch(number, vocab)[1]:
        params: SamplingParams = seat.sampling.params  # type: ignore[attr-defined]
        if params.greedy:
            found.append("greedy")
            continue
        found += [name for name, off in (("top_p", 1.0), ("min_p", 0.0)) if getattr(params, name) != off]
        found += ["top_k"] if 0 < params.top_k < vocab else []
        found += ["adjusts"] if params.logit_bias or params.min_tokens or params.repetition_penalty != 1 else []
    return found


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("vocab", [1, 16, 53, 300, 1000])
def test_whose_peaks_they_are_changes_nothing(vocab: int) -> None:
    for number in range(3):
        logits, seats, positions = batch(number, vocab)
        given = peaks(logits)
        draw = NativeDraw(kernels(), 1, vocab, logits, lambda rows, given=given: given[:rows])
        assert [one.token for one in sampled(draw, logits, seats, positions)] == expected(number, vocab)


def test_a_whole_vocabulary() -> None:
    """As many ids as a model has, in shapes that a model's logits have; and reports beside the tokens."""
    vocab, rng = 49152, np.random.default_rng(5)
    logits = torch.from_numpy((rng.standard_normal((6, vocab)) * 2.5).astype(np.float32))
    asked = [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_k=50, top_p=0.95),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=4000, min_p=0.01),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.3, repetition_penalty=1.2, logprobs=2, logits_digest=True),
    ]
    seats = [Seat(i, i, (5, 9, 9), 2, (), SamplingSpec(params, i)) for i, params in enumerate(asked)]
    for position in range(3, 23):
        at = [position] * len(seats)
        assert sampled(draw_of(vocab), logits, seats, at) == sampled(None, logits, seats, at)


def test_a_row_does_not_see_its_neighbours() -> None:
    """Alone, in any order and on any number of threads."""
    logits, seats, positions = batch(1, 300)
    tokens = expected(1, 300)
    for order in ([3], [11, 0, 5], list(range(ROWS))[::-1]):
        some = [Seat(0, k, seats[i].tokens, seats[i].prompt_len, (), seats[i].sampling) for k, i in enumerate(order)]
        for threads in (1, 2):
            got = sampled(draw_of(300, threads=threads), logits[order], some, [positions[i] for i in order])
            assert [one.token for one in got] == [tokens[i] for i in order]


def test_the_weights_of_top_p() -> None:
    """Integers that follow exp to the last unit or two, so that the cut is where the rule says."""
    logits = np.linspace(-40.0, 0.0, 40001, dtype=np.float32)
    wanted = np.exp(logits.astype(np.float64) / 1.3) * 2.0**40
    found = weigh(logits, 0.0, 1.3)
    assert np.abs(found - wanted).max() < 1.5
    assert (np.diff(found) >= 0).all()
    assert found[-1] == 2**40


def test_noise_is_a_function_of_seed_position_and_id() -> None:
    """A flat row at a high temperature is won by the largest noise alone."""
    vocab = 1000
    for seed, position in ((0, 0), (7, 1), (-1, 5), (2**63 - 1, 10**6)):
        spec = SamplingSpec(SamplingParams(temperature=1.0), seed)
        seat = Seat(0, 0, (1,), 1, (), spec)
        token = sampled(draw_of(vocab), torch.zeros(1, vocab), [seat], [position])[0].token
        assert token == int(bits(stream_key(seed, position), counters(vocab)).argmin())


@pytest.mark.parametrize("rows", [1, 2, 7, 17])
@pytest.mark.parametrize("n", [16, 50, 400])
def test_the_head_leaves_peaks(rows: int, n: int) -> None:
    packed, _ = weight("Q4_1", n, 64)
    x = numbers(rows, rows, 64)
    logits, plain, found = torch.empty(rows, n), torch.empty(rows, n), torch.empty(rows, panels_of(n))
    kernels().linear(packed, None, x, plain)
    kernels(2).head(packed, x, logits, found)
    assert same_bytes(logits, plain)
    assert same_bytes(found, peaks(logits))
    x[0, 3] = float("inf")
    kernels().head(packed, x, logits, found)
    assert found[0].isnan().all()
    assert same_bytes(found, peaks(logits))


def test_wrong_sizes_are_refused() -> None:
    wish = b"\0" * 40
    with pytest.raises(BadCall, match="logits are"):
        draw_of(20)(torch.zeros(2, 20), [wish], [0])
    with pytest.raises(BadCall, match="logits are"):
        draw_of(20)(torch.zeros(1, 21), [wish], [0])
    with pytest.raises(BadCall, match="float64"):
        draw_of(20)(torch.zeros(1, 20, dtype=torch.float64), [wish], [0])
    assert draw_of(20)(torch.zeros(40, 20), [wish] * 40, [0] * 40) == [0] * 40  # more rows than it was made for


def test_peaks_of_other_logits_are_noticed() -> None:
    logits = numbers(3, 2, 300)
    asked = [Seat(i, i, (1,), 1, (), SamplingSpec(SamplingParams(top_k=9, top_p=0.9), i)) for i in range(2)]
    draw = NativeDraw(kernels(), 2, 300, logits, lambda rows: peaks(logits).roll(1, 0))
    with pytest.raises(RuntimeError, match="row 0 of 2: the head's peaks are not those of its logits"):
        sampled(draw, logits, asked, [1, 1])


def test_peaks_below_their_logits_lead_nowhere() -> None:
    """Logits far above the peaks that are given: whatever is drawn is an id or an error, and no memory beside is read."""
    logits = numbers(3, 4, 300) * 1000
    for given in (torch.full((4, 19), -5e3), peaks(logits) - 900, peaks(logits).roll(7, 1), torch.zeros(4, 19)):
        draw = NativeDraw(kernels(), 4, 300, logits, lambda rows, given=given: given)
        for params in (SamplingParams(top_p=0.5), SamplingParams(top_k=3, top_p=0.9, min_p=0.1), SamplingParams()):
            seats = [Seat(i, i, (1,), 1, (), SamplingSpec(params, i)) for i in range(4)]
            with contextlib.suppress(RuntimeError):
                assert all(0 <= one.token < 300 for one in sampled(draw, logits, seats, [1] * 4))


@pytest.mark.parametrize("top_p", [0.0, -0.5, -1e300, float("-inf"), float("nan"), 5e-324])
def test_wishes_that_make_no_sense_lead_nowhere(top_p: float) -> None:
    """No request can hold them; were they to arrive all the same, an id is drawn and no memory beside is read."""
    logits = numbers(3, 1, 300)
    for temperature, min_p, top_k in (
        (1.0, 0.0, -1),
        (float("inf"), -1.0, -(2**63)),
        (5e-324, float("nan"), 2**63 - 1),
    ):
        wish = struct.pack("<Qdddq", 7, temperature, top_p, min_p, top_k)
        for position in (-(2**63), 2**63 - 1):
            (token,) = draw_of(300)(logits, [wish], [position])
            assert 0 <= token < 300


def test_a_call_is_held_from_step_to_step() -> None:
    """Calls over the head's own logits are kept: neither they nor what they point to is given back between two steps."""
    logits = numbers(3, 2, 300)
    draw = NativeDraw(kernels(), 2, 300, logits, lambda rows: peaks(logits))
    wishes = [RowState(Seat(0, 0, (1,), 1, (), SamplingSpec(SamplingParams(), seed)), 300).wish for seed in (1, 2)]
    first = draw(logits, wishes, [1, 1])
    gc.collect()
    rubbish = [bytearray(256) for _ in range(2000)] + [torch.full((2, 19), 9.0) for _ in range(64)]
    assert draw(logits, wishes, [1, 1]) == first
    assert len(rubbish) == 2064


BREAKS: dict[str, tuple[str, str]] = {
    "the last of equals": (
        "for (int64_t i = panel * LANES; i < row.vocab && i < (panel + 1) * LANES; ++i)",
        "for (int64_t i = std::min(row.vocab, (panel + 1) * LANES) - 1; i >= panel * LANES; --i)",
    ),
    "noise of the next id": ("key + uint64_t(id + 1) * GAMMA;", "key + uint64_t(id + 2) * GAMMA;"),
    "noise of the position before": ("uint64_t(position) + 1", "uint64_t(position)"),
    "one token too many in top-k": ("first(row, wish.top_k, cut.low", "first(row, wish.top_k + 1, cut.low"),
    "of ties at the cut one too few": ("int64_t ties = count - above, last", "int64_t ties = count - above - 1, last"),
    "top-p keeps who stands at its border": ("(bound - sum + pivot - 1) / pivot;", "(bound - sum) / pivot + 1;"),
    "min-p before the temperature": ("row.peak + row.temperature * std::log", "row.peak + std::log"),
    "panels are skipped too early": ("if (bound < 0.5) continue;", "if (bound < 0x1p46) continue;"),
    "the screen drops winners": ("constexpr double MARGIN = 1.001;", "constexpr double MARGIN = 0.5;"),
}


def broken(tmp_path: Path, name: str) -> Library:
    source = changed_source(tmp_path, "sampling.h", BREAKS[name])
    return Library(built(folder=source, cache=tmp_path / "cache", extra=("-O1",)))


def _changed(wish: bytes, part: str) -> bytes:
    values = dict(zip(("seed", "temperature", "top_p", "min_p", "top_k"), struct.unpack("<Qdddq", wish), strict=True))
    values[part] = {"seed": values["seed"] ^ 1, "temperature": values["temperature"] * 2, "top_p": 1.0}.get(part, 0)
    return struct.pack("<Qdddq", *values.values())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("part", ["position", "seed", "temperature", "top_p", "min_p", "top_k"])
def test_a_wrong_wish_is_noticed(part: str) -> None:
    """The comparison of this file fails when one part of what is asked for does not arrive."""

    def wrong(vocab: int) -> Any:
        def draw(logits: Tensor, wishes: Sequence[bytes], positions: Sequence[int]) -> list[int]:
            if part == "position":
                return draw_of(vocab)(logits, wishes, [position + 1 for position in positions])
            return draw_of(vocab)(logits, [_changed(wish, part) for wish in wishes], positions)

        return draw

    assert differences(wrong) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", BREAKS)
def test_every_broken_rule_is_noticed(name: str, tmp_path: Path) -> None:
    of = broken(tmp_path, name)
    assert differences(lambda vocab: draw_of(vocab, of)) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("target", [("-mavx2", "-mfma", "-mf16c"), ()])
def test_other_builds_draw_the_same(target: tuple[str, ...], tmp_path: Path) -> None:
    if target and library().vector_bits == 0:
        pytest.skip("missing optional system tool: a processor with AVX2")
    of = Library(built(target=target, cache=tmp_path))
    assert differences(lambda vocab: draw_of(vocab, of)) == 0
