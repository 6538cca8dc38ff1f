"""A recorded run is a workload: lockstep finds nothing in it, and its decisions are met again, iteration by iteration."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.digest import digest
from engine.trace import Abort, FailStep, Submit, Workload, dumps, load, loads, prompt_tokens, save
from properties.__main__ import main
from properties.faults import armed
from properties.lockstep import run
from properties.recording import compare
from properties.rungs import RUNGS
from server.record import Recorder, Streams, shape_of
from server.settings import ServerSettings
from tests.server.stub import StubRunner, stub_engine
from tests.server.world import World


def common(a: Any, b: Any) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_streams_share_exactly_what_prompts_share() -> None:
    draw, streams = random.Random(1), Streams()
    prompts: list[list[int]] = []
    for _ in range(150):
        if prompts and draw.random() < 0.7:
            base = draw.choice(prompts)
            keep = draw.randint(0, len(base))
            prompts.append(base[:keep] + [draw.randrange(9) for _ in range(draw.randint(0 if keep else 1, 6))])
        else:
            prompts.append([draw.randrange(9) for _ in range(draw.randint(1, 8))])
    told = [prompt_tokens(streams.pieces(prompt)) for prompt in prompts]
    assert [len(tokens) for tokens in told] == [len(prompt) for prompt in prompts]
    for at, prompt in enumerate(prompts):
        assert [common(prompt, other) for other in prompts[:at]] == [common(told[at], other) for other in told[:at]]


async def record(seed: int, requests: int = 40, runner: StubRunner | None = None, **limits: Any) -> Workload:
    """A crowd with common prefixes, several choices, stops, refusals, clients that leave, and steps that fail."""
    draw = random.Random(seed)
    world = World(runner, **limits)
    recorder = world.engine.tap = Recorder(world.engine.limits, Path("unused"))
    shared = [draw.randrange(3, 90) for _ in range(12)]
    exchanges = []
    for number in range(requests):
        prompt = [*shared[: draw.randint(0, 12)], *(draw.randrange(3, 90) for _ in range(draw.randint(1, 12)))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randint(1, 12), "stream": draw.random() < 0.5}
        # With the cache on, two choices that happen to sample the same token can fill equal blocks, which a replay cannot know.
        body["n"] = 1 if world.engine.limits.prefix_cache else draw.choice([1, 1, 1, 2, 3])
        if draw.random() < 0.3:
            body |= {"stop_token_ids": [draw.randrange(3, 93) for _ in range(20)], "min_tokens": draw.randint(0, 2)}
        if draw.random() < 0.2:
            body["stop"] = ["a", "q", "1"]
        if draw.random() < 0.3:
            body["cache_salt"] = draw.choice(["one", "two"])
        if draw.random() < 0.3:
            body["priority"] = draw.randint(-1, 1)
        if number % 9 == 8:
            body["prompt"] = [5] * 47  # the door says no
        exchanges.append(world.post("/v1/completions", body))
        await asyncio.sleep(0.002)
        await world.step(draw.randint(0, 3))
        if draw.random() < 0.2:
            exchanges[draw.randrange(len(exchanges))].leave()
    await world.run(*exchanges)
    await world.step(3)
    assert world.nothing_held() or world.engine.limits.prefix_cache
    return recorder.workload()


@pytest.mark.parametrize("rung", ["rows", "tiny"])
def test_a_recording_replays_on_the_rungs_that_compute(rung: str) -> None:
    workload = asyncio.run(record(1, requests=15, num_blocks=14, prefix_cache=False))
    outcome = run(workload, make_rung=RUNGS[rung])
    assert outcome.findings == ()
    assert [digest(step.record) for step in outcome.steps if step.record is not None] == list(workload.digests)


def replayed(workload: Workload) -> list[str]:
    """Digests of the same workload on the ledger rung; lockstep must find nothing."""
    outcome = run(workload)
    assert outcome.findings == ()
    return [digest(step.record) for step in outcome.steps if step.record is not None]


def mixed(draw: random.Random, number: int, shared: list[int]) -> tuple[str, Any]:
    """One request of the mixed crowd. Prompts begin alike and end unlike: where a rung computes its own tokens, equal prompts
    would have equal answers, which the live engine's seeds keep apart; so several choices are kept shorter than a block."""
    marker = [3 + number // 80, 3 + number % 80]
    prompt = [*shared[: draw.randint(0, 12)], *marker, *(draw.randrange(3, 90) for _ in range(draw.randint(0, 9)))]
    body: dict[str, Any] = {
        "max_tokens": draw.randint(1, 12),
        "stream": number % 2 == 0,
        "priority": draw.randint(-1, 1),
    }
    if number % 5 == 0:
        body |= {"n": draw.randint(2, 3), "max_tokens": draw.randint(1, 4)}
        prompt = [*prompt, 7, 8, 9][: len(prompt) // 4 * 4 + 4] if len(prompt) % 4 else prompt
        prompt += [7] * (-len(prompt) % 4)
    if number % 3 == 0:
        body |= {"temperature": 0.8, "seed": number}
    if number % 7 == 1:
        body |= {"stop_token_ids": [draw.randrange(3, 93) for _ in range(20)], "min_tokens": draw.randint(0, 1)}
    if number % 7 == 2:
        body["stop"] = ["a", "q", "1"]
    if number % 7 == 3:
        body |= {"echo": True, "logprobs": 1} if number % 2 else {"prompt_logprobs": 0, "stream": False}
    if number % 11 == 4:
        body["cache_salt"] = draw.choice(["one", "two"])
    if number % 23 == 5:
        prompt = [5] * 47  # the door says no
    if number % 29 == 6:
        return "/v1/completions", {"prompt": prompt, "temperature": "hot"}
    if number % 13 == 7:
        body = {
            "sampling_params": {"max_new_tokens": draw.randint(1, 9)},
            "input_ids": prompt,
            "stream": body["stream"],
        }
        return "/generate", body
    return "/v1/completions", {"prompt": prompt, **body}


async def mixed_run(requests: int) -> tuple[Workload, World, Counter[int]]:
    """The same run every time: a submit is waited for, so that no thread's timing decides an order."""
    draw = random.Random(29)
    runner = StubRunner()
    world = World(runner, num_blocks=18, max_waiting=12)
    recorder = world.engine.tap = Recorder(world.engine.limits, Path("unused"))
    shared = [draw.randrange(3, 90) for _ in range(12)]
    exchanges: list[Any] = []
    for number in range(requests):
        path, body = mixed(draw, number, shared)
        opened, exchange = set(world.bridge._open), world.post(path, body)
        await world.until(lambda before=opened, one=exchange: bool(world.bridge._open - before) or one.task.done())
        exchanges.append(exchange)
        if number % 40 == 20:
            runner.fail_at.add(world.engine.scheduler.iteration + 1)
        await world.step(draw.randint(0, 4))
        if number % 6 == 1:
            exchanges[-draw.randint(1, min(3, len(exchanges)))].leave()
    await world.run(*exchanges)
    await world.step(3)
    return recorder.workload(), world, Counter(exchange.status for exchange in exchanges)


@pytest.fixture(scope="module")
def two_hundred() -> tuple[Workload, World, Counter[int]]:
    return asyncio.run(mixed_run(200))


def test_two_hundred_mixed_requests_hold_everything(
    two_hundred: tuple[Workload, World, Counter[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    workload, world, statuses = two_hundred
    submits = [event for event in workload.events if isinstance(event, Submit)]
    counters = world.engine.counters
    assert len(submits) > 170
    with capsys.disabled():
        print(
            f"\n{len(submits)} submits, statuses {dict(statuses)}, {counters.preemptions} preemptions, "
            f"{counters.prefix_hit_tokens} prefix hit tokens, {len(workload.digests)} iterations"
        )
    assert {200, 400} <= set(statuses)
    assert counters.preemptions > 0
    assert counters.prefix_hit_tokens > 50
    assert sum(isinstance(event, Abort) for event in workload.events) > 5
    assert any(isinstance(event, FailStep) for event in workload.events)
    assert sum(not event.takes_hits for event in submits) > 5
    assert sum(event.stop_at is not None for event in submits) > 5
    assert {event.priority for event in submits} == {-1, 0, 1}
    assert {"", "t1"} <= {event.salt for event in submits}
    assert any(first == second for first, second in itertools.pairwise(event.prompt for event in submits))  # choices
    assert load_again(workload) == workload


def load_again(workload: Workload) -> Workload:
    return loads(dumps(workload))


@pytest.mark.parametrize("rung", ["ledger", "rows", pytest.param("tiny", marks=pytest.mark.timeout(600))])
def test_two_hundred_mixed_requests_replay_with_every_digest(
    two_hundred: tuple[Workload, World, Counter[int]], rung: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = two_hundred[0]
    outcome = run(workload, make_rung=RUNGS[rung])
    assert outcome.findings == ()
    met = [digest(step.record) for step in outcome.steps if step.record is not None]
    assert met == list(workload.digests)
    with capsys.disabled():
        print(f"\n{rung}: {len(workload.events)} events, {len(met)} iterations, every digest met")


def test_a_fault_in_two_hundred_requests_is_found_and_shrunk(
    two_hundred: tuple[Workload, World, Counter[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, small = tmp_path / "run.json", tmp_path / "small.json"
    save(two_hundred[0], path)
    assert main(["replay", str(path), "--arm", "P01"]) == 1
    assert main(["shrink", str(path), "--arm", "P01", "--output", str(small)]) == 1
    assert len(load(small).events) < 10
    with capsys.disabled():
        print(f"\nP01: {len(two_hundred[0].events)} events shrunk to {len(load(small).events)}")


@pytest.mark.parametrize("seed", range(6))
def test_a_recording_replays_in_lockstep_with_the_same_decisions(seed: int) -> None:
    limits = {"num_blocks": 14 + seed, "persistent_batch": seed % 2 == 0, "prefix_cache": seed % 3 > 0}
    workload = asyncio.run(record(seed, **limits))
    assert replayed(workload) == list(workload.digests)
    assert len(workload.digests) > 30
    kinds = {type(event) for event in workload.events}
    assert {Submit, Abort} <= kinds
    submits = [event for event in workload.events if isinstance(event, Submit)]
    assert any(event.stop_at for event in submits)
    assert any(event.salt for event in submits)
    assert any(event.priority for event in submits)
    assert max(len(event.prompt) for event in submits) > 1


async def conversation(turns: int) -> Workload:
    """Each turn's prompt is the last one's, its answer, and something new; two people talk at once."""
    world = World(num_blocks=40, max_model_len=160, max_num_batched_tokens=24, captures=())
    recorder = world.engine.tap = Recorder(world.engine.limits, Path("unused"))
    prompts = [[11, 12, 13, 14, 15, 16, 17], [11, 12, 13, 14, 21, 22]]
    for turn in range(turns):
        asks = [{"input_ids": p, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}} for p in prompts]
        exchanges = [world.post("/generate", ask) for ask in asks]
        await world.submitted(2)
        await world.run(*exchanges)
        for prompt, exchange in zip(prompts, exchanges, strict=True):
            prompt += [*exchange.json()["output_ids"], 30 + turn, 31, 32]
    await world.step(2)
    assert world.engine.counters.prefix_hit_tokens > 40
    return recorder.workload()


def test_a_conversation_finds_its_own_answers_again() -> None:
    workload = asyncio.run(conversation(4))
    assert replayed(workload) == list(workload.digests)
    last = workload.events[-1]
    assert isinstance(last, Submit)
    assert len([stream for stream, _ in last.prompt if stream.startswith("answer/")]) == 3


class FailsSometimes(StubRunner):
    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def execute(self, plan: Any) -> Any:
        result = super().execute(plan)
        self._count += plan.forwards
        if plan.forwards and self._count % 11 == 7:
            raise RuntimeError("now and then")
        return result


def test_failing_steps_are_recorded_as_such() -> None:
    workload = asyncio.run(record(3, runner=FailsSometimes()))
    assert any(isinstance(event, FailStep) for event in workload.events)
    assert replayed(workload) == list(workload.digests)


def test_other_decisions_have_other_digests() -> None:
    workload = asyncio.run(record(4, num_blocks=13, prefix_cache=False))
    with armed("P01"):
        outcome = run(workload, checks=frozenset())
    found = compare(workload, outcome)
    assert found is not None
    assert found.check == "recording"
    assert compare(workload, run(workload)) is None


def test_the_replay_command_says_whether_decisions_were_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = asyncio.run(record(4, num_blocks=13, prefix_cache=False))
    path = tmp_path / "run.json"
    save(workload, path)
    assert main(["replay", str(path)]) == 0
    count = len(workload.digests)
    assert f"all {count} recorded iterations were decided as when they were recorded" in capsys.readouterr().out
    assert main(["replay", str(path), "--until", "2"]) == 0
    assert f"the first 2 of {count} recorded iterations were decided as when" in capsys.readouterr().out
    save(replace(workload, digests=(*workload.digests[:-1], "0" * 12)), path)
    assert main(["replay", str(path)]) == 1
    assert f"recording at iteration {len(workload.digests)}" in capsys.readouterr().out


def test_a_recording_with_a_fault_shrinks_to_a_few_events(tmp_path: Path) -> None:
    workload = asyncio.run(record(4, num_blocks=13, prefix_cache=False))
    path, small = tmp_path / "run.json", tmp_path / "small.json"
    save(workload, path)
    assert main(["replay", str(path), "--arm", "P01"]) == 1
    assert main(["shrink", str(path), "--arm", "P01", "--output", str(small)]) == 1
    assert len(load(small).events) < 10


def test_the_file_holds_no_token_and_no_salt(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    async def serve() -> None:
        world = World(settings=ServerSettings(record=path))
        async with world.app.router.lifespan_context(world.app):
            pass  # the app's own thread; the recording is written when it ends

    asyncio.run(serve())
    assert load(path).events == ()

    engine = stub_engine()
    recorder = engine.tap = Recorder(engine.limits, path)
    from engine.request import SamplingParams

    engine.submit([71, 72, 73], SamplingParams(max_tokens=3, ignore_eos=True), salt="a secret")
    while engine.has_work:
        engine.step()
    recorder.write()
    text = path.read_text()
    assert "secret" not in text
    assert "71" not in text.split('"digests"')[0]
    assert load(path) == recorder.workload()
    assert load(path).shape == shape_of(engine.limits)


def test_a_full_recording_ends_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    engine = stub_engine()
    recorder = engine.tap = Recorder(engine.limits, Path("unused"), max_events=2)
    from engine.request import SamplingParams

    for _ in range(4):
        engine.submit([7], SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    assert len(recorder.workload().events) == 2
    assert recorder.workload().digests == ()
    out = capsys.readouterr()
    assert (out.out + out.err).count("the recording is full") == 1


def test_captures_that_are_no_product_cannot_be_recorded() -> None:
    limits = attrs.evolve(stub_engine().limits, captures=((1, 12), (2, 6)))
    with pytest.raises(ValueError, match="no product"):
        shape_of(limits)
