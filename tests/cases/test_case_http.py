"""Cases that need a client: preempted streams, crowds in which nobody leaves, empty prompts, a character cut in half.

The scripted client and engine thread of ``tests/server/world.py``: no sockets, no clock. Cases B025, B027, B034, B100,
B103, B108 and B144; the other cases of clients that leave are in ``tests/server``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from tokenizers.processors import TemplateProcessing

from engine.control.scheduler import Scheduler
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_backend, synthetic_model
from engine.loading.tokenizer import Tokenizer
from server.app import create_app
from tests.server.stub import StubRunner, stub_engine
from tests.server.world import SPECS, Exchange, World

COMPLETIONS = "/v1/completions"
EMOJI = "é🎉"
BOS = "<|im_start|>"  # id 1; the chat template prints it at the start of each turn


def ids(words: str) -> list[int]:
    tokenizer = synthetic_model().tokenizer
    assert tokenizer is not None
    return tokenizer.encode(words, add_special_tokens=False)


def streamed(exchange: Exchange) -> tuple[str, str, dict[str, int]]:
    """Joined text, the one finish reason and the usage of a streamed completion."""
    events = exchange.events()
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return "".join(choice["text"] for choice in choices), reasons[-1], events[-2]["usage"]


def whole(exchange: Exchange) -> tuple[str, str, dict[str, int]]:
    answer = exchange.json()
    (choice,) = answer["choices"]
    return choice["text"], choice["finish_reason"], answer["usage"]


async def preempted_streams(spec: str) -> None:
    bodies = [
        {
            "prompt": [11 + k] * (5 + 2 * k),
            "max_tokens": 14,
            "ignore_eos": True,
            "seed": k,
            "temperature": 0.5 * (k % 2),
        }
        for k in range(4)
    ]
    crowd = World(num_blocks=9)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    exchanges = [crowd.post(COMPLETIONS, body | options, spec) for body in bodies]
    await crowd.submitted(4)
    await crowd.run(*exchanges)
    assert crowd.engine.counters.preemptions > 0
    for body, exchange in zip(bodies, exchanges, strict=True):
        alone = World()
        plain = alone.post(COMPLETIONS, body, spec)
        await alone.run(plain)
        assert alone.engine.counters.preemptions == 0
        assert streamed(exchange) == whole(plain)
        assert whole(plain)[1:] == ("length", whole(plain)[2])
        assert whole(plain)[2]["completion_tokens"] == 14
    await crowd.step()
    assert crowd.nothing_held()


@pytest.mark.parametrize("spec", SPECS)
def test_b027_a_preempted_stream_says_what_the_plain_answer_says(spec: str) -> None:
    asyncio.run(preempted_streams(spec))


def test_b027_a_token_told_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preemption that keeps its last token as if it had not been told (B019's first fault, seen from the client)."""
    preempt = Scheduler._preempt

    def forgetful(self: Scheduler, victim: Any) -> int:
        row = preempt(self, victim)
        if victim.generated:
            victim.tokens.pop()
        return row

    monkeypatch.setattr(Scheduler, "_preempt", forgetful)
    with pytest.raises(AssertionError):
        asyncio.run(preempted_streams(SPECS[0]))


def test_b025_a_streaming_client_hears_on_during_a_long_prefill() -> None:
    async def main() -> None:
        world = World(max_num_batched_tokens=5, max_num_seqs=2)
        runner = world.post(COMPLETIONS, {"prompt": [11] * 3, "max_tokens": 20, "ignore_eos": True, "stream": True})
        await world.submitted()
        await world.step(2)
        long = world.post(COMPLETIONS, {"prompt": [12] * 33, "max_tokens": 1, "ignore_eos": True, "stream": True})
        await world.submitted(2)
        for _ in range(8):
            before = runner.sends
            await world.step()
            assert world.engine.scheduler.requests[1].generated == 0
            assert runner.sends > before
        await world.run(runner, long)

    asyncio.run(main())


@pytest.mark.parametrize("spec", SPECS)
def test_b034_three_hundred_streams_and_nobody_is_cut_off(spec: str) -> None:
    """No client leaves, so nothing is aborted and every stream says all of its tokens."""

    async def main() -> None:
        world = World(max_waiting=512)
        body = {"max_tokens": 4, "ignore_eos": True, "temperature": 0, "stream": True}
        crowd = [world.post(COMPLETIONS, body | {"prompt": [11 + k % 50] * (1 + k % 9)}, spec) for k in range(300)]
        await world.submitted(300)
        async with asyncio.timeout(60):
            while not all(exchange.task.done() for exchange in crowd):
                await world.step()
        assert {exchange.status for exchange in crowd} == {200}
        assert all(exchange.events()[-1] == "[DONE]" for exchange in crowd)
        assert world.engine.counters.finished == {"length": 300}
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


def test_b034_one_that_leaves_is_counted() -> None:
    """The count above can be other than zero."""

    async def main() -> None:
        world = World()
        gone, stays = (
            world.post(COMPLETIONS, {"prompt": [11], "max_tokens": 9, "ignore_eos": True, "stream": True})
            for _ in range(2)
        )
        await world.submitted(2)
        await world.step(2)
        gone.leave()
        await world.run(stays)
        assert world.engine.counters.finished == {"abort": 1, "length": 1}

    asyncio.run(main())


def with_bos() -> LoadedModel:
    """The synthetic model with a tokenizer that begins every text with a BOS."""
    backend = synthetic_backend(512)
    backend.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tokenizer = Tokenizer(backend, bos_id=1, eos_ids=frozenset({2}), vocab_size=512)
    assert tokenizer.add_bos
    return attrs.evolve(synthetic_model(), tokenizer=tokenizer)


class BosWorld(World):
    """A world whose model's tokenizer adds a BOS."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = stub_engine(self.runner, with_bos())
        self.app = create_app(self.engine)
        self.bridge = self.app.state.context.bridge
        self.bridge.bind(asyncio.get_running_loop())
        self.bridge.adopt()


@pytest.mark.parametrize(("bos", "prompt", "status"), [
    (False, "", 400), (False, [""], 400), (False, [], 400), (False, [[]], 400), (False, "   ", 200),
    (True, "", 200), (True, [""], 200), (True, [], 400), (True, [[]], 400), (True, "   ", 200),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_b100_prompts_of_nothing(bos: bool, prompt: Any, status: int, stream: bool) -> None:
    """With a BOS the empty text is one token and is served; without one it is refused, as JSON and before any event."""

    async def main() -> None:
        world = BosWorld() if bos else World()
        control = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        asked = world.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "stream": stream})
        await world.run(asked)
        assert asked.status == status
        if status == 400:
            assert asked.headers["content-type"] == "application/json"
            assert asked.json()["error"]["type"] == "invalid_request_error"
        again = world.post(COMPLETIONS, control)
        await world.run(again)
        assert again.status == 200
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


def test_b144_a_chat_begins_as_its_template_says_and_a_completion_as_its_tokenizer_says() -> None:
    """The template prints the BOS, and the tokenizer would add another: in a chat it stands once, as in a completion."""

    async def main() -> None:
        world = BosWorld()
        chat = world.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})
        await world.run(chat)
        plain = world.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1})
        await world.run(plain)
        first, second = (seat.tokens for plan in world.runner.plans for seat in plan.seated)
        turns = f"{BOS}user\nhello<|im_end|>\n{BOS}assistant\n"
        assert list(first) == ids(turns)
        assert first[:2] != (1, 1)
        assert list(second) == [1, *ids("hello")]

    asyncio.run(main())


@pytest.mark.parametrize("spec", SPECS)
def test_b103_a_prompt_one_token_too_long_is_refused_before_the_stream(spec: str) -> None:
    async def main() -> None:
        world = World()
        asked = world.post(COMPLETIONS, {"prompt": [11] * 48, "max_tokens": 1, "stream": True}, spec)
        await world.run(asked)
        assert asked.status == 400
        assert not asked.data.startswith(b"data:")
        assert asked.json()["error"]["message"]
        assert world.nothing_held()
        served = world.post(COMPLETIONS, {"prompt": [11] * 47, "max_tokens": 1, "stream": True}, spec)
        await world.run(served)
        assert served.status == 200
        await world.step()
        assert world.nothing_held()

    asyncio.run(main())


def says(words: str) -> StubRunner:
    def script(prompt: tuple[int, ...]) -> Sequence[int]:
        return ids(words)

    return StubRunner(script)


@pytest.mark.parametrize("stop", [None, "zz", "🎉"], ids=["no stop", "another stop", "stop on it"])
def test_b108_max_tokens_inside_a_character(stop: str | None) -> None:
    """Cut after every single token of "é🎉": 200, the unfinished character as one U+FFFD, streamed and plain alike."""
    tokens = ids(EMOJI)
    assert len(tokens) == 6

    async def main() -> None:
        for limit in range(1, 7):
            answers = []
            for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
                world = World(says(EMOJI))
                body: dict[str, Any] = {"prompt": "say", "max_tokens": limit, "ignore_eos": True, "temperature": 0}
                asked = world.post(COMPLETIONS, body | options | ({"stop": stop} if stop else {}))
                await world.run(asked)
                assert asked.status == 200
                answers.append(streamed(asked) if options else whole(asked))
            assert answers[0] == answers[1]
            expected = b"".join("é🎉".encode()[at : at + 1] for at in range(limit)).decode("utf-8", "replace")
            ended = stop == "🎉" and limit == 6
            assert answers[0][:2] == (("é", "stop") if ended else (expected, "length"))
            assert answers[0][2]["completion_tokens"] == limit

    asyncio.run(main())
