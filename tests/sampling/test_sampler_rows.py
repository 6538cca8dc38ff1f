"""A row is its request's alone: neighbours, batch order, row index, moves and what the row held before change nothing.

The table names every field of SamplingParams, so a new field cannot arrive without a place here. The last test breaks
the row operations in the ways in which other engines have broken them and sees the random histories fail.
"""

from __future__ import annotations

import random

import attrs
import pytest
import torch

from engine.compute import sampler as sampler_module
from engine.compute.sampler import Sampler
from engine.control.plan import Move, Sampled, Seat
from engine.request import SamplingParams, SamplingSpec

VOCAB = 53  # odd, so that rows of a batch start at every alignment
MASKED = (3, 4, 5)

# A value of each field that changes what is sampled or reported.
EFFECT = {
    "temperature": SamplingParams(temperature=1.4),
    "top_p": SamplingParams(top_p=0.4),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(min_p=0.3),
    "repetition_penalty": SamplingParams(temperature=0.0, repetition_penalty=3.0),
    "frequency_penalty": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "presence_penalty": SamplingParams(temperature=0.0, presence_penalty=1.5),
    "logit_bias": SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(7), 50.0)),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=6),
    "seed": SamplingParams(seed=77),
    "logprobs": SamplingParams(temperature=0.0, logprobs=4),
    "logits_digest": SamplingParams(temperature=0.0, logits_digest=True),
}
# Fields that the sampler does not read, since they end a request or shape its text; and what only a prefill can tell.
ELSEWHERE = {
    "max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "n",
    "prompt_logprobs",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)


def test_the_table_is_complete() -> None:
    assert set(EFFECT) | ELSEWHERE == {field.name for field in attrs.fields(SamplingParams)}


def _logits(request: int, position: int) -> torch.Tensor:
    """The model of these tests: logits [VOCAB] as a function of request and position; a few tokens are favoured."""
    generator = torch.Generator().manual_seed(request * 1000 + position)
    logits = torch.randn(VOCAB, generator=generator)
    logits[:8] += 2.0
    return logits


@attrs.define
class Request:
    number: int
    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 2, 6)
    tokens: list[int] = attrs.field(factory=list)
    sampled: list[Sampled] = attrs.field(factory=list)

    def seat(self, row: int) -> Seat:
        seed = self.params.seed if self.params.seed is not None else self.number
        spec = SamplingSpec(self.params, seed, MASKED)
        return Seat(self.number, row, (*self.prompt, *self.tokens), len(self.prompt), (), spec)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.tokens)


def step(sampler: Sampler, seated: dict[int, Request], order: list[int]) -> None:
    requests = [seated[row] for row in order]
    logits = torch.stack([_logits(r.number, r.position) for r in requests])
    for request, sampled in zip(requests, sampler.sample(logits, order, [r.position for r in requests]), strict=True):
        request.sampled.append(sampled)
        request.tokens.append(sampled.token)


def solo(number: int, params: SamplingParams, steps: int) -> list[Sampled]:
    request = Request(number, params)
    sampler = Sampler(1, VOCAB)
    sampler.seat(request.seat(0))
    for _ in range(steps):
        step(sampler, {0: request}, [0])
    return request.sampled


@pytest.mark.parametrize("field", EFFECT)
def test_the_field_has_an_effect(field: str) -> None:
    plain = SamplingParams() if EFFECT[field].temperature else GREEDY
    assert solo(1, EFFECT[field], 8) != solo(1, plain, 8)


@pytest.mark.parametrize("field", EFFECT)
@pytest.mark.parametrize("plain", [GREEDY, SamplingParams()], ids=["greedy", "random"])
def test_a_plain_request_on_a_row_with_a_past(field: str, plain: SamplingParams) -> None:
    """Row 2 holds the field, row 0 ends, row 2 moves down to it, a plain request lands on row 2; then the swap."""
    sampler = Sampler(3, VOCAB)
    seated = {0: Request(1, plain), 1: Request(2, plain), 2: Request(3, EFFECT[field])}
    for row, request in seated.items():
        sampler.seat(request.seat(row))
    step(sampler, seated, [0, 1, 2])
    sampler.vacate(0)
    sampler.move(Move(3, src=2, dst=0, swap=False))
    newcomer = Request(4, plain)
    sampler.seat(newcomer.seat(2))
    seated = {0: seated[2], 1: seated[1], 2: newcomer}
    step(sampler, seated, [0, 1, 2])
    sampler.move(Move(4, src=2, dst=0, swap=True))
    seated[0], seated[2] = seated[2], seated[0]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        step(sampler, seated, order)
    assert newcomer.sampled == solo(4, plain, 4)
    assert seated[2].sampled == solo(3, EFFECT[field], 5)
    assert seated[1].sampled == solo(2, plain, 5)


def test_an_empty_row_is_refused() -> None:
    sampler = Sampler(2, VOCAB)
    sampler.seat(Request(1, GREEDY).seat(0))
    sampler.move(Move(1, src=0, dst=1, swap=False))
    with pytest.raises(LookupError, match="row 0"):
        sampler.sample(torch.zeros(1, VOCAB), [0], [4])
    with pytest.raises(ValueError, match="must be"):
        sampler.sample(torch.zeros(1, VOCAB + 1), [1], [4])
    with pytest.raises(ValueError, match="float32"):
        sampler.sample(torch.zeros(1, VOCAB, dtype=torch.float16), [1], [4])


@pytest.mark.parametrize("threads", [1, 2])
def test_permuting_and_splitting_a_batch(threads: int) -> None:
    """Every field at once in one batch, in any order and any split: the same answers, to the last bit of a logprob."""
    everything = [*EFFECT.values(), SamplingParams(logprobs=3, logits_digest=True, top_p=0.7)]
    seats = [Request(i, params) for i, params in enumerate(everything)]
    logits = torch.stack([_logits(r.number, r.position) for r in seats])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        answers = []
        for trial in range(20):
            sampler = Sampler(len(seats), VOCAB)
            for row, request in enumerate(seats):
                sampler.seat(request.seat(row))
            order = random.Random(trial).sample(range(len(seats)), len(seats))
            cut = trial % len(seats)
            got: dict[int, Sampled] = {}
            for part in (order[:cut], order[cut:]):
                if part:
                    got.update(zip(part, sampler.sample(logits[part], part, [4] * len(part)), strict=True))
            answers.append(got)
        assert all(answer == answers[0] for answer in answers)
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_WORTH_A_THREAD", 0)
    answers = []
    for threads in (1, 2, 5):
        seated = {row: Request(row, params) for row, params in enumerate(EFFECT.values())}
        sampler = Sampler(len(seated), VOCAB, threads=threads)
        for row, request in seated.items():
            sampler.seat(request.seat(row))
        for _ in range(10):
            step(sampler, seated, list(seated))
        answers.append([request.sampled for request in seated.values()])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_cpus_answers() -> None:
    answers = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(len(EFFECT), VOCAB, device)
        requests = [Request(row, params) for row, params in enumerate(EFFECT.values())]
        for row, request in enumerate(requests):
            sampler.seat(request.seat(row))
        logits = torch.stack([_logits(r.number, r.position) for r in requests]).to(device)
        answers.append(sampler.sample(logits, range(len(requests)), [4] * len(requests)))
    assert answers[0] == answers[1]


def history(seed: int, make: type[Sampler]) -> list[int]:
    """Random joins, leaves, moves, swaps, preemptions, steps; returns the requests that differ from their solo run."""
    rng = random.Random(seed)
    rows = 4
    sampler, seated, away, done = make(rows, VOCAB), {}, [], []
    pool = [*EFFECT.values(), GREEDY, SamplingParams()]
    number = 0
    for _ in range(60):
        free = [row for row in range(rows) if row not in seated]
        action = rng.choice(["join", "leave", "move", "preempt", "step", "step", "step"])
        if action == "join" and free:
            if away and rng.random() < 0.5:
                request = away.pop()
            else:
                number += 1
                request = Request(number, rng.choice(pool))
                done.append(request)
            row = rng.choice(free)
            sampler.seat(request.seat(row))
            seated[row] = request
        elif action in ("leave", "preempt") and seated:
            row = rng.choice(sorted(seated))
            sampler.vacate(row)
            request = seated.pop(row)
            if action == "preempt":
                away.append(request)
        elif action == "move" and seated:
            src, dst = rng.choice(sorted(seated)), rng.randrange(rows)
            if src != dst:
                sampler.move(Move(seated[src].number, src, dst, swap=dst in seated))
                moved, displaced = seated.pop(src), seated.pop(dst, None)
                seated[dst] = moved
                if displaced is not None:
                    seated[src] = displaced
        elif action == "step" and seated:
            step(sampler, seated, rng.sample(sorted(seated), rng.randint(1, len(seated))))
    return [r.number for r in done if r.sampled != solo(r.number, r.params, len(r.sampled))]


def test_random_histories_equal_solo_runs() -> None:
    assert [history(seed, Sampler) for seed in range(120)] == [[]] * 120


class KeepsSource(Sampler):
    """A seat that a request without the option does not write: the row's past shines through (B040)."""

    def seat(self, seat: Seat) -> None:
        if self._states[seat.row] is None or seat.sampling.params != GREEDY:
            super().seat(seat)

    def vacate(self, row: int) -> None:
        pass

    def move(self, move: Move) -> None:
        displaced = self._states[move.dst] if move.swap else self._states[move.src]
        self._states[move.dst], self._states[move.src] = self._states[move.src], displaced


class SharesOnSwap(Sampler):
    """Get-and-assign instead of a swap: both rows point to one state (B042)."""

    def move(self, move: Move) -> None:
        self._states[move.dst] = self._states[move.src]


class ForgetsOnMove(Sampler):
    """The counts stay behind when the row moves."""

    def move(self, move: Move) -> None:
        super().move(move)
        state = self._states[move.dst]
        if state is not None:
            state._penalties = None


class CountsNothing(Sampler):
    """Sampled tokens are not counted until the request is seated anew (B084)."""

    def seat(self, seat: Seat) -> None:
        super().seat(seat)
        self._states[seat.row].append = lambda token: None


class KeysByRow(Sampler):
    """Noise that depends on the row."""

    def seat(self, seat: Seat) -> None:
        super().seat(seat)
        self._states[seat.row].seed += seat.row


@pytest.mark.parametrize("broken", [KeepsSource, SharesOnSwap, ForgetsOnMove, CountsNothing, KeysByRow])
def test_broken_row_operations_are_seen(broken: type[Sampler]) -> None:
    def fails(seed: int) -> bool:
        try:
            return bool(history(seed, broken))
        except LookupError:
            return True

    assert any(fails(seed) for seed in range(120))
