"""The laws hold for the engine, and each of them sees a mistake that only a law of its kind can see.

The second half is the test of the tester: while a mistake is armed, its law must be broken, and ``restart``, which repeats the
run in a new engine, must hold: so it is the law's change that shows the mistake, and not chance.
"""

from __future__ import annotations

import json
from typing import NoReturn

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.control.scheduler import Scheduler
from engine.engine import Engine
from properties import __main__ as command_line
from properties.law_engines import ModelEngines, engines_of
from properties.law_faults import LAW_FAULTS, armed_for_laws
from properties.law_matrix import requests
from properties.law_play import DEFAULT, TINY, Ask, draw_asks, play
from properties.laws import LAWS, Report, base_config, check_laws

pytestmark = pytest.mark.timeout(900)  # seconds of work on an idle core, minutes on a busy one
IDS = (3, 500)
LISTS = [draw_asks(seed, ids=IDS) for seed in range(3)]


@pytest.fixture(scope="module")
def engines() -> ModelEngines:
    """On the compute path that users get: native kernels where there is a compiler."""
    return engines_of(TINY)


@pytest.fixture(scope="module")
def on_torch() -> ModelEngines:
    return engines_of(TINY, "torch")


def assert_holds(report: Report) -> None:
    assert report.findings == ()
    assert report.missed == ()


@pytest.mark.parametrize(("compute", "lists"), [("engines", LISTS), ("on_torch", LISTS[:2])], ids=["auto", "torch"])
def test_every_law_holds_and_took_place(compute: str, lists: list[list[Ask]], request: pytest.FixtureRequest) -> None:
    report = check_laws(request.getfixturevalue(compute), lists)
    assert_holds(report)
    assert [row.law for row in report.rows] == list(LAWS)
    for row in report.rows:
        assert row.tokens > 50, row
        assert all(count >= 4 for count in row.occurred.values()), row


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(100, 2**32), count=st.integers(1, 7), law=st.sampled_from(sorted(LAWS)))
def test_any_list_under_any_law(seed: int, count: int, law: str) -> None:
    """Whether the change took place is not asked of one small list."""
    assert check_laws(_shared(), [draw_asks(seed, ids=IDS, count=count)], only=[law]).findings == ()


_ENGINES: list[ModelEngines] = []


def _shared() -> ModelEngines:
    if not _ENGINES:
        _ENGINES.append(engines_of(TINY))
    return _ENGINES[0]


def test_without_the_prefix_cache(engines: ModelEngines) -> None:
    """The same laws around a base run in which everything is computed; those about hits have nothing to say."""
    hitless = {"prefix cache", "warm", "mixture"}
    names = [name for name in LAWS if name not in hitless]
    assert_holds(check_laws(engines, LISTS[:1], only=names, settings={"enable_prefix_caching": False}))


def test_the_requests_are_mixed(engines: ModelEngines) -> None:
    """Floors: greedy, sampled, several choices, every way to end, and logits digests behind all tokens."""
    asks = [ask for asks in LISTS for ask in asks]
    played = [play(engines(base_config(asks)), asks) for asks in LISTS]
    told = [one for run in played for choices in run.told for one in choices]
    assert sum(ask.params.greedy for ask in asks) == sum(not ask.params.greedy for ask in asks) == 12
    assert sum(ask.params.n > 1 for ask in asks) == 6
    assert {one.reason for one in told} == {"stop", "length"}
    assert sum(one.reason == "stop" for one in told) >= 3
    assert all(digest is not None for one in told for digest in one.digests)
    assert len({one.tokens for one in told}) > 0.9 * len(told)


# The tests of the tester -------------------------------------------------------------------------------------------------


def broken(report: Report) -> set[str]:
    said = [found.headline for found in report.findings if found.check == "laws"]
    return {law for law in LAWS for headline in said if headline.startswith((f"{law} (", f"{law}:"))}


def test_every_law_has_a_mistake() -> None:
    assert {law for fault in LAW_FAULTS.values() for law in fault.expect} == set(LAWS)


@pytest.mark.parametrize("fault", LAW_FAULTS)
def test_a_law_sees_what_repeating_does_not(on_torch: ModelEngines, fault: str) -> None:
    expected = set(LAW_FAULTS[fault].expect)
    with armed_for_laws(fault):
        report = check_laws(on_torch, [requests()], only=sorted(expected | {"restart"}))
    assert broken(report) == expected, report.findings
    assert all(found.check == "laws" and found.iteration >= 1 for found in report.findings)


def test_a_change_that_never_took_place_is_a_miss(engines: ModelEngines) -> None:
    """One request of one token meets nobody, fills no block and is never cut."""
    report = check_laws(
        engines, [[attrs.evolve(LISTS[0][1], prompt=(5,))]], only=["neighbours", "prefix cache", "budget"]
    )
    assert report.findings == ()
    assert len(report.missed) == 3


class OneBlockSize(ModelEngines):
    def __init__(self, real: ModelEngines) -> None:
        self.real = real

    def __call__(self, config: EngineConfig) -> Engine:
        if config.block_size != 4:
            raise ValueError("blocks of 4 only")
        return self.real(config)


def test_an_engine_that_raises_breaks_the_law(engines: ModelEngines) -> None:
    (found,) = check_laws(OneBlockSize(engines), LISTS[:1], only=["block size"]).findings
    assert "blocks of 4 only" in found.headline


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--requests", "1", "--lists", "1"], 1)])
def test_the_command(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int) -> None:
    """One request alone has no neighbours: nothing was held, so the command fails."""
    assert command_line.main(["laws", "--only", "neighbours", "graphs", *arguments]) == status
    out = capsys.readouterr().out
    assert out.count("\n") == 4 + status
    assert ("neighbours: steps with neighbours never occurred" in out) == bool(status)
    assert command_line.main(["laws", "--json", "--only", "neighbours", "graphs", *arguments]) == status
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] == (status == 0)
    assert [row["law"] for row in told["laws"]] == ["neighbours", "graphs"]


def test_the_command_says_what_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["laws", "--only", "choices", "restart", "--arm", "W15"]) == 1
    out = capsys.readouterr().out
    assert "LAW: choices (request 2, one by one): list 0, request 2, choice 1 differs at token 0" in out
    assert "LAW: restart" not in out


def forever(*_: object) -> NoReturn:
    while True:
        pass


def test_an_unchanged_run_that_loops_is_a_finding(engines: ModelEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the only one: the next list would take as long."""
    monkeypatch.setattr(Scheduler, "plan", forever)
    (found,) = check_laws(engines, LISTS, cpu_seconds=0.1).findings
    assert (found.check, found.iteration) == ("raises", 1)
    assert found.headline.startswith("the base run of list 0: an iteration took more than 0.1 s of CPU time")


def test_a_changed_run_that_loops_breaks_its_law(engines: ModelEngines) -> None:
    class LoopsOnOtherBlocks(OneBlockSize):
        def __call__(self, config: EngineConfig) -> Engine:
            engine = engines(config)
            if config.block_size != 4:
                engine.step = forever  # type: ignore[method-assign]
            return engine

    (found,) = check_laws(
        LoopsOnOtherBlocks(engines), LISTS, only=["graphs", "block size", "warm"], cpu_seconds=0.5
    ).findings
    assert found.check == "laws"
    assert found.headline.startswith("block size: list 0 raised an iteration took more than 0.5 s of CPU time")


def test_an_unchanged_run_that_raises_is_told_with_its_place(
    engines: ModelEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(self: Scheduler) -> NoReturn:
        raise RuntimeError("no plan today")

    monkeypatch.setattr(Scheduler, "plan", plan)
    found = check_laws(engines, LISTS[:2], only=["graphs"]).findings
    line = plan.__code__.co_firstlineno + 1
    said = [f"the base run of list {n}: RuntimeError: no plan today at properties/test_laws.py:{line}" for n in (0, 1)]
    assert [one.headline for one in found] == said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compute", ["auto", "torch"])
def test_every_law_holds_on_the_default_model(compute: str) -> None:
    engines = engines_of(DEFAULT, compute)
    asks: list[Ask] = draw_asks(1, ids=(100, 40_000), count=6, prompts=(4, 22), tokens=(3, 7))
    assert_holds(check_laws(engines, [asks]))
