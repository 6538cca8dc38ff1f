"""``python -m server bench``: what it counts, against scripted answers and against a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from server.app import create_app
from server.bench import load
from server.bench.cli import main
from server.bench.client import APIS, Answer, Target
from server.bench.plot import plot
from server.bench.requests import Ask, ListError, bundled, drawn, parse
from server.bench.summary import Limits, quantile, summarise
from server.settings import ServerSettings
from server.sockets import bind
from tests.server.stub import StubRunner, stub_engine

MODEL = "synthetic-llama"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real uvicorn over the real engine with a runner that computes nothing."""
    sock = bind("127.0.0.1", 0)
    app = create_app(stub_engine(StubRunner()), ServerSettings())
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def answer(due: float, *arrivals: float, tokens: int | None = None, error: str | None = None) -> Answer:
    return Answer(due, list(arrivals), arrivals[-1] if arrivals else due, 3, tokens or len(arrivals), "", error)


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = answer(1.0, 1.5, 1.7, 2.0)
    assert one.ttft == pytest.approx(0.5)
    assert one.gaps == pytest.approx([0.2, 0.3])
    assert one.tpot == pytest.approx(0.25)
    assert answer(0.0, 1.0).tpot is None


def test_a_quantile_is_a_value_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [quantile(values, percent) for percent in (1, 50, 90, 99, 100)] == [1.0, 3.0, 5.0, 5.0, 5.0]


def test_failed_answers_count_as_failed_and_nowhere_else() -> None:
    got = summarise("x", [answer(0.0, 0.1, 0.2), answer(0.0, 9.0, error="500 broken")])
    assert (got.requests, got.failed, got.errors) == (2, 1, {"500 broken": 1})
    assert got.output_tokens == 2
    assert got.latencies["ttft"]["p99"] == pytest.approx(100.0)


def test_goodput_counts_what_met_every_limit() -> None:
    answers = [answer(0.0, 0.1, 0.2), answer(0.0, 0.6, 0.7), answer(0.0, 0.1, 0.9), answer(0.0, 0.1, error="x")]
    assert summarise("x", answers).goodput is None
    got = summarise("x", answers, Limits(ttft=500, itl=500))
    assert got.goodput == pytest.approx(1 / 0.9)


def test_the_summary_of_nothing_is_json_without_nan() -> None:
    text = json.dumps(summarise("x", [answer(0.0, error="refused")]).plain(), allow_nan=False)
    assert json.loads(text)["latencies"]["ttft"]["p50"] is None


def test_bundled_lists_and_salts() -> None:
    lists = bundled()
    assert {name: len(asks) for name, asks in lists.items()} == {
        "single": 1,
        "batch16": 16,
        "prefill1024": 1,
        "shared16": 16,
    }
    ask = lists["single"][0]
    assert ask.salted(1).prompt != ask.salted(2).prompt
    assert ask.salted(1).prompt[1:] == ask.prompt[1:]
    shared = [ask.salted(3).prompt[:512] for ask in lists["shared16"]]
    assert len(set(shared)) == 1


def test_drawn_requests_are_a_function_of_the_seed() -> None:
    assert drawn(5, 1, (3, 9), (2, 4), 7) == drawn(5, 1, (3, 9), (2, 4), 7)
    assert drawn(5, 1, (3, 9), (2, 4)) != drawn(5, 2, (3, 9), (2, 4))
    asks = drawn(20, 1, (3, 9), (2, 4), 7)
    assert len({" ".join(str(ask.prompt).split()[:7]) for ask in asks}) == 1
    assert all(10 <= len(str(ask.prompt).split()) <= 16 and 2 <= ask.gen <= 4 for ask in asks)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not JSON"),
        ("[]", "object of lists"),
        ('{"a": [{"prompt": "x"}]}', r"a\[0\].gen is None"),
        ('{"a": [{"prompt": [-1], "gen": 1}]}', r"a\[0\].prompt"),
        ('{"a": [3]}', r"a\[0\].gen"),
    ],
)
def test_lists_that_cannot_be_used(text: str, says: str) -> None:
    with pytest.raises(ListError, match=says):
        parse(text, "lists")


@pytest.mark.parametrize("api", APIS)
def test_closed_loop_counts_every_token(url: str, api: str) -> None:
    asks = [Ask("a b c", gen) for gen in (1, 2, 5, 9)]
    answers = asyncio.run(load.closed(Target(url, MODEL, api), asks, clients=2))
    assert [a.error for a in answers] == [None] * 4
    assert [a.output_tokens for a in answers] == [1, 2, 5, 9]
    assert all(1 <= len(a.arrivals) <= ask.gen for a, ask in zip(answers, asks, strict=True))
    assert all(a.due <= a.arrivals[0] <= a.arrivals[-1] <= a.end for a in answers)
    assert all(a.prompt_tokens for a in answers)


def test_open_loop_sends_on_time_whoever_waits(url: str) -> None:
    asks = [Ask("a b c", 3)] * 12
    answers = asyncio.run(load.arriving(Target(url, MODEL), asks, rate=200.0, seed=5))
    assert all(a.error is None for a in answers)
    dues = [a.due for a in answers]
    assert dues == sorted(dues)
    assert len(set(dues)) == 12


def test_what_the_server_refuses_is_an_error_of_that_request(url: str) -> None:
    answers = asyncio.run(load.closed(Target(url, MODEL), [Ask("a", 10**6), Ask("a", 2)], clients=1))
    assert answers[0].error is not None
    assert answers[0].error.startswith("400")
    assert answers[1].error is None


def test_nobody_there_is_an_error_and_not_a_crash() -> None:
    answers = asyncio.run(load.closed(Target("http://127.0.0.1:9", "x"), [Ask("a", 1)], clients=1))
    assert "ConnectError" in str(answers[0].error)


def test_the_command_prints_json_and_draws(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "b.png"
    options = [
        "--random",
        "6",
        "--prompt-words",
        "1",
        "2",
        "--tokens",
        "2",
        "4",
        "--repeats",
        "1",
        "--good-ttft",
        "60000",
    ]
    assert main(["--url", url, *options, "--json", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]  # the server in this same process logs before it
    (run,) = json.loads(printed)["runs"]
    assert (run["requests"], run["failed"]) == (6, 0)
    assert run["goodput"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["--url", url, *options]) == 0
    assert "TTFT p50" in capsys.readouterr().out


def test_failures_are_exit_status_1(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lists.json"
    file.write_text('{"mine": [{"prompt": "a", "gen": 1000000}]}')
    assert main(["--url", url, "--file", str(file), "--repeats", "1"]) == 1
    assert "mine: 1 of 1 failed: 400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--api", "soap"], "--api is 'soap'"),
        (["--list", "nope"], "--list is 'nope'"),
        (["--clients", "2", "--rate", "1"], "give one of them"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--url", "http://127.0.0.1:9"], "does not name a model"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_wrong_options_are_one_sentence(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert says in capsys.readouterr().err


def test_a_plot_needs_an_ending_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nope"):
        plot({"x": [answer(0.0, 0.1, 0.2)]}, tmp_path / "b.nope")
