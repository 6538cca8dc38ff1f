"""The order of the runs, what is repeated and what is cut, with contestants made for it; and missing peers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from server.bench.offline import contestants, drive_ctranslate2, rounds, worker
from server.bench.offline.cli import main
from server.bench.offline.contestants import Contestant, Missing
from server.bench.offline.drive import Request
from server.bench.offline.models import Files
from server.bench.requests import Ask

LISTS = {"single": [Ask((1, 2, 3), 4)], "shared16": [Ask((1, 2, 3), 2), Ask((1, 2, 4), 2)]}

# A worker that answers at once, unless its MODE goes wrong at the list of two.
SOURCE = """
import sys, time
from server.bench.offline.drive import Reading, serve
def run(requests, hits):
    if MODE == "raise" and len(requests) > 1 and requests[0].gen == 2:
        raise RuntimeError("no room")
    if MODE == "sleep" and len(requests) > 1 and requests[0].gen == 2:
        time.sleep(60)
    short = MODE == "short" and requests[0].gen == 2
    print("what a library prints is not an answer")
    return Reading(WALL, 0.1, 0.2, [[r.prompt[0]] * (r.gen - short) for r in requests])
serve({"engine": "made up", "hits": True}, run)
"""


def made_up(name: str, mode: str = "", wall: float = 0.5, *, cold: bool = False) -> Contestant:
    source = SOURCE.replace("MODE", repr(mode)).replace("WALL", repr(wall))
    return Contestant(name, (sys.executable, "-c", source), "made up", cold=cold)


def measure(*people: Contestant, repeats: int = 1, **limits: float) -> tuple[dict[str, rounds.Outcome], list[str]]:
    said: list[str] = []
    turns = list(rounds.schedule(people, list(LISTS), repeats))
    workers = {one.name: worker.Worker(one, 1) for one in people}
    return rounds.measure(workers, LISTS, turns, said.append, **limits), said


def test_contestants_change_fastest_then_lists_then_rounds() -> None:
    people = [made_up("A", cold=True), made_up("B")]
    order = [(turn.repeat, turn.list, turn.name) for turn in rounds.schedule(people, ["single", "shared16"], 2)]
    one_round = [("single", "A"), ("single", "B"), ("shared16", "A"), (rounds.COLD, "A"), ("shared16", "B")]
    assert order == [(repeat, *turn) for repeat in range(2) for turn in one_round]


def test_everybody_gets_the_same_prompts_and_no_round_repeats_another() -> None:
    asks = [Ask((5, 6, 7), 1)] * 3
    seen = [
        tuple(ask.prompt for ask in rounds.salted(asks, name, repeat)) for name in ("batch16",) for repeat in range(3)
    ]
    assert len({prompt for prompts in seen for prompt in prompts}) == 9
    shared = rounds.salted(asks, "shared16", 1)
    assert len({ask.prompt[0] for ask in shared}) == 1, "what is shared stays shared"
    assert shared[0].prompt != rounds.salted(asks, rounds.COLD, 1)[0].prompt


def test_runs_are_kept_and_memory_is_read() -> None:
    found, said = measure(made_up("A", cold=True), made_up("B"), repeats=2)
    assert {name: len(runs) for name, runs in found["A"].runs.items()} == {"single": 2, "shared16": 2, rounds.COLD: 2}
    assert {name: len(runs) for name, runs in found["B"].runs.items()} == {"single": 2, "shared16": 2}
    assert found["A"].runs["single"][0].tokens == [[1000] * 4]
    assert found["A"].runs["single"][1].tokens == [[1017] * 4]
    assert found["A"].rss is not None
    assert found["A"].peak is not None
    assert 1 < found["A"].rss <= found["A"].peak
    assert said[:3] == ["starting A", "starting B", "round 1, single: A"]


def test_a_long_run_is_not_repeated() -> None:
    found, _ = measure(made_up("A", wall=21.0), repeats=3)
    assert {name: len(runs) for name, runs in found["A"].runs.items()} == {"single": 1, "shared16": 1}


@pytest.mark.parametrize(
    ("mode", "why"),
    [("raise", "A: RuntimeError: no room"), ("short", "tokens were generated, but [2, 2] were asked for")],
)
def test_a_list_that_fails_is_lost_and_the_others_go_on(mode: str, why: str) -> None:
    found, _ = measure(made_up("A", mode), repeats=2)
    assert why in found["A"].lost["shared16"]
    assert len(found["A"].runs["single"]) == 2
    assert not found["A"].runs.get("shared16")


def test_a_list_that_takes_too_long_is_cut_and_its_process_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker.Worker.run

    def run(self: worker.Worker, asks: Any, patience: float, hits: bool = True) -> worker.Reading:
        slow = len(asks) > 1 and asks[0].gen == 2  # only there, so that a busy machine does not cut the rest
        return real(self, asks, 0.5 if slow else 60.0, hits)

    monkeypatch.setattr(worker.Worker, "run", run)
    began = time.monotonic()
    found, _ = measure(made_up("A", "sleep"), repeats=2)
    assert found["A"].lost["shared16"] == "A took more than 0 s"
    assert len(found["A"].runs["single"]) == 2
    assert time.monotonic() - began < 50, "nobody waited for the sleeper"


def test_one_that_does_not_start_says_why() -> None:
    broken = Contestant("A", (sys.executable, "-c", "raise SystemExit('no such model')"), "made up")
    found, _ = measure(broken, made_up("B"))
    assert found["A"].failure == "A ended: no such model"
    assert len(found["B"].runs["single"]) == 1


def peers_at(folder: Path, *names: str) -> tuple[Path, Files]:
    files = Files(folder / "shipped.gguf", folder / "models")
    for place in (files.hf, files.openvino, files.ct2):
        place.mkdir(parents=True)
    for name in names:
        python = contestants.python_of(folder, name)
        python.parent.mkdir(parents=True)
        python.touch()
        (folder / name / ".ready").touch()
    return folder, files


def test_a_missing_peer_fails_by_name(tmp_path: Path) -> None:
    peers, files = peers_at(tmp_path, "transformers", "llamacpp")
    with pytest.raises(Missing, match="not installed: openvino, ctranslate2; `make peers` installs them"):
        contestants.contestants(files, peers, 2, with_peers=True, http=False)
    alone = contestants.contestants(files, peers, 2, with_peers=False, http=True)
    assert {one.peer for one in alone} == {None}
    assert sum(not one.command for one in alone) == 1, "the server over HTTP"


def test_an_unfinished_peer_is_missing(tmp_path: Path) -> None:
    peers, files = peers_at(tmp_path, *contestants.NEEDED)
    assert contestants.missing(peers, files) == []
    (peers / "openvino" / ".ready").unlink()
    files.hf.rmdir()
    assert contestants.missing(peers, files) == ["transformers", "openvino"]
    everybody = contestants.installed(files, peers, 2)
    assert {one.peer for one in everybody} == {"transformers", "ctranslate2"}


def test_the_command_refuses_without_peers_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--peers", str(tmp_path)]) == 2
    assert "not installed: transformers, openvino, ctranslate2; `make peers`" in capsys.readouterr().err
    assert main(["--no-peers", "--repeats", "0"]) == 2
    assert "--repeats is 0, but must be above 0" in capsys.readouterr().err
    assert main(["--no-peers", "--list", "nope"]) == 2
    assert "--list is 'nope', but must be one of single," in capsys.readouterr().err


def test_static_batches_hold_prompts_of_similar_length() -> None:
    lengths = [40, 8, 30, 9, 25]
    groups = drive_ctranslate2.similar([Request([1] * length, 1) for length in lengths])
    assert [[lengths[at] for at in group] for group in groups] == [[8, 9], [25, 30, 40]]
