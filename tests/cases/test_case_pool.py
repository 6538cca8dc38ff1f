"""Blocks, rows and queues under requests that end at once, collide and leave: nothing leaks, nothing stalls, and who is
passed over is what the rules say. Cases B004, B006, B012, B013, B015, B016, B021, B024 and B028."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.control.blocks import BlockPool
from engine.control.scheduler import Scheduler
from engine.engine import Engine
from engine.request import SamplingParams
from engine.text.stream import TextStream
from server.metrics import Reading
from tests.cases.oracle import Ask, differences, engine, faults, greedy, held, model, play, seeded, solo, text
from tests.server.stub import StubRunner, stub_engine

EOS = 2


def tokenizer() -> Any:
    made = model().tokenizer
    assert made is not None
    return made


def scripted(words: dict[int, list[int]], **limits: Any) -> Engine:
    """T0 over a runner that answers a prompt with the token list under the prompt's first id."""
    sizes: dict[str, Any] = {"num_blocks": 8, "max_model_len": 64, "captures": ((4, 16),), "max_waiting": 1024}
    return stub_engine(StubRunner(lambda prompt: words.get(prompt[0], ())), **sizes | limits)


def drain(shared: Engine, ends: dict[int, str]) -> None:
    """Steps to the end, judging each iteration; ``ends`` collects the finish reasons."""
    for _ in range(5000):
        if not shared.has_work:
            break
        record = shared.step()
        for end in (*record.aborted, *record.finished):
            assert end.request not in ends, "a second end"
            ends[end.request] = end.reason
        assert faults(shared, record) == []
    assert held(shared) == []


@pytest.mark.parametrize("neighbour", [False, True], ids=["alone", "beside a chunked prefill"])
@pytest.mark.parametrize(
    ("how", "params", "reason"),
    [
        ("length", {"max_tokens": 1, "ignore_eos": True}, "length"),
        ("eos", {"max_tokens": 9}, "stop"),
        ("stop id", {"max_tokens": 9, "stop_token_ids": (9,), "ignore_eos": True}, "stop"),
        ("stop string", {"max_tokens": 9, "stop": ("e",), "ignore_eos": True}, "stop"),
    ],
)
def test_b006_ending_in_the_first_step_gives_everything_back(
    how: str, params: dict[str, Any], reason: str, neighbour: bool
) -> None:
    """Fifty requests that end with their first token: rows, blocks and compute's rows are free, and each says why."""
    first = {"length": 50, "eos": EOS, "stop id": 9, "stop string": tokenizer().encode("e")[0]}[how]
    shared = scripted({7: [first] * 9}, num_blocks=16, max_num_batched_tokens=6)
    ends: dict[int, str] = {}
    if neighbour:
        shared.submit([11] * 40, SamplingParams(max_tokens=3, ignore_eos=True))
    mine: list[int] = []
    for k in range(50):
        texts = [TextStream(tokenizer(), [7], stop=params["stop"])] if "stop" in params else []
        mine += shared.submit([7] * (1 + k % 9), SamplingParams(**params), texts=texts).requests
    drain(shared, ends)
    assert {ends[request] for request in mine} == {reason}
    assert isinstance(shared.runner, StubRunner)
    assert shared.counters.sampled_tokens == 50 + 3 * neighbour


def test_b006_on_the_real_runner() -> None:
    shared = engine(max_num_batched_tokens=6)
    asks = [Ask(text(99, 25), greedy(5))] + [Ask(text(k, 1 + k % 9), greedy(1), at=k // 4) for k in range(50)]
    assert differences(asks, play(shared, asks)) == []


def test_b004_the_metrics_add_up_at_every_step() -> None:
    """Five hundred requests through eight blocks: used and free are never negative and always all of them."""
    rng = random.Random(4)
    shared = scripted({})
    readings = [Reading.of(shared)]
    live: list[int] = []
    submitted = 0
    while submitted < 500 or shared.has_work:
        for _ in range(rng.randint(0, 3) if submitted < 500 else 0):
            params = SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True, temperature=0)
            live += shared.submit([rng.randrange(3, 90)] * rng.randint(1, 20), params).requests
            submitted += 1
        if live and rng.random() < 0.1:
            shared.abort(rng.choice(live))
        record = shared.step()
        assert faults(shared, record) == []
        reading = Reading.of(shared)
        used = {block for table in shared.ledger().tables.values() for block in table}
        assert reading.blocks == 8
        assert 0 <= reading.free_blocks <= 8
        assert reading.free_blocks + len(used) == 8
        readings.append(reading)
    assert held(shared) == []
    assert {0, 8} <= {reading.free_blocks for reading in readings}


def test_b012_a_refused_admission_changes_nothing() -> None:
    """The head needs one block more than is free: the whole ledger stays as it is until somebody leaves."""
    shared = scripted({})
    shared.submit([5] * 13, SamplingParams(max_tokens=3, ignore_eos=True))  # 4 blocks, and stays within them
    shared.step()
    (head,) = shared.submit([6] * 17, SamplingParams(max_tokens=2, ignore_eos=True)).requests
    for _ in range(2):
        before = shared.ledger()
        owner = list(shared.scheduler.rows.owner)
        shared.step()
        after = shared.ledger()
        assert before.waiting == after.waiting == (head,)
        assert (after.tables, after.rows, after.computed[head]) == (before.tables, before.rows, 0)
        for name in ("blank", "cached", "references"):
            assert getattr(after, name) == getattr(before, name)
        assert owner == list(shared.scheduler.rows.owner)
    drain(shared, {})


def test_b013_rows_are_held_by_running_requests_only() -> None:
    shared = engine(max_num_seqs=2)
    asks = [Ask(text(k, 9), greedy(16)) for k in range(3)]
    for ask in asks:
        shared.submit(ask.prompt, ask.params)
    preempted = 0
    while shared.has_work:
        record = shared.step()
        preempted += len(record.preempted)
        busy = [owner for owner in shared.scheduler.rows.owner if owner is not None]
        assert len(busy) <= len(shared.ledger().running) <= 2
        assert set(busy) == set(shared.ledger().running)
    assert preempted
    assert held(shared) == []


def test_b015_b016_time_outs_and_retries_at_a_full_pool_never_stall() -> None:
    """Clients that give up and come back: in each iteration that somebody is owed tokens, somebody is computed."""
    rng = random.Random(16)
    shared = scripted({}, max_waiting=64)
    patience: dict[int, int] = {}
    ends: dict[int, str] = {}
    for iteration in range(1500):
        for request in [r for r, until in patience.items() if until == iteration and r not in ends]:
            shared.abort(request)
            patience[request] = -1
        if len(shared.ledger().waiting) < 8:
            (request,) = shared.submit(
                [rng.randrange(3, 90)] * rng.randint(1, 24), SamplingParams(max_tokens=8, ignore_eos=True)
            ).requests
            patience[request] = iteration + rng.choice([0, 1, 3, 9, 40])
        record = shared.step()
        assert faults(shared, record) == []  # among them: nobody runs although somebody waits; waiting ones own blocks
        if shared.ledger().waiting:
            assert record.plan.forwards
        for end in (*record.aborted, *record.finished):
            ends[end.request] = end.reason
    drain(shared, ends)
    assert ends.keys() == set(range(shared.counters.submitted))
    assert set(ends.values()) == {"length", "abort"}
    assert shared.counters.preemptions > 0


def test_b021_a_resumed_request_is_planned_as_a_prefill_of_everything() -> None:
    """Three tokens were generated, nothing is computed: the plan is one prefill of prompt and three, and samples."""
    shared = scripted({}, num_blocks=4, max_num_batched_tokens=16)
    shared.submit([5] * 6, SamplingParams(max_tokens=9, ignore_eos=True))
    shared.submit([6] * 5, SamplingParams(max_tokens=9, ignore_eos=True))
    resumed = None
    for _ in range(60):
        before = shared.ledger()
        record = shared.step()
        seats = [seat for seat in record.plan.seated if before.num_tokens.get(seat.request, 0) > seat.prompt_len]
        if 1 in record.preempted:
            assert before.num_tokens[1] == 5 + 3
        if seats:
            (resumed,) = seats
            (chunk,) = [chunk for chunk in record.plan.chunks if chunk.request == resumed.request]
            assert (chunk.start, chunk.tokens, chunk.samples) == (0, resumed.tokens, True)
            assert len(chunk.tokens) == resumed.prompt_len + 3
            assert all(decode.request != resumed.request for decode in record.plan.decodes)
            break
    assert resumed is not None
    drain(shared, {})


def test_b024_nobody_overtakes_a_head_that_does_not_fit() -> None:
    """The written policy (rule 8): the head waits for its six blocks, the one-block request behind it waits with it, and
    a running request's end lets both in, in order."""
    shared = scripted({})
    shared.submit([5] * 18, SamplingParams(max_tokens=3, ignore_eos=True))  # 5 blocks: three stay free
    shared.step()
    (head,) = shared.submit([6] * 22, SamplingParams(max_tokens=2, ignore_eos=True)).requests
    (small,) = shared.submit([7], SamplingParams(max_tokens=2, ignore_eos=True)).requests
    entered: list[int] = []
    while shared.has_work:
        record = shared.step()
        entered += [seat.request for seat in record.plan.seated]
        if head not in entered:
            assert small not in entered
            assert shared.ledger().waiting == (head, small)
    assert entered[:2] == [head, small]
    assert held(shared) == []


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("when", range(26))
def test_b028_abort_at_every_iteration(when: int, twice: bool) -> None:
    """The victim waits, prefills in parts, decodes, is preempted, has finished: one end, everything free, and the two
    beside it say to the byte what they say alone."""
    shared = engine(num_kv_blocks=8, max_num_batched_tokens=5)
    asks = [Ask(text(1, 6), greedy(14)), Ask(text(2, 11), seeded(9, 3)), Ask(text(3, 5), greedy(12))]
    ids = [shared.submit(ask.prompt, ask.params).requests[0] for ask in asks]
    victim, states = ids[1], set()
    sampled: dict[int, list[Any]] = {request: [] for request in ids}
    ends: dict[int, list[str]] = {request: [] for request in ids}
    iteration = 0
    while shared.has_work:
        states.add(shared.ledger().status.get(victim, "gone"))
        if iteration == when:
            for _ in range(1 + twice):
                shared.abort(victim)
            shared.abort(10**9)
        record = shared.step()
        assert faults(shared, record) == []
        for request, token in record.sampled:
            sampled[request].append(token)
        for end in (*record.aborted, *record.finished):
            ends[end.request].append(end.reason)
        iteration += 1
    shared.abort(victim)
    assert held(shared) == []
    assert all(len(reasons) == 1 for reasons in ends.values())
    for index in (0, 2):
        assert sampled[ids[index]] == solo(asks[index]).sampled
    got = sampled[victim]
    assert got == solo(asks[1]).sampled[: len(got)]
    assert ends[victim] == (["length"] if len(got) == 9 else ["abort"])


# That these checks can fail ----------------------------------------------------------------------------------------


def _keep_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = Scheduler._give_back

    def leaky(self: Scheduler, request: Any) -> int:
        row = give_back(self, request)
        if request.generated == 1:
            self.rows.take(request.id)
        return row

    monkeypatch.setattr(Scheduler, "_give_back", leaky)


def _keep_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, table: release(self, table[1:] if len(table) > 1 else table))


def _end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def doubled(self: BlockPool, table: list[int]) -> None:
        release(self, table)
        self._blank.extend(table[:1])

    monkeypatch.setattr(BlockPool, "release", doubled)


@pytest.mark.parametrize("break_it", [_keep_the_row, _keep_a_block, _end_twice])
def test_leaks_are_seen(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        test_b006_ending_in_the_first_step_gives_everything_back(
            "length", {"max_tokens": 1, "ignore_eos": True}, "length", False
        )


def test_overtaking_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def skips(self: Scheduler, budget: int, work: Any) -> Any:
        if len(self.waiting) > 1 and not self._fits(self.waiting[0], []):
            self.waiting.append(self.waiting.pop(0))
        return admit(self, budget, work)

    monkeypatch.setattr(Scheduler, "_admit", skips)
    with pytest.raises(AssertionError):
        test_b024_nobody_overtakes_a_head_that_does_not_fit()


def test_a_stall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission that never looks again once the pool was full."""
    fits = Scheduler._fits
    full: list[bool] = []

    def stubborn(self: Scheduler, request: Any, hits: list[int]) -> bool:
        if not fits(self, request, hits):
            full.append(True)
        return not full and fits(self, request, hits)

    monkeypatch.setattr(Scheduler, "_fits", stubborn)
    with pytest.raises(AssertionError):
        test_b015_b016_time_outs_and_retries_at_a_full_pool_never_stall()


def test_aborts_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "abort", lambda self, request_id: None)
    with pytest.raises(AssertionError):
        test_b015_b016_time_outs_and_retries_at_a_full_pool_never_stall()
