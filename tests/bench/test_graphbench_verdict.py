"""Each check of graphbench: silent on a good pair of runs, and fired by the one thing that it is there to see."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from server.bench.client import Answer
from server.bench.summary import summarise
from server.graphbench import report
from server.graphbench.cli import main
from server.graphbench.clients import Said, clients
from server.graphbench.readings import Backwards, Happened, between, total
from server.graphbench.run import ARMS, Arm, joined
from server.graphbench.verdict import ArmRun, Paced, Tolerance, judge, ratio_of

SAID = tuple(Said((n, n + 1), ("d", f"{n}"), "text", "length") for n in range(4))


def happened(**changes: Any) -> Happened:
    base = Happened(
        decode_steps=10,
        decode_rows={4: 6, 1: 4},
        replays={"4x4": 6, "1x4": 4},
        eager={},
        recorded=0,
        sampled_tokens=28,
        prefill_tokens=40,
        padded_rows=0,
        row_moves=2,
        preemptions=0,
    )
    return attrs.evolve(base, **changes)


def eager_steps(**changes: Any) -> Happened:
    return happened(**{"replays": {}, "eager": {"uncaptured": 10}, **changes})


def paced(steps: Happened, gap: float = 0.01, each: int = 30, slow: int = 0) -> Paced:
    """Ten requests with ``each`` gaps; in the first ``slow`` of them every third gap is five times as long."""
    gaps = [tuple(gap * (5 if n < slow and k % 3 == 0 else 1) for k in range(each)) for n in range(10)]
    answers = []
    for some in gaps:
        arrivals = list(accumulate(some, initial=0.0))
        answers.append(Answer(0.0, arrivals, arrivals[-1], 3, len(arrivals)))
    return Paced(1.0, summarise("1/s", answers), tuple(gaps), steps)


def arm(name: str, steps: Happened, **changes: Any) -> ArmRun:
    base = ArmRun(
        name=name,
        replays=name != "eager",
        rows=4,
        boot_s=1.0,
        memory_mib=100.0,
        promises={},
        crowd=SAID,
        crowd_happened=steps,
        alone=SAID,
        paced=[paced(steps)],
    )
    return attrs.evolve(base, **changes)


def graphs(**changes: Any) -> ArmRun:
    return arm("graphs", happened(), **changes)


def eager(**changes: Any) -> ArmRun:
    return arm("eager", eager_steps(), **changes)


def test_a_good_pair_holds() -> None:
    assert judge(graphs(), eager(), Tolerance()) == []


ANOTHER = (attrs.evolve(SAID[0], tokens=(9, 9)), *SAID[1:])
DIGEST = (*SAID[:3], attrs.evolve(SAID[3], digests=("d", "other")))
BROKEN = (*SAID[:3], Said(error="500 broken"))

CASES: list[tuple[str, str, Callable[[], tuple[ArmRun, ArmRun]]]] = [
    ("worse", "answers differ", lambda: (graphs(crowd=ANOTHER, alone=ANOTHER), eager())),
    ("worse", "answers differ", lambda: (graphs(crowd=DIGEST, alone=DIGEST), eager())),
    ("worse", "crowd differs from alone", lambda: (graphs(alone=ANOTHER), eager(alone=ANOTHER))),
    ("worse", "recorded while serving", lambda: (graphs(crowd_happened=happened(recorded=1)), eager())),
    (
        "worse",
        "not every step replayed",
        lambda: (graphs(crowd_happened=happened(replays={"4x4": 9}, eager={"scattered": 1})), eager()),
    ),
    ("worse", "tail worse", lambda: (graphs(paced=[paced(happened(), gap=0.02)]), eager())),
    ("worse", "tail worse", lambda: (graphs(paced=[paced(happened(), slow=10)]), eager())),
    ("void", "not crowded", lambda: (graphs(crowd_happened=happened(decode_rows={3: 10})), eager())),
    ("void", "not crowded", lambda: (graphs(), eager(crowd_happened=eager_steps(decode_rows={3: 10})))),
    ("void", "different work", lambda: (graphs(), eager(crowd_happened=eager_steps(sampled_tokens=27)))),
    ("void", "too few samples", lambda: (graphs(paced=[paced(happened(), each=2)]), eager())),
    ("void", "not eager", lambda: (graphs(), eager(crowd_happened=happened()))),
    ("void", "different compute", lambda: (graphs(compute="native"), eager(compute="torch"))),
    ("void", "failed", lambda: (graphs(), eager(crowd=BROKEN, alone=BROKEN))),
]


@pytest.mark.parametrize(
    ("kind", "check", "make"), CASES, ids=[f"{check}-{n}" for n, (_, check, _) in enumerate(CASES)]
)
def test_each_check_fires(kind: str, check: str, make: Callable[[], tuple[ArmRun, ArmRun]]) -> None:
    found = judge(*make(), Tolerance())
    assert (kind, check) in {(complaint.kind, complaint.check) for complaint in found}
    assert {complaint.check for complaint in found} == {check}


def test_equal_bytes_are_promised_of_one_compute_path() -> None:
    """An arm that is told to compute otherwise may answer otherwise; of any other arm that would be a void pair."""
    native = graphs(compute="native kernels, cpu", alone=())
    torch = eager(compute="torch kernels, cpu", alone=(), crowd=ANOTHER)
    told = {complaint.check for complaint in judge(native, torch, Tolerance())}
    assert told == {"different compute", "answers differ"}
    otherwise = attrs.evolve(torch, computes_otherwise=True)
    assert judge(native, otherwise, Tolerance()) == []
    same = attrs.evolve(otherwise, compute=native.compute)
    assert {complaint.check for complaint in judge(native, same, Tolerance())} == {"answers differ"}
    crowded = attrs.evolve(otherwise, alone=SAID)
    assert {complaint.check for complaint in judge(native, crowded, Tolerance())} == {"crowd differs from alone"}


def test_an_arm_that_replays_nothing_says_nothing_about_replays() -> None:
    found = judge(graphs(crowd_happened=eager_steps(), paced=[paced(eager_steps())]), eager(), Tolerance())
    assert {complaint.check for complaint in found} == {"nothing replayed", "not every step replayed"}


def test_one_slow_request_widens_the_interval_and_is_no_verdict() -> None:
    mine, theirs = paced(happened(), slow=1), paced(eager_steps())
    tail = ratio_of(mine, theirs, 99)
    assert tail is not None
    assert (tail.low, round(tail.value, 3), round(tail.high, 3)) == (1.0, 5.0, 5.0)
    assert judge(graphs(paced=[mine]), eager(paced=[theirs]), Tolerance()) == []
    assert ratio_of(mine, paced(eager_steps(), each=0), 99) is None


READING: dict[str, Any] = {
    "decode_steps": 3,
    "decode_rows": {"1": 2, "2": 1},
    "replays": {"2x4": 3},
    "eager_steps": {},
    "recorded_graphs": 7,
    "sampled_tokens": 5,
    "prefill_tokens": 9,
    "padded_rows": 1,
    "row_moves": 0,
    "preemptions": 0,
}


def test_a_claim_is_the_difference_of_two_readings() -> None:
    after = READING | {"decode_steps": 5, "decode_rows": {"1": 2, "2": 2, "8": 1}, "replays": {"2x4": 4, "8x4": 1}}
    got = between(READING, after)
    assert (got.decode_steps, got.decode_rows, got.replays) == (2, {2: 1, 8: 1}, {"2x4": 1, "8x4": 1})
    assert (got.peak_rows, got.replay_share, got.recorded) == (8, 1.0, 0)


def test_stretches_of_one_run_are_added() -> None:
    one = happened(eager={"scattered": 2}, replays={"4x4": 6})
    both = total([one, happened(eager={"uncaptured": 1}, replays={"4x4": 1, "1x4": 4})])
    assert (both.decode_steps, both.decode_rows, both.sampled_tokens) == (20, {4: 12, 1: 8}, 56)
    assert (both.replays, both.eager) == ({"4x4": 7, "1x4": 4}, {"scattered": 2, "uncaptured": 1})


@pytest.mark.parametrize("change", [{"sampled_tokens": 4}, {"replays": {"2x4": 2}}, {"decode_rows": {}}])
def test_a_total_that_goes_down_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(Backwards, match="not of one run"):
        between(READING, READING | change)


def test_the_same_seed_asks_the_same() -> None:
    assert clients(9, 3, 1000) == clients(9, 3, 1000)
    asks = clients(9, 3, 1000)
    assert asks != clients(9, 4, 1000)
    assert {ask.sampling["temperature"] for ask in asks} == {0, 0.8}
    assert len({len(ask.prompt) for ask in asks}) > 3


def test_what_people_and_machines_read(tmp_path: Path) -> None:
    arms = [graphs(compute="native"), eager(compute="native", crowd=ANOTHER, alone=ANOTHER)]
    complaints = judge(arms[0], arms[1], Tolerance())
    console = Console(record=True, width=120, file=io.StringIO())
    report.show(arms, complaints, console)
    text = console.export_text()
    assert "graphs and eager: 3 of 4 answers equal to the byte" in text
    assert "WORSE  answers differ: crowd: the answers of 1 clients (0) differ" in text
    document = json.loads(json.dumps(report.document(arms, complaints)))
    assert (document["holds"], document["equal_answers"]) == (False, {"eager": 3})
    assert (document["promised_equal"], document["arms"][0]["equal_alone"]) == ({"eager": True}, 4)
    assert report.table_of(arms).splitlines()[1].startswith("graphs,1,")
    assert "graphs in the crowd and alone: 4 of 4 answers equal to the byte" in text
    otherwise = attrs.evolve(arms[1], compute="torch", computes_otherwise=True)
    report.show([arms[0], otherwise], [], console)
    words = "graphs and eager: 3 of 4 answers equal to the byte, 3 in their tokens; none is promised between native and torch"
    assert words in console.export_text()
    report.plot(arms, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_overrides_what_is_common() -> None:
    """A server takes an option once, and refuses it a second time."""
    common = ["--seed", "0", "--compute=torch", "--no-persistent-batch", "--compute", "native", "--threads", "1"]
    compiled, free = (Arm(name, ARMS[name]) for name in ("compiled", "free-rows"))
    kept = ["--seed", "0", "--no-persistent-batch", "--threads", "1"]
    assert joined(common, compiled.options) == [*kept, "--compute", "auto"]
    assert joined([*kept, "--persistent-batch"], free.options) == [
        "--seed",
        "0",
        "--threads",
        "1",
        "--no-persistent-batch",
    ]
    assert joined(common, ()) == common
    assert joined(["--seed", "0"], ("--seed=3",)) == ["--seed=3"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--arms", "graphs"], "at least two"),
        (["--arms", "graphs,quick"], "'quick', but must hold graphs, eager, free-rows, no-cache, compiled, torch"),
        (["--rates", "fast"], "'fast'"),
        (["--clients", "1"], "--clients is 1, but a crowd has 2 to 1000"),
        (["--clients", "1001"], "--clients is 1001"),
        (["--seconds", "0"], "--seconds is 0.0, but must be above 0 and at most 86400"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--tail", "-1"], "--tail is -1.0"),
        (["--samples", "0"], "--samples is 0"),
        (["--plot", "p.png", "--rates", ""], "--rates is empty"),
        (["--plot", "p.jpgg"], "--plot is p.jpgg, but its name must end in one of"),
        (["--csv", "nowhere/p.csv"], "--csv is nowhere/p.csv, but there is no folder"),
    ],
)
def test_wrong_options_are_one_sentence(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert says in capsys.readouterr().err
