"""What is drawn last is drawn by both generators, holds, and matters: mistakes that nothing else would show are seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings

from engine.control import prefix, scheduler
from engine.control.door import check_door
from engine.control.limits import Limits
from engine.control.request import Refusal, Request, Submission
from engine.engine import Engine, Rejected
from engine.llm import LLM
from engine.request import InvalidRequest, SamplingParams
from engine.trace import BELOW, INT32, Submit, Workload, dumps, loads
from properties import generate
from properties.generate import RandomSource
from properties.lockstep import run
from properties.rung_ledger import StubRunner
from properties.strategies import workloads
from server.app import create_app
from server.record import Recorder
from server.settings import ServerSettings
from tests.server.stub import stub_engine

Kind = Callable[[Submit], bool]
KINDS: dict[str, Kind] = {
    "hits": lambda event: not event.takes_hits,
    "salts": lambda event: event.salt not in ("", "s1", "s2"),
    "priorities": lambda event: abs(event.priority) > 1,
    "ids": lambda event: any(stream == BELOW for stream, _ in event.prompt),
}
GATE = settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
LIMITS = Limits(num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, vocab_size=251)


def has(workload: Workload, kind: str) -> bool:
    return any(isinstance(event, Submit) and KINDS[kind](event) for event in workload.events)


@cache
def drawn(source: str) -> tuple[Workload, ...]:
    """Some workloads of the plain hunter, as many of the gate's strategy, and those of the hunter without its last step."""
    if source == "gate":
        seen: list[Workload] = []

        @GATE
        @given(w=workloads())
        def see(w: Workload) -> None:
            seen.append(w)

        see()
        return tuple(seen)
    return tuple(generate.workload(RandomSource(f"rare {number}")) for number in range(400))


@pytest.mark.parametrize("source", ["plain", "gate"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_is_drawn_and_holds(source: str, kind: str) -> None:
    rare = [workload for workload in drawn(source) if has(workload, kind)]
    assert len(rare) >= (2 if source == "gate" else 5)
    assert [run(workload).first for workload in rare] == [None] * len(rare)


def test_most_workloads_have_nothing_of_it() -> None:
    assert sum(not any(has(w, kind) for kind in KINDS) for w in drawn("plain")) > len(drawn("plain")) / 2


# Mistakes that only these draws show ------------------------------------------------------------------------------

honest_root, honest_eligible = prefix.root, scheduler.Scheduler._eligible


def _hits_for_all(self: scheduler.Scheduler, request: Request) -> object:
    request.takes_hits = True
    return honest_eligible(self, request)


def _door_without_a_floor(limits: Limits, submission: Submission, n: int, waiting: int) -> int:
    positive = tuple(abs(token) for token in submission.prompt)
    return check_door(limits, Submission(positive, submission.max_tokens), n, waiting)


def _clamped(self: Request) -> tuple[int, int]:
    return max(-1, min(1, self.priority)), self.id


def _of_salts(change: Callable[[str], str]) -> Callable[[str | None], bytes]:
    return lambda salt: honest_root(None if salt is None else change(salt))


MISTAKES: dict[str, tuple[str, object, str, object]] = {
    "hits are given to all": ("hits", scheduler.Scheduler, "_eligible", _hits_for_all),
    "an id below 0 is let in": ("ids", scheduler, "check_door", _door_without_a_floor),
    "priorities are three": ("priorities", Request, "order", property(_clamped)),
    "salts count up to their 64th letter": ("salts", scheduler, "root", _of_salts(lambda salt: salt[:64])),
    "salts have no case": ("salts", scheduler, "root", _of_salts(str.lower)),
    "salts are normalised": ("salts", scheduler, "root", _of_salts(lambda salt: normalize("NFC", salt))),
    "salts are stripped": ("salts", scheduler, "root", _of_salts(lambda salt: salt.strip())),
}


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_mistake_there_is_seen_by_the_plain_hunter(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    assert any(run(workload).first is not None for workload in _many(kind))


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_without_the_last_draw_nobody_would_see_it(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(generate, "season", lambda source, workload: workload)
    plain = [generate.workload(RandomSource(f"rare {number}")) for number in range(40)]
    monkeypatch.setattr(owner, name, wrong)
    assert all(run(workload).first is None for workload in plain)


def _many(kind: str) -> Iterator[Workload]:
    for number in range(4000):
        workload = generate.workload(RandomSource(f"rare {number}"))
        if has(workload, kind):
            yield workload


# Ids below 0, at every door -----------------------------------------------------------------------------------------


def _llm() -> LLM:
    return LLM(engine=Engine(LIMITS, StubRunner()))


DOORS: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "scheduler": (Refusal, lambda: Engine(LIMITS, StubRunner()).scheduler.submit(Submission((3, -1), 1), 1)),
    "engine": (Rejected, lambda: Engine(LIMITS, StubRunner()).submit((-1,), SamplingParams(max_tokens=1))),
    "engine check": (Rejected, lambda: Engine(LIMITS, StubRunner()).check((3, -1), SamplingParams(max_tokens=1))),
    "library": (InvalidRequest, lambda: _llm().generate([[3, 4], [3, -1]], SamplingParams(max_tokens=1))),
    "stop ids": (InvalidRequest, lambda: SamplingParams(stop_token_ids=(-1,))),
    "bias": (InvalidRequest, lambda: SamplingParams(logit_bias={-1: 1.0})),
}


@pytest.mark.parametrize("door", sorted(DOORS))
def test_an_id_below_0_is_refused_in_the_house(door: str) -> None:
    refusal, call = DOORS[door]
    with pytest.raises(refusal, match=r"-1|integer from 0"):
        call()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [3, -1]}),
        ("/v1/completions", {"prompt": [[3], [-1]]}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1]}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"-1": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [-1]}),
        ("/generate", {"input_ids": [3, -1]}),
        ("/generate", {"input_ids": [[3], [-1]]}),
        ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [-1]}}),
        ("/detokenize", {"tokens": [3, -1]}),
    ],
)
def test_an_id_below_0_is_refused_over_http(client: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(stub_engine(), ServerSettings(log_level="error"))) as client:
        for _ in range(6000):
            if client.get("/ready").status_code == 200:
                break
            time.sleep(0.01)
        yield client


# A recording says it again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", INT32)
def test_whatever_priority_and_length_a_body_may_have_can_be_recorded(priority: int, tmp_path: Path) -> None:
    """The recorder stands behind the door on the engine's thread: what it cannot write down would end a request halfway."""
    recorder = Recorder(LIMITS, tmp_path / "recorded.json")
    recorder.submitted(Submission((1, 2), INT32[1], priority), 1, None)
    recorder.submitted(Submission((1, 2), 4, priority), 1, (0,))
    assert loads(dumps(recorder.workload())).events == recorder.workload().events
    assert run(recorder.workload()).first is None
