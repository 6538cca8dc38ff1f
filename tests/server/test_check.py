"""``--check``: a live engine that breaks an invariant is told of, counted, or ended; one that does not costs a number."""

from __future__ import annotations

import asyncio
import re

import pytest
from fastapi.testclient import TestClient

from engine.config import ConfigError
from engine.request import SamplingParams
from properties.faults import armed
from server.app import create_app
from server.check import Checker, InvariantViolated
from server.options import Options
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.world import World

ASK = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
LEAK = "A05"  # the first block of the third table that is given back is lost


def metric(world: World, name: str) -> float:
    text = world.app.state.context.metrics.exposition().decode()
    found = re.search(rf"^lockstep:{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def run_four(check: str, interval: int = 1, fault: str | None = None) -> World:
    with armed(fault):
        world = World(settings=ServerSettings(check=check, check_interval=interval))
        exchanges = [world.post("/v1/completions", ASK) for _ in range(4)]
        await world.submitted(4)
        await world.run(*exchanges)
        await world.step(2)
    assert [exchange.status for exchange in exchanges] == [200] * 4
    return world


def test_off_looks_at_nothing() -> None:
    world = asyncio.run(run_four("off", fault=LEAK))
    assert metric(world, "invariant_checks") == metric(world, "invariant_violations") == 0


@pytest.mark.parametrize("interval", [1, 3])
def test_log_counts_what_it_looked_at(interval: int) -> None:
    world = asyncio.run(run_four("log", interval))
    iterations = world.engine.counters.iterations
    assert metric(world, "invariant_checks") == len(range(0, iterations, interval)) > 0  # the first is number 0
    assert metric(world, "invariant_violations") == 0
    assert metric(world, "invariant_check_seconds") > 0


def test_log_tells_of_a_leak_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    world = asyncio.run(run_four("log", fault=LEAK))
    assert metric(world, "invariant_violations") > 0
    out = capsys.readouterr()
    assert "but no request holds it" in out.out + out.err


def test_raise_ends_the_turn_with_the_sentence() -> None:
    with pytest.raises(InvariantViolated, match=r"after iteration \d+: block \d+ is allocated but no request holds it"):
        asyncio.run(run_four("raise", fault=LEAK))


def test_raise_stops_the_server_and_tells_everybody() -> None:
    engine = stub_engine()
    with TestClient(create_app(engine, ServerSettings(check="raise"))) as client:
        assert client.post("/v1/completions", json=ASK).status_code == 200
        engine.scheduler.pool.references[3] += 1  # a block that nobody holds
        failed = client.post("/v1/completions", json=ASK)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_dead")
        assert client.get("/health").status_code == 503
        bridge = client.app.state.context.bridge  # type: ignore[attr-defined]
        assert isinstance(bridge.failure, InvariantViolated)


def test_no_token_gets_into_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    engine = stub_engine()
    engine.submit([81, 82, 83, 84, 85, 86, 87, 88], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    engine.scheduler.running[0].tokens[1] = 77  # not what its published block says
    Checker("log").after(engine, 0)
    out = capsys.readouterr()
    told = (out.out + out.err).partition("[error")[2]  # behind the time, which may hold any digits
    assert "is published with tokens (...)" in told
    assert "82" not in told


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="check is 'loud', but must be one of off, log, raise"):
        ServerSettings(check="loud")
    with pytest.raises(ConfigError, match="check_interval is 0"):
        ServerSettings(check_interval=0)
    assert Options(check="log", check_interval=7).settings().check_interval == 7
