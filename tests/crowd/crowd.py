"""A crowd of HTTP clients and what each is told: real sockets, a uvicorn of its own for each server.

An ``Ask`` is one body for ``/generate``; ``Said`` is what comes back for one choice, reduced to what may not depend on
anybody else: token ids, the digest of the raw logits behind every token, text, reason and seed. ``differences`` is the
comparison that all tests here share.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import httpx2
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from engine.build import settle
from engine.compute.runner import ModelRunner
from engine.compute.weights import Weights
from engine.config import EngineConfig
from engine.control.plan import Plan, Sampled
from engine.engine import Engine
from engine.loading.model import LoadedModel
from server.app import create_app
from server.bridge import Bridge
from server.settings import ServerSettings
from server.sockets import bind

PATIENCE = 100.0  # seconds that a client waits for a byte; long, since a test machine may be busy


@attrs.frozen
class Ask:
    input_ids: tuple[int, ...]
    sampling: dict[str, Any]
    stream: bool = False

    @property
    def greedy(self) -> bool:
        return bool(self.sampling["temperature"] == 0)

    def body(self, stream: bool, salt: str | None = None) -> dict[str, Any]:
        return {
            "input_ids": list(self.input_ids),
            "sampling_params": self.sampling,
            "stream": stream,
            "return_logits_digest": True,
            "cache_salt": salt,
        }


@attrs.frozen
class Said:
    tokens: tuple[int, ...]
    digests: tuple[str, ...]
    text: str
    reason: str
    matched: int | str | None
    seed: int | None  # None when greedy: it is drawn, and it changes nothing
    facts: dict[str, Any] = attrs.field(eq=False, repr=False)


Answer = tuple[Said, ...]  # one for each choice


def crowd(
    count: int, *, prompts: tuple[int, int], tokens: tuple[int, int], ids: tuple[int, int], n: int = 2
) -> list[Ask]:
    """``count`` requests, half of them greedy, every sampling parameter in some of them. ``prompts``, ``tokens``: shortest
    and longest prompt and answer; ``ids``: prompts are drawn from this range; ``n``: choices of those that want several.

    A third of the prompts share their beginning with another one.
    """
    draw = random.Random(20)
    common = [draw.randrange(*ids) for _ in range(prompts[1])]
    return [_ask(draw, index, common, prompts, tokens, ids, n) for index in range(count)]


_FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.02}, {"top_p": 0.9, "top_k": 50})


def _ask(
    draw: random.Random,
    index: int,
    common: list[int],
    prompts: tuple[int, int],
    tokens: tuple[int, int],
    ids: tuple[int, int],
    n: int,
) -> Ask:
    prompt = [draw.randrange(*ids) for _ in range(draw.randint(*prompts))]
    if index % 3 == 0:
        keep = len(prompt) * 2 // 3
        prompt[:keep] = common[:keep]
    sampling: dict[str, Any] = {"max_new_tokens": draw.randint(*tokens), "temperature": 0}
    if index % 2:
        sampling |= {"temperature": draw.choice([0.6, 1.0, 1.4]), "seed": draw.randrange(-(2**63), 2**63)}
        sampling |= _FILTERS[index // 2 % len(_FILTERS)]
    if index % 5 == 1:
        sampling |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3}
    if index % 5 == 3:
        sampling["logit_bias"] = {str(draw.randrange(*ids)): draw.choice([-100, -3.5, 4]) for _ in range(8)}
    if index % 4 >= 2:
        least = min(3, sampling["max_new_tokens"])
        sampling |= {"stop_token_ids": [draw.randrange(*ids) for _ in range(60)], "min_new_tokens": least}
    if index % 7 in (2, 3):
        sampling |= {"stop": ["e", "th", " in"], "no_stop_trim": index % 2 == 0}
    if index % 4 == 1:
        sampling["ignore_eos"] = True
    if index % 8 == 3:
        sampling["n"] = n
    return Ask(tuple(prompt), sampling, stream=index % 4 < 2)


# Server --------------------------------------------------------------------------------------------------------------


def make_engine(model: LoadedModel, weights: Weights, **settings: Any) -> Engine:
    """As ``engine.build.assemble``, around weights that exist already."""
    config = EngineConfig(device="cpu", **settings)
    limits = settle(config, model, "cpu", weights.dtype)
    runner = ModelRunner(model, limits, weights=weights)
    runner.warm()
    return Engine(limits, runner, eos_token_ids=model.eos_token_ids, model=model)


@attrs.frozen
class Served:
    """A server on a real port, and its engine, for reading only."""

    url: str
    engine: Engine
    bridge: Bridge

    @contextmanager
    def held_until(self, requests: int) -> Iterator[None]:
        """The first step waits until ``requests`` HTTP requests are open, so that a busy machine cannot thin out the crowd."""
        runner: Any = self.engine.runner
        real = runner.execute

        def execute(plan: Plan) -> Sequence[Sampled]:
            deadline = time.monotonic() + PATIENCE
            while self.bridge.num_open < requests and time.monotonic() < deadline:
                time.sleep(0.001)
            runner.execute = real
            result: Sequence[Sampled] = real(plan)
            return result

        runner.execute = execute
        yield
        assert runner.execute is real

    def metrics(self) -> dict[str, float]:
        """Sums over labels by name, without the prefix; blocks and rows as ``blocks_used`` and so on."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx2.get(f"{self.url}/metrics", timeout=PATIENCE).text):
            for sample in family.samples:
                name = sample.name.split(":", 1)[1]
                name += f"_{state}" if (state := sample.labels.get("state")) else ""
                sums[name] = sums.get(name, 0.0) + sample.value
        return sums

    def idle_metrics(self) -> dict[str, float]:
        """Metrics once nobody is served. Fails unless every block and row comes back."""
        deadline = time.monotonic() + 10
        while (seen := self.metrics())["num_requests_running"] + seen["num_requests_waiting"]:
            assert time.monotonic() < deadline, seen
            time.sleep(0.005)
        limits = self.engine.limits
        assert (seen["blocks_used"], seen["blocks_free"]) == (0, limits.num_blocks)
        assert limits.prefix_cache or seen["cached_blocks"] == seen["prefix_cache_hits_total"] == 0
        assert (seen["rows_used"], seen["rows_free"]) == (0, limits.max_num_seqs)
        assert seen["failed_steps_total"] == 0
        assert not self.engine.has_work
        assert self.engine.audit() == []
        return seen


@contextmanager
def serving(engine: Engine) -> Iterator[Served]:
    app = create_app(engine, ServerSettings(log_level="error"))
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    try:
        bridge = app.state.context.bridge
        deadline = time.monotonic() + 30
        while not (server.started and bridge.refusal() is None):
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, bridge)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


# Clients -------------------------------------------------------------------------------------------------------------


def ask(url: str, what: Ask, stream: bool, salt: str | None = None) -> Answer:
    """One client with a connection of its own."""
    with (
        httpx2.Client(timeout=PATIENCE, trust_env=False, verify=False) as client,
        client.stream("POST", f"{url}/generate", json=what.body(stream, salt)) as response,
    ):
        if response.status_code != 200 or not stream:
            response.read()
            assert response.status_code == 200, response.text
            whole = response.json()
            return tuple(_said(one, what) for one in (whole if isinstance(whole, list) else [whole]))
        return _read_stream(response, what)


def _read_stream(response: httpx2.Response, what: Ask) -> Answer:
    """Checks on the way that what is streamed only grows."""
    last: dict[int, dict[str, Any]] = {}
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        event = json.loads(line)
        assert "error" not in event, event
        before = last.get(event.get("index", 0), {"text": "", "output_ids": []})
        assert event["text"].startswith(before["text"])
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[event.get("index", 0)] = event
    return tuple(_said(last[index], what) for index in sorted(last))


def _said(one: dict[str, Any], what: Ask) -> Said:
    meta = one["meta_info"]
    assert len(meta["logits_digests"]) == len(one["output_ids"]) == meta["completion_tokens"]
    return Said(
        tokens=tuple(one["output_ids"]),
        digests=tuple(meta["logits_digests"]),
        text=one["text"],
        reason=meta["finish_reason"]["type"],
        matched=meta["finish_reason"].get("matched"),
        seed=None if what.greedy else meta["seed"],
        facts=meta,
    )


def alone(url: str, asks: Sequence[Ask], salt: str | None = None) -> list[Answer]:
    """One after the other, not streamed."""
    return [ask(url, one, False, salt) for one in asks]


def together(served: Served, asks: Sequence[Ask], order: Sequence[int]) -> list[Answer]:
    """All at once: a thread and a connection for each, released in ``order`` a millisecond apart, and no answer begins
    before all have asked. Answers by index."""
    answers: dict[int, Answer | BaseException] = {}
    gate = threading.Barrier(len(asks), timeout=PATIENCE)

    def client(place: int, index: int) -> None:
        try:
            gate.wait()
            time.sleep(place * 0.001)
            answers[index] = ask(served.url, asks[index], asks[index].stream)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the test's own thread
            answers[index] = error

    threads = [threading.Thread(target=client, args=pair) for pair in enumerate(order)]
    with served.held_until(len(asks)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results: list[Answer] = []
    for index in range(len(asks)):
        answer = answers[index]
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results


def differences(expected: Sequence[Answer], got: Sequence[Answer]) -> list[str]:
    """Every choice that was told something else: where its tokens and its logits first differ."""
    assert len(expected) == len(got)
    wrong = []
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        assert len(want) == len(have)
        for choice, (one, other) in enumerate(zip(want, have, strict=True)):
            if one != other:
                at = [first_difference(one.tokens, other.tokens), first_difference(one.digests, other.digests)]
                wrong.append(f"request {index}, choice {choice}: token {at[0]}, logits {at[1]}: {one} but {other}")
    return wrong


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first index at which the two differ, None when they are equal."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
