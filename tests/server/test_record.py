"""A recorded run is a workload: lockstep finds nothing in it, and its decisions are met again, iteration by iteration."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.digest import digest
from engine.trace import Abort, FailStep, Submit, Workload, load, prompt_tokens, save
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
    assert f"{len(workload.digests)} of them decided as they were recorded" in capsys.readouterr().out
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
