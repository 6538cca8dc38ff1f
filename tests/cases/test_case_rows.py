"""Rows, padding and recorded shapes on the real runner: what a row held before, who moved where and which rows are only
padding changes nothing for anybody. Cases B036, B040, B042, B043, B045, B046 and B049."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from engine.build import settle
from engine.compute import inputs as inputs_module
from engine.compute.captures import captures_gap
from engine.compute.inputs import StaticInputs, declare
from engine.compute.sampler import Sampler
from engine.config import EngineConfig
from engine.control.plan import Move, Replay
from engine.control.record import StepRecord
from engine.request import SamplingParams
from tests.cases.oracle import T0, Answer, Ask, Watched, differences, engine, greedy, model, play, seeded, solo, text

PLAIN = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)

# One setting of each parameter that a row carries, on top of the plain request that it must not leak into.
FIELDS: dict[str, SamplingParams] = {
    "temperature": attrs.evolve(RANDOM, temperature=1.7),
    "top_p": attrs.evolve(RANDOM, top_p=0.3),
    "top_k": attrs.evolve(RANDOM, top_k=2),
    "min_p": attrs.evolve(RANDOM, min_p=0.4),
    "repetition_penalty": attrs.evolve(PLAIN, repetition_penalty=8.0, logit_bias={300: 8.0}),
    "frequency_penalty": attrs.evolve(PLAIN, frequency_penalty=2.0, logit_bias={300: 8.0}),
    "presence_penalty": attrs.evolve(PLAIN, presence_penalty=2.0, logit_bias={300: 8.0}),
    "logit_bias": attrs.evolve(PLAIN, logit_bias={300: 100.0}),
    "min_tokens": attrs.evolve(PLAIN, min_tokens=6, stop_token_ids=(300,), logit_bias={300: 100.0}),
    "seed": attrs.evolve(RANDOM, seed=77),
    "logprobs": attrs.evolve(PLAIN, logprobs=3),
    "prompt_logprobs": attrs.evolve(PLAIN, prompt_logprobs=3),
    "logits_digest": attrs.evolve(PLAIN, logits_digest=True),
}
# What ends a request or shapes its text: control and text hold it by request, never by row.
NOT_IN_A_ROW = {
    "max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "n",
}  # fmt: skip


def test_b040_the_table_names_every_parameter() -> None:
    assert set(FIELDS) | NOT_IN_A_ROW == {field.name for field in attrs.fields(SamplingParams)}


@pytest.mark.parametrize("field", FIELDS)
def test_b040_each_entry_has_an_effect(field: str) -> None:
    plain = PLAIN if FIELDS[field].greedy else RANDOM
    if field.endswith("penalty"):
        plain = attrs.evolve(plain, logit_bias={300: 8.0})
    assert solo(Ask(text(5, 6), FIELDS[field])).sampled != solo(Ask(text(5, 6), plain)).sampled


def vacated_row(params: SamplingParams, newcomer: SamplingParams) -> tuple[list[Ask], list[Answer], list[StepRecord]]:
    """Row 2 holds ``params``; row 0 ends, row 2 moves down to it, and the newcomer takes the vacated row 2."""
    shared = engine(num_kv_blocks=32, max_num_seqs=3)
    asks = [
        Ask(text(4, 4), attrs.evolve(PLAIN, max_tokens=3)),
        Ask(text(9, 5), attrs.evolve(newcomer, max_tokens=12)),
        Ask(text(5, 6), params),
        Ask(text(6, 7), newcomer, at=1),
    ]
    seen: list[StepRecord] = []
    return asks, play(shared, asks, seen), seen


@pytest.mark.parametrize("newcomer", [PLAIN, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("field", FIELDS)
def test_b040_a_plain_request_on_a_vacated_row(field: str, newcomer: SamplingParams) -> None:
    asks, answers, seen = vacated_row(FIELDS[field], newcomer)
    assert Move(2, 2, 0, swap=False) in [move for record in seen for move in record.plan.moves]
    assert [seat.row for record in seen for seat in record.plan.seated if seat.request == 3] == [2]
    assert differences(asks, answers) == []


@pytest.mark.parametrize("seed", range(6))
def test_b040_random_joins_and_leaves(seed: int) -> None:
    """Every parameter at once in four rows, in random order, some preempted, some aborted."""
    rng = random.Random(seed)
    asks = []
    for k, name in enumerate(rng.sample([*FIELDS, *FIELDS, "", "", ""], 18)):
        params = attrs.evolve(FIELDS.get(name, PLAIN), max_tokens=rng.randint(6, 9))
        at = rng.randrange(40)
        abort = at + rng.randint(1, 9) if rng.random() < 0.2 else None
        asks.append(Ask(text(k, rng.randint(1, 9)), params, at, abort))
    shared = engine(num_kv_blocks=9, persistent_batch=seed % 3 > 0)
    assert differences(asks, play(shared, asks)) == []
    assert shared.counters.preemptions


@pytest.mark.parametrize("first", ["options", "plain"])
def test_b042_a_swap_with_an_empty_side(first: str) -> None:
    """A decoding request and one that still prefills change places: one has options, the other none."""
    options = attrs.evolve(FIELDS["repetition_penalty"], logit_bias={300: 6.0}, logits_digest=True)
    one, other = (options, PLAIN) if first == "options" else (PLAIN, options)
    swaps = 0
    for length in range(8, 30, 3):
        asks = [
            Ask(text(1, 2), attrs.evolve(PLAIN, max_tokens=4)),
            Ask(text(2, 2), attrs.evolve(PLAIN, max_tokens=20)),
            Ask(text(3, length), one),
            Ask(text(4, 21), other),
        ]
        shared = engine(num_kv_blocks=40, max_num_batched_tokens=6)
        seen: list[StepRecord] = []
        assert differences(asks, play(shared, asks, seen)) == []
        swaps += sum(move.swap for record in seen for move in record.plan.moves)
    assert swaps


@pytest.mark.parametrize("constrained_first", [False, True])
def test_b043_a_constraint_joins_a_batch_that_a_plain_request_left(constrained_first: bool) -> None:
    """The bias holds from the first token to the last, and never for the other request, in either order."""
    only = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logit_bias={300: 100.0})
    params = [only, PLAIN] if constrained_first else [PLAIN, only]
    asks = [
        Ask(text(8, 5), attrs.evolve(PLAIN, max_tokens=14)),
        Ask(text(1, 4), attrs.evolve(params[0], max_tokens=4)),
        Ask(text(2, 4), params[1], at=5),
    ]
    answers = play(engine(num_kv_blocks=32), asks)
    assert differences(asks, answers) == []
    for ask, answer in zip(asks, answers, strict=True):
        assert (set(answer.tokens) == {300}) == bool(ask.params.logit_bias)


def test_b045_only_rows_whose_history_is_complete_get_a_token() -> None:
    """A budget of 4, one request that decodes and one that needs many chunks: tokens exactly where they are due."""
    shared = engine(num_kv_blocks=32, max_num_batched_tokens=4)
    asks = [Ask(text(1, 3), greedy(12)), Ask(text(2, 17), greedy(3)), Ask(text(3, 9), greedy(2))]
    for ask in asks:
        shared.submit(ask.prompt, ask.params)
    while shared.has_work:
        before = shared.ledger()
        record = shared.step()
        after = shared.ledger()
        work = {chunk.request: len(chunk.tokens) for chunk in record.plan.chunks}
        work |= {decode.request: 1 for decode in record.plan.decodes}
        for request in after.num_tokens:
            due = before.computed.get(request, 0) + work.get(request, 0) == before.num_tokens.get(request)
            grown = after.num_tokens[request] - before.num_tokens.get(request, 0)
            assert grown == (due and request in work), f"request {request} in iteration {record.iteration}"
    for ask, count in zip(asks, (12, 3, 2), strict=True):
        assert len(solo(ask).tokens) == count


def last_block(shared: Any) -> str:
    pool = shared.runner.pool
    return hashlib.sha256(b"".join(layer[:, -3].numpy().tobytes() for layer in pool.layers)).hexdigest()


def play_on_the_last_block() -> tuple[list[str], bool]:
    """Five rows of a bucket of eight own every block; what is wrong with the last block's changes, and whether anybody's
    answer differs."""
    shared = engine(num_kv_blocks=15, max_num_seqs=8, max_num_batched_tokens=64, capture_rows=(8,))
    pool: Any = shared.runner.pool  # type: ignore[attr-defined]
    assert pool.layers[0].shape[1] - 3 == 14 == pool.trash_block - 1
    asks = [Ask(text(k, 9), greedy(4)) for k in range(5)]
    ids = [shared.submit(ask.prompt, ask.params).requests[0] for ask in asks]
    wrong, sampled = [], {request: [] for request in ids}  # type: ignore[var-annotated]
    while shared.has_work:
        before = last_block(shared)
        record = shared.step()
        tables = shared.ledger().tables
        plan = record.plan
        for request, token in record.sampled:
            sampled[request].append(token)
        if plan.decodes:
            assert plan.launch == Replay(8, plan.launch.width, 3)  # type: ignore[union-attr]
        owner = next((request for request, table in tables.items() if 14 in table), None)
        written = {d.request for d in plan.decodes if tables[d.request][d.position // 4] == 14}
        written |= {c.request for c in plan.chunks if tables[c.request][-1] == 14}
        if (last_block(shared) != before) != (owner in written):
            wrong.append(f"iteration {plan.iteration}: block 14 of {owner}, written by {written}")
    return wrong, any(sampled[request] != solo(ask).sampled for request, ask in zip(ids, asks, strict=True))


def test_b036_padded_rows_leave_the_last_block_alone() -> None:
    """The last block's bytes change when its owner writes its own token there, and at no other time."""
    assert play_on_the_last_block() == ([], False)


def test_b036_a_padded_row_that_writes_the_last_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding with slot -1 taken from the end, as an indexed write does: the last block's last slot."""

    def wrapping(pool: Any) -> Any:
        last = pool.slot(pool.trash_block - 1, pool.block_size - 1)
        return tuple(attrs.evolve(entry, fill=last) if entry.name == "slots" else entry for entry in declare(pool))

    monkeypatch.setattr(inputs_module, "declare", wrapping)
    wrong, _ = play_on_the_last_block()
    assert wrong
    shared = engine(watched=True, num_kv_blocks=15, max_num_seqs=8, max_num_batched_tokens=64, capture_rows=(8,))
    play(shared, [Ask(text(k, 9), PLAIN) for k in range(3)])
    assert isinstance(shared.runner, Watched)
    assert shared.runner.complaints


def test_b040_a_row_that_keeps_its_past_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of a move is not cleared and a plain request does not write the row."""
    seat = Sampler.seat

    def lazily(self: Sampler, new: Any) -> None:
        if self._states[new.row] is None or new.sampling.params not in (PLAIN, RANDOM):
            seat(self, new)

    def copying(self: Sampler, move: Move) -> None:
        displaced = self._states[move.dst] if move.swap else self._states[move.src]
        self._states[move.dst], self._states[move.src] = self._states[move.src], displaced

    monkeypatch.setattr(Sampler, "seat", lazily)
    monkeypatch.setattr(Sampler, "move", copying)
    monkeypatch.setattr(Sampler, "vacate", lambda self, row: None)
    asks, answers, _ = vacated_row(FIELDS["logit_bias"], PLAIN)
    assert any("request 3" in difference for difference in differences(asks, answers))


def test_b042_a_swap_that_shares_one_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def assigns(self: Sampler, move: Move) -> None:
        self._states[move.dst] = self._states[move.src]

    monkeypatch.setattr(Sampler, "move", assigns)
    with pytest.raises(AssertionError):
        test_b042_a_swap_with_an_empty_side("options")


LISTS: list[tuple[int, ...] | None] = [None, (8, 1, 4, 4, 2), (2, 2, 1), (113,), (3,), (64, 1)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 33])
@pytest.mark.parametrize("listed", LISTS, ids=str)
def test_b046_recorded_rows_fit_the_batch(rows: int, listed: tuple[int, ...] | None) -> None:
    """Ascending, unique, none above max_num_seqs; what is not covered is said at start and runs eagerly, never crashes."""
    knobs: dict[str, Any] = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 64,
        "capture_rows": listed,
    }
    limits = settle(EngineConfig(**T0 | knobs), model(), "cpu", torch.float32)
    captured = sorted({r for r, _ in limits.captures})
    assert captured
    assert captured[0] >= 1
    assert captured[-1] <= rows
    assert list(limits.captures) == sorted(set(limits.captures))
    gap = captures_gap(limits.captures, max_num_seqs=rows, max_model_len=64, block_size=4)
    assert (gap is None) == (captured[-1] == rows)
    if listed is None:
        assert captured[-1] == rows
    if rows in (1, 5):
        shared = engine(**knobs)
        asks = [Ask(text(k, 3), greedy(3)) for k in range(rows)]
        assert differences(asks, play(shared, asks)) == []
        assert bool(shared.counters.eager) == (captured[-1] < rows)


@pytest.mark.parametrize("shape", [(1, 1), (2, 16), (4, 3), (8, 16)])
def test_b049_every_input_has_the_padded_size(shape: tuple[int, int]) -> None:
    """For each number of real rows: every buffer has the shape's rows, real ones hold their values, the rest padding."""
    pool: Any = engine().runner.pool  # type: ignore[attr-defined]
    static = StaticInputs(8, 16, pool, pool.layers[0].device)
    rows, width = shape
    for real in range(rows + 1):
        for buffer in static.host.values():
            buffer.fill_(-(2**40))
        values: dict[str, Any] = {
            name: np.arange(real, dtype=np.int64) + 5 for name in ("tokens", "positions", "slots")
        }
        values["tables"] = np.arange(real * 16, dtype=np.int64).reshape(real, 16)
        static.fill(values, rows, width)
        step, tables = static.step(rows, width)
        views = {"tokens": step.tokens, "positions": step.positions, "slots": step.slots, "tables": tables}
        for entry in declare(pool):
            view = views[entry.name]
            assert view.shape == ((rows, width) if entry.wide else (rows,))
            expected = values[entry.name][:, :width] if entry.wide else values[entry.name]
            assert np.array_equal(view[:real].numpy(), expected)
            assert (view[real:] == entry.fill).all()
    too_many = {name: np.zeros(rows + 1, dtype=np.int64) for name in ("tokens", "positions", "slots")}
    with pytest.raises(ValueError, match=f"{rows + 1} rows"):
        static.fill(too_many | {"tables": np.zeros((rows + 1, 16), dtype=np.int64)}, rows, width)


def test_seeded_rows_differ_where_they_should() -> None:
    """Two seeds give two answers, so that equal answers in this file mean something."""
    assert solo(Ask(text(1, 5), seeded(8, 1))).tokens != solo(Ask(text(1, 5), seeded(8, 2))).tokens
