"""Mutation testing of engine/control: how many single small mistakes does the harness let through?

    python -m ci.mutants                    draw 400 of all mutants, run them, print the table (exit 1 when it does not hold)
    python -m ci.mutants --write            the same, and keep the verdicts: ci/mutants.json, and ci/mutants.md for people
    python -m ci.mutants --again 12         run twelve of the kept ones again and compare

It holds when of those that are no mere rewording at least nine in ten die under the corpus and the generated workloads, and
every other one dies under the unit tests of control. A rewording, which no run can tell from the engine, survives everything
and stands in ci/mutants_survivors.toml with the reason; one that is named there and dies all the same is a complaint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

from ci.mutation_kill import CONTROL, Job, Verdict, send_armed_words, work
from ci.mutation_points import Mutant, draw, mutants

STORED = Path("ci/mutants.json")
READABLE = Path("ci/mutants.md")
SURVIVORS = Path("ci/mutants_survivors.toml")
SHARE = 0.9
JUDGE = "audit.py"  # looks at the engine and never changes it, so it is judged on broken engines
HEALTHY = 100  # workloads that the engine itself must survive first
UNMUTATED = Mutant(JUDGE, "", "none", "", "", 0)

Told = Callable[[Verdict], None]


@attrs.frozen
class Result:
    mutant: Mutant
    verdict: Verdict


@attrs.frozen
class Survivor:
    """A mutant that no run can tell from the engine, and why. Matched by what it says, spaces aside."""

    file: str
    scope: str
    old: str
    new: str
    why: str

    def names(self, mutant: Mutant) -> bool:
        mine = (mutant.file, mutant.scope, *(" ".join(text.split()) for text in (mutant.old, mutant.new)))
        return mine == (self.file, self.scope, *(" ".join(text.split()) for text in (self.old, self.new)))


@attrs.frozen
class Outcome:
    """A whole run. ``complaints`` is empty when it holds."""

    seed: int
    workloads: int
    population: int
    results: tuple[Result, ...]
    survivors: tuple[Survivor, ...]

    def killed(self, *, by_tests: bool = False) -> list[Result]:
        return [r for r in self.results if r.verdict.killed and (by_tests or r.verdict.by != "test")]

    def why(self, mutant: Mutant) -> str | None:
        return next((known.why for known in self.survivors if known.names(mutant)), None)

    def complaints(self) -> list[str]:
        said = []
        different = [r for r in self.results if r.verdict.killed or self.why(r.mutant) is None]
        if len(self.killed()) < SHARE * len(different):
            said.append(f"{len(self.killed())} of {len(different)} were killed, at least {SHARE:.0%} must be")
        for result in self.results:
            why = self.why(result.mutant)
            if not result.verdict.killed and why is None:
                said.append(f"{result.mutant.key} survives without a reason: {_where(result.mutant)}")
            if result.verdict.killed and why is not None:
                said.append(f"{result.mutant.key} is called equivalent, but {result.verdict.by} kills it")
        return said


def sources() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(CONTROL.glob("*.py"))}


def population(texts: dict[str, str]) -> list[Mutant]:
    return [mutant for file, text in texts.items() for mutant in mutants(file, text)]


def known_survivors(path: Path = SURVIVORS) -> tuple[Survivor, ...]:
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    return tuple(Survivor(**entry) for entry in entries)


def measure(
    chosen: Sequence[Mutant], *, workloads: int, jobs: int, tests: bool = True, told: Told | None = None
) -> list[Verdict]:
    """Runs each mutant in a process of its own, ``jobs`` at a time.

    Raises ``ValueError`` for one that fits nowhere, and ``RuntimeError`` when the engine itself, unmutated, does not hold:
    then every mutant would count as killed.
    """
    texts, words = sources(), _ask(send_armed_words)
    (healthy,) = _all([_job(UNMUTATED, texts[JUDGE], words, HEALTHY, tests=False)], 1)
    if healthy.killed:
        raise RuntimeError(f"the engine without a mutant does not hold: {healthy.by} at {healthy.where}")
    waiting = []
    for mutant in chosen:
        text = mutant.apply(texts[mutant.file])
        if text is None:
            raise ValueError(f"{mutant.key} no longer fits {_where(mutant)}")
        waiting.append(_job(mutant, text, words, workloads, tests=tests))
    verdicts = {}
    for verdict in _all(waiting, jobs):
        verdicts[verdict.key] = verdict
        if told is not None:
            told(verdict)
    return [verdicts[mutant.key] for mutant in chosen]


def _job(mutant: Mutant, text: str, words: dict[str, list[str]], workloads: int, *, tests: bool) -> Job:
    armed = words if mutant.file == JUDGE else None
    return Job(mutant.key, mutant.file, text, workloads, tests, armed=armed)


def _ask(send: Callable[[Connection], None]) -> Any:
    """What a function sends that runs in a process of its own."""
    mine, its = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=send, args=(its,))
    process.start()
    its.close()
    answer = mine.recv()
    process.join()
    return answer


def _all(waiting: list[Job], jobs: int) -> Iterator[Verdict]:
    context = multiprocessing.get_context("fork")  # this process has one thread and has imported nothing of the engine
    running: dict[Connection, tuple[Any, Job]] = {}
    following = iter(waiting)
    job = next(following, None)
    while job is not None or running:
        while job is not None and len(running) < jobs:
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_quietly, args=(job, its))
            process.start()
            its.close()
            running[mine] = (process, job)
            job = next(following, None)
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            process, done = running.pop(ready)
            try:
                verdict = ready.recv()
            except EOFError:
                verdict = None
            process.join()
            yield verdict or _died(done, process.exitcode)


def _quietly(job: Job, answers: Connection) -> None:
    """A mutant may print and complain; nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    work(job, answers)


def _died(job: Job, code: int | None) -> Verdict:
    name = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
    return Verdict(job.key, "time" if name == "SIGXCPU" else "died", name)


# Kept verdicts -------------------------------------------------------------------------------------------------------


def dump(outcome: Outcome) -> str:
    """One mutant a line, so that a change of one is a change of one line."""
    head = {"seed": outcome.seed, "workloads": outcome.workloads, "population": outcome.population}
    rows = [json.dumps({**attrs.asdict(r.mutant), **attrs.asdict(r.verdict)}) for r in _listed(outcome.results)]
    return json.dumps(head)[:-1] + ', "mutants": [\n' + ",\n".join(rows) + "\n]}\n"


def load(path: Path = STORED) -> Outcome:
    data = json.loads(path.read_text(encoding="utf-8"))
    results = [Result(_only(Mutant, row), _only(Verdict, row)) for row in data["mutants"]]
    return Outcome(data["seed"], data["workloads"], data["population"], tuple(results), known_survivors())


def _listed(results: Iterable[Result]) -> list[Result]:
    return sorted(results, key=lambda r: (r.mutant.file, r.mutant.scope, r.mutant.key))


def _only(kind: type[Any], row: dict[str, Any]) -> Any:
    return kind(**{field.name: row[field.name] for field in attrs.fields(kind)})


def _where(mutant: Mutant) -> str:
    return f"{mutant.file} {mutant.scope}".strip()


def readable(outcome: Outcome) -> str:
    results, killed = _listed(outcome.results), outcome.killed()
    ends = Counter(r.verdict.by or "nothing" for r in results)
    alive = [r for r in results if not r.verdict.killed]
    by_tests = [r for r in results if r.verdict.by == "test"]
    seconds = sorted(r.verdict.seconds for r in killed)
    late = sum(r.verdict.where.startswith("workload") for r in killed)
    lines = [
        "# Mutation testing of engine/control",
        "",
        "Written by `python -m ci.mutants --write`; do not edit. ci/mutation_points.py says what a mutant is,",
        "ci/mutation_kill.py what it is tried against.",
        "",
        f"- {outcome.population} mutants, {len(results)} drawn with seed {outcome.seed}.",
        f"- {len(killed)} killed by the corpus and {outcome.workloads} generated workloads: {len(killed) - late} by the corpus, "
        f"{late} by a generated workload. That is {len(killed) / (len(results) - len(alive)):.1%} of the "
        f"{len(results) - len(alive)} that are not equivalent, {len(killed) / len(results):.1%} of all.",
        f"- {len(by_tests)} more killed by the unit tests of control, which run after all of the workloads, and {len(alive)} "
        "equivalent.",
        f"- Processor time to a kill, start and imports included: median {_at(seconds, 0.5):.1f} s, "
        f"95 % within {_at(seconds, 0.95):.1f} s, longest {_at(seconds, 1.0):.1f} s.",
        "",
        *_table("File", Counter(r.mutant.file for r in results), Counter(r.mutant.file for r in killed)),
        "",
        "| Killed first by | Mutants |",
        "|---|---:|",
        *(f"| {by} | {times} |" for by, times in sorted(ends.items(), key=lambda end: (-end[1], end[0]))),
        "",
        "Besides the checks of the harness: `driver`, what the engine handed out could not even be compared; `import`, control",
        "could not be imported; `time`, `memory`, `died`, how a process ended; `test`, a unit test of control and no workload.",
        "",
        *_section("Killed by unit tests only", by_tests, lambda r: r.verdict.where),
        *_section("Equivalent", alive, lambda r: outcome.why(r.mutant) or "NO REASON GIVEN"),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _table(what: str, drawn: Counter[str], killed: Counter[str]) -> Iterator[str]:
    yield f"| {what} | Drawn | Killed by workloads |"
    yield "|---|---:|---:|"
    for name, times in sorted(drawn.items()):
        yield f"| {name} | {times} | {killed[name]} |"


def _section(title: str, results: Iterable[Result], why: Callable[[Result], str]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    for result in results:
        mutant = result.mutant
        yield f"- `{_where(mutant)}`: {why(result)}"
        yield ""
        yield "  ```diff"
        yield from (f"  -{line.strip()}" for line in mutant.old.splitlines())
        yield from (f"  +{line.strip()}" for line in mutant.new.splitlines())
        yield "  ```"
    yield ""


# The command ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=400, help="how many mutants are drawn (default 400)")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing (default 1)")
    parser.add_argument(
        "--workloads", type=int, default=5000, help="generated workloads each must survive (default 5000)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--only", metavar="FILE", help="mutants of one file of engine/control")
    parser.add_argument("--write", action="store_true", help=f"keep the verdicts in {STORED} and {READABLE}")
    parser.add_argument("--again", metavar="N", type=int, help="run N of the kept killed mutants again and compare")
    options = parser.parse_args(arguments)
    return _again(options) if options.again is not None else _whole(options)


def _whole(options: argparse.Namespace) -> int:
    everyone = population(sources())
    eligible = [mutant for mutant in everyone if options.only in (None, mutant.file)]
    chosen = draw(eligible, options.sample, options.seed)
    told = _progress(len(chosen))
    verdicts = measure(chosen, workloads=options.workloads, jobs=options.jobs, told=told)
    results = tuple(Result(mutant, verdict) for mutant, verdict in zip(chosen, verdicts, strict=True))
    outcome = Outcome(options.seed, options.workloads, len(everyone), results, known_survivors())
    print(readable(outcome))
    if options.write:
        STORED.write_text(dump(outcome), encoding="utf-8")
        READABLE.write_text(readable(outcome), encoding="utf-8")
    return _end(outcome.complaints())


def _again(options: argparse.Namespace) -> int:
    """Kept mutants, spread over all files. One that no longer fits the text was changed since; too many mean a new run."""
    kept, texts = load(), sources()
    fitting = [r for r in kept.results if r.mutant.apply(texts.get(r.mutant.file, "")) is not None]
    said = []
    if len(fitting) < SHARE * len(kept.results):
        said.append(f"only {len(fitting)} of {len(kept.results)} kept mutants fit today's text: run with --write")
    killed = [r for r in fitting if r.verdict.killed and r.verdict.by != "test"]
    chosen = killed[:: max(1, len(killed) // max(1, options.again))][: options.again]
    verdicts = measure([r.mutant for r in chosen], workloads=kept.workloads, jobs=options.jobs, tests=False)
    for result, verdict in zip(chosen, verdicts, strict=True):
        print(f"{verdict.key} {verdict.by or 'SURVIVES'} {verdict.where} ({_where(result.mutant)})")
        if not verdict.killed:
            said.append(f"{verdict.key} survives, but {result.verdict.by} killed it at {result.verdict.where}")
    return _end(said)


def _progress(total: int) -> Told:
    done = Counter[bool]()

    def told(verdict: Verdict) -> None:
        done[verdict.killed] += 1
        if not verdict.killed or done.total() % 20 == 0:
            word = f"{verdict.key} survives" if not verdict.killed else f"{done[True]} killed"
            print(f"{done.total()}/{total}: {word}", file=sys.stderr, flush=True)

    return told


def _end(complaints: Sequence[str]) -> int:
    for complaint in complaints:
        print(f"ci.mutants: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
