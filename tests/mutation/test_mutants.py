"""The kept verdicts of mutation testing: they still stand, they hold, and what makes them could say otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from ci.mutants import READABLE, STORED, SURVIVORS, Outcome, Result, Survivor, dump, load, population, readable, sources
from ci.mutation_kill import Verdict
from ci.mutation_points import Mutant, draw

ROOT = Path(__file__).parents[2]
MUTANT = Mutant("rows.py", "RowTable.take", "number", "        self.num_free -= 1", "        self.num_free -= 2", 0)


def python(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )


def outcome(*results: Result, survivors: tuple[Survivor, ...] = ()) -> Outcome:
    return Outcome(1, 5000, 1000, results, survivors)


def judged(by: str | None, number: int = 0) -> Result:
    mutant = attrs.evolve(MUTANT, nth=number, new=f"        self.num_free -= {2 + number}")
    return Result(mutant, Verdict(mutant.key, by))


REASON = Survivor(MUTANT.file, MUTANT.scope, "self.num_free -= 1", "self.num_free  -= 2", "nobody reads it")


# What is kept ---------------------------------------------------------------------------------------------------------


def test_the_kept_run_holds() -> None:
    kept = load(ROOT / STORED)
    assert len(kept.results) >= 400
    assert kept.workloads >= 5000
    assert kept.complaints() == []
    assert (ROOT / READABLE).read_text(encoding="utf-8") == readable(kept)
    assert (ROOT / STORED).read_text(encoding="utf-8") == dump(kept)


def test_every_reason_is_that_of_a_survivor() -> None:
    kept = load(ROOT / STORED)
    alive = [result.mutant for result in kept.results if not result.verdict.killed]
    assert [known for known in kept.survivors if not any(known.names(mutant) for mutant in alive)] == []
    assert all(len(known.why) > 20 for known in kept.survivors), SURVIVORS


def test_kept_mutants_die_again() -> None:
    ended = python("-m", "ci.mutants", "--again", "12", "--jobs", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 12


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_the_whole_sample_drawn_anew() -> None:
    kept = load(ROOT / STORED)
    drawn = draw(population(sources()), len(kept.results), kept.seed)
    assert {m.key for m in drawn} == {r.mutant.key for r in kept.results}, "run python -m ci.mutants --write"
    ended = python("-m", "ci.mutants")
    assert ended.returncode == 0, ended.stdout + ended.stderr


# Whether it could fail ------------------------------------------------------------------------------------------------


def test_too_few_kills_are_told() -> None:
    assert outcome(*(judged("audit", n) for n in range(9)), judged("test", 9)).complaints() == []
    said = outcome(*(judged("audit", n) for n in range(8)), judged("test", 8), judged("test", 9)).complaints()
    assert said == ["8 of 10 were killed, at least 90% must be"]
    rewording = attrs.evolve(REASON, new="self.num_free -= 12")
    assert outcome(*(judged("audit", n) for n in range(9)), judged(None, 10), survivors=(rewording,)).complaints() == []


def test_a_survivor_needs_a_reason_and_a_killed_one_must_have_none() -> None:
    killed = [judged("audit", n) for n in range(1, 11)]
    assert "survives without a reason" in outcome(judged(None), *killed).complaints()[0]
    assert outcome(judged(None), *killed, survivors=(REASON,)).complaints() == []
    said = outcome(judged("rows"), *killed, survivors=(attrs.evolve(REASON, new="self.num_free -= 2"),)).complaints()
    assert "called equivalent" in said[0]


def test_verdicts_survive_being_kept(tmp_path: Path) -> None:
    kept = outcome(judged("audit"), judged("rows", 1))
    path = tmp_path / "mutants.json"
    path.write_text(dump(kept), encoding="utf-8")
    assert {r.verdict for r in load(path).results} == {r.verdict for r in kept.results}
    assert len(json.loads(path.read_text())["mutants"]) == 2


MEASURE = """
import json, sys
from ci.mutants import _all
from ci.mutation_kill import Job
text = open("engine/control/rows.py").read()
jobs = []
for key, (old, new) in json.load(sys.stdin).items():
    assert text.count(old) == 1, old
    jobs.append(Job(key, "rows.py", text.replace(old, new), 20, False, 1.0))
print(json.dumps({verdict.key: verdict.by for verdict in _all(jobs, 2)}))
"""
TAKEN = "        self.num_free -= 1\n"
ENDS = {
    "the engine itself": (TAKEN, TAKEN + "        self.taken = row\n", None),
    "a wrong row": ("self.owner.index(None)", "len(self.owner) - 1 - self.owner[::-1].index(None)", "rows"),
    "an endless loop": (TAKEN, "        while self.num_free >= 0: pass\n", "time"),
    "too much memory": (TAKEN, "        bytearray(1 << 40)\n", "raises"),
    "a dead process": (TAKEN, "        import os; os.kill(os.getpid(), 9)\n", "died"),
    "no such name": ("class RowTable:", "class Table:", "import"),
}


def test_each_end_of_a_mutant() -> None:
    given = json.dumps({name: case[:2] for name, case in ENDS.items()})
    ended = python("-c", MEASURE, given=given)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {name: case[2] for name, case in ENDS.items()}


def test_nothing_is_measured_on_an_engine_that_does_not_hold() -> None:
    script = (
        "import ci.mutants as m; real = m.sources\n"
        "m.sources = lambda: {**real(), 'audit.py': 'def audit(s): return [\"broken\"]'}\n"
        "m.measure([], workloads=1, jobs=1)"
    )
    ended = python("-c", script)
    assert "RuntimeError: the engine without a mutant does not hold: audit" in ended.stderr
