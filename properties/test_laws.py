"""The laws hold for the engine, and each of them sees a mistake that only a law of its kind can see.

The second half is the test of the tester: while a mistake is armed, its law must be broken, and ``restart``, which repeats the
run in a new engine, must hold: so it is the law's change that shows the mistake, and not chance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from properties import __main__ as command_line
from properties.arming import Change, arm, instead, line
from properties.law_engines import ModelEngines, engines_of
from properties.law_play import DEFAULT, TINY, Ask, draw_asks, play
from properties.laws import LAWS, Report, base_config, check_laws

IDS = (3, 500)
LISTS = [draw_asks(seed, ids=IDS) for seed in range(3)]
RUNNER = "engine.compute.runner:PlanRunner"
SAMPLER = "engine.compute.sampler:Sampler"
SAMPLING = "engine.compute.sampling_row:RowState"
SCHEDULER = "engine.control.scheduler:Scheduler"
DECODER = "engine.compute.decoder:Decoder"


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


def _rows_change_the_product(real: Any) -> Any:
    def apply(self: Any, do: Any, x: Any, rows: int, out: Any) -> None:
        real(self, do, x, rows, out)
        do(lambda part: part.mul_(1 + rows * 2.0**-22), out[:rows])

    return apply


def _the_seed_stays_with_the_row(real: Any) -> Any:
    def move(self: Any, move: Any) -> None:
        real(self, move)
        self._states[move.dst].seed = move.dst

    return move


def _a_block_is_its_first_token(real: Any) -> Any:
    return lambda parent, tokens: real(parent, tokens[:1])


def _an_abort_releases_shared_blocks_twice(real: Any) -> Any:
    def reap(self: Any) -> Any:
        for block in [block for request in self.running if request.aborted for block in request.table]:
            self.pool.references[block] -= self.pool.references[block] > 1
        return real(self)

    return reap


def _each_engine_draws_its_own_noise(real: Any) -> Any:
    made: list[Any] = []

    def sample(self: Any, logits: Any, rows: Any, positions: Sequence[int]) -> Any:
        if self not in made:
            made.append(self)
        return real(self, logits, rows, [position + 1000 * made.index(self) for position in positions])

    return sample


@attrs.frozen
class Mistake:
    law: str
    title: str
    change: Callable[[], Change]


_SEES = "asking = step.positions[part]"
_SAMPLE = "self._sample_row(host[k], states[i], positions[i], sampled[i].token)"
MISTAKES = [
    Mistake(
        "neighbours",
        "a product's last bits depend on the number of rows",
        instead("engine.compute.linear:Linear", "apply", _rows_change_the_product),
    ),
    Mistake(
        "order",
        "noise is keyed by the row as well",
        line(SAMPLER, "sample", _SAMPLE, _SAMPLE.replace("positions[i]", "positions[i] + rows[i]")),
    ),
    Mistake(
        "rows",
        "rows from the fourth on get the noise of another position",
        line(SAMPLER, "sample", _SAMPLE, _SAMPLE.replace("positions[i]", "positions[i] + (rows[i] > 2)")),
    ),
    Mistake(
        "pool",
        "what a resumed request generated is computed again as its first token",
        line(
            SCHEDULER,
            "_chunk",
            "request.tokens[request.computed : request.computed + count]",
            "request.tokens[min(at, request.prompt_len)] for at in range(request.computed, request.computed + count)",
        ),
    ),
    Mistake(
        "block size",
        "offsets in a block are cut to three bits",
        line(RUNNER, "slots", "positions % self.limits.block_size", "positions % self.limits.block_size & 7"),
    ),
    Mistake(
        "budget",
        "a chunk that begins inside a block sees one position less",
        line(DECODER, "prefill", _SEES, f"{_SEES} - int(span.start % 4 > 0)"),
    ),
    Mistake(
        "captures",
        "padded rows repeat the first row's token and slot",
        line(
            "engine.compute.inputs:StaticInputs",
            "fill",
            "host[n:] = entry.fill",
            "host[n:] = entry.fill if entry.wide else host[:1].clone()",
        ),
    ),
    Mistake(
        "graphs",
        "every fifth replay is left out, and the last one's logits are read again",
        line(RUNNER, "_decode", "self._graphs.replay(shape)", "plan.iteration % 5 == 4 or self._graphs.replay(shape)"),
    ),
    Mistake(
        "persistent batch",
        "a request that moves draws with the seed of its new row",
        instead(SAMPLER, "move", _the_seed_stays_with_the_row),
    ),
    Mistake(
        "prefix cache",
        "of a block's tokens the first alone is its key",
        instead("engine.control.prefix", "block_key", _a_block_is_its_first_token),
    ),
    Mistake(
        "warm",
        "behind a hit, attention reads one position short",
        line(DECODER, "prefill", _SEES, f"{_SEES} - int(span.start > 0)"),
    ),
    Mistake(
        "preemption",
        "a resumed request draws from another stream",
        line(SAMPLING, "__init__", "= spec.seed", "= spec.seed + len(seat.tokens) - seat.prompt_len"),
    ),
    Mistake(
        "aborts",
        "an abort gives back blocks that others share once too often",
        instead(SCHEDULER, "_reap", _an_abort_releases_shared_blocks_twice),
    ),
    Mistake(
        "restart", "noise depends on the engine's number", instead(SAMPLER, "sample", _each_engine_draws_its_own_noise)
    ),
    Mistake(
        "choices",
        "every choice is drawn with the first one's seed",
        line(
            "engine.engine:Engine",
            "submit",
            "SamplingSpec(params, seed, masked) for seed in seeds",
            "SamplingSpec(params, seeds[0], masked) for _ in seeds",
        ),
    ),
    Mistake(
        "mixture",
        "logits of a padded step are rotated when prompts are computed beside it",
        line(
            RUNNER,
            "_decode",
            "return self._logits[shape][: len(rows)]",
            "return self._logits[shape][: len(rows)].roll(int(bool(plan.chunks and launch.padding)), 0)",
        ),
    ),
]


def test_every_law_has_a_mistake() -> None:
    assert [mistake.law for mistake in MISTAKES] == list(LAWS)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.law for mistake in MISTAKES])
def test_a_law_sees_what_repeating_does_not(on_torch: ModelEngines, mistake: Mistake) -> None:
    only = {mistake.law: None, "restart": None}
    with arm(mistake.change()):
        report = check_laws(on_torch, LISTS[:2], only=only)
    broken = {
        name for name in only for found in report.findings if found.headline.startswith((f"{name} (", f"{name}:"))
    }
    assert broken == {mistake.law}, report.findings
    assert all(found.check == "laws" and found.iteration >= 1 for found in report.findings)


def test_a_change_that_never_took_place_is_a_miss(engines: ModelEngines) -> None:
    """One request of one token meets nobody, fills no block and is never cut."""
    report = check_laws(
        engines, [[attrs.evolve(LISTS[0][1], prompt=(5,))]], only=["neighbours", "prefix cache", "budget"]
    )
    assert report.findings == ()
    assert len(report.missed) == 3


def test_an_engine_that_raises_breaks_the_law(engines: ModelEngines) -> None:
    class OneBlockSize(ModelEngines):
        def __init__(self) -> None:
            pass

        def __call__(self, config: EngineConfig) -> Engine:
            if config.block_size != 4:
                raise ValueError("blocks of 4 only")
            return engines(config)

    (found,) = check_laws(OneBlockSize(), LISTS[:1], only=["block size"]).findings
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
    mistake = next(mistake for mistake in MISTAKES if mistake.law == "choices")
    with arm(mistake.change()):
        assert command_line.main(["laws", "--only", "choices", "restart"]) == 1
    out = capsys.readouterr().out
    assert "LAW: choices (request 2, one by one): list 0, request 2, choice 1 differs at token 0" in out
    assert "LAW: restart" not in out


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compute", ["auto", "torch"])
def test_every_law_holds_on_the_default_model(compute: str) -> None:
    engines = engines_of(DEFAULT, compute)
    asks: list[Ask] = draw_asks(1, ids=(100, 40_000), count=6, prompts=(4, 22), tokens=(3, 7))
    assert_holds(check_laws(engines, [asks]))
