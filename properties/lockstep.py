"""The lockstep driver: one workload, engine and specification side by side, compared after every iteration.

What it checks: that every decision, block, row, queue, launch, token and counter of the engine is what ``model_sim`` says,
in the iteration in which it arises; that the engine keeps its own invariants; that everything is given back at the end; and
that each caller was told what the same request alone is told. The rung says how much of the engine is real, and brings the oracle
that knows what a request alone is told; the oracle feeds the specification, and the engine's tokens are only compared.

What it cannot check: a rule that is wrong on both sides, and what the rung replaces by something simpler. Why the checks have
teeth: each is proved by a fault that it sees alone or first (the matrix).

Two ways to run: the first finding ends the run (default), or every check is judged alone to the end (``judge_all``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import attrs

from engine.control.counters import Counters
from engine.control.record import Ledger, StepRecord
from engine.control.request import Refusal
from engine.trace import VOCAB, Shape, Submit, Workload, prompt_tokens
from model_sim.model import Model, Refused
from properties import diff
from properties.cached import Contents, salts_of
from properties.checks import ALL, Fact, Finding, finding
from properties.guard import CPU_SECONDS, Guard, Overtime
from properties.occurrences import Occurrences
from properties.play import Stop, play
from properties.rung_ledger import LedgerRung
from properties.rungs import MakeRung, Rung
from properties.solo import AffineOracle, Oracle, askable
from properties.solo_text import SILENT, Script, script
from properties.tally import Caller, Totals, judge

LINGERS = 32  # iterations that an engine may go on alone before the judging of all checks ends: nothing new comes of it


@attrs.frozen
class Step:
    """One iteration as it happened. ``record`` is None where the engine did not step or raised."""

    iteration: int  # from 1
    events: tuple[str, ...]  # applied before it
    step: dict[str, Any]  # what the specification did
    after: dict[str, Any]  # the specification's state after it
    record: StepRecord | None = None
    ledger: Ledger | None = None


@attrs.frozen
class Run:
    """What came of a workload. ``findings`` holds the first finding of each check that fired, in order of iteration."""

    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    occurred: Counter[str]
    callers: dict[int, Caller]
    late: tuple[str, ...] = ()  # events after the last iteration
    counters: Counters | None = None  # the engine's, when one ran
    left: Ledger | None = None  # the engine's state when the run ended, unless it raised

    @property
    def first(self) -> Finding | None:
        return self.findings[0] if self.findings else None


def run(
    workload: Workload,
    *,
    checks: frozenset[str] = ALL,
    make_rung: MakeRung | None = LedgerRung,
    until: int | None = None,
    judge_all: bool = False,
    cpu_seconds: float = CPU_SECONDS,
) -> Run:
    """Runs a workload. ``until`` stops after so many iterations; the end is then not judged. ``cpu_seconds``: for each call
    into the rung, in the main thread; one that takes more is given up, and found by ``raises``.

    Without a rung the specification runs alone: a timeline, and nothing to compare.
    """
    rung = None if make_rung is None else make_rung(workload.shape)
    with Guard(cpu_seconds) as guard:
        lockstep = Lockstep(workload, rung, checks, until, judge_all, guard)
        try:
            play(workload, lockstep)
            lockstep.finish()
        except Stop:
            pass
        finally:
            if rung is not None:
                lockstep.close(rung)
        return lockstep.result()


def model_of(shape: Shape) -> Model:
    return Model(
        blocks=shape.blocks,
        block_size=shape.block_size,
        rows=shape.rows,
        budget=shape.budget,
        max_model_len=shape.max_model_len,
        vocab=VOCAB,
        watermark=shape.watermark,
        max_waiting=shape.max_waiting,
        persistent_batch=shape.persistent_batch,
        prefix_cache=shape.prefix_cache,
        captures=shape.captures,
    )


class Lockstep:
    """A target that is both sides at once."""

    def __init__(
        self,
        workload: Workload,
        rung: Rung | None,
        checks: frozenset[str],
        until: int | None,
        judge_all: bool,
        guard: Guard,
    ) -> None:
        self._guard = guard
        self._checks = checks | {"raises"}  # nothing goes on after an exception, whoever is looking
        self._until, self._judge_all = until, judge_all
        self._rung = rung  # None once it raised, or when the specification runs alone
        self._oracle: Oracle = AffineOracle() if rung is None else rung.oracle
        self._shape = workload.shape
        self._model = model_of(workload.shape)
        self._limit = limit(workload)
        self._iteration = 0
        self._over_for = 0  # iterations since the specification had no work left
        self._submitted = 0
        self._failing = 0
        self._events: list[str] = []
        self._steps: list[Step] = []
        self._findings: dict[str, Finding] = {}
        self._callers: dict[int, Caller] = {}
        self._answers: dict[int, range] = {}  # all choices of the submission that a request is one of
        self._over: set[int] = set()  # ended, or asked to
        self._dead: dict[int, int] = {}  # requests whose row cannot be sampled, and at which token (from 1)
        self._totals = Totals()
        self._contents = Contents(salts_of(workload))
        self._occurrences = Occurrences(workload.shape)
        self._state: dict[str, Any] = self._model.state()

    # The target ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        if self._rung is None:
            return self._model.has_work
        engine = self._asked(self._rung)
        if engine == self._model.has_work or not self._watching("drain"):
            return engine or self._model.has_work
        sides = ("has work left", "has none")
        fact = Fact("work", *(sides if engine else sides[::-1]))
        self._found(Finding("drain", self._iteration, "only one side has work left", (fact,)))
        return engine or self._model.has_work

    def _asked(self, rung: Rung) -> bool:
        return bool(self._guarded(lambda: rung.has_work, max(1, self._iteration)))

    def note(self, label: str) -> None:
        self._events.append(label)

    def submit(self, event: Submit) -> None:
        first_id, self._submitted = self._submitted, self._submitted + event.n
        mine: object = None
        theirs: object
        refused: str | None = None
        stops = self._oracle.stop_ids(first_id, event)
        settled = event.max_tokens or most_tokens(self._shape, event.prompt_len)
        script = self._script(event, first_id, stops, settled)
        try:
            if (rung := self._rung) is not None:
                mine = list(
                    self._guarded(lambda: rung.submit(event, first_id, stops, script.stops), self._iteration + 1)
                )
        except Refusal as refusal:
            mine = refused = refusal.reason
        self._totals.submitted(event.n, refused)
        try:
            theirs = self._model.submit(
                prompt_tokens(event.prompt),
                event.max_tokens,
                priority=event.priority,
                stop_ids=stops,
                min_tokens=event.min_tokens,
                n=event.n,
                salt=event.salt or None,
                takes_hits=event.takes_hits,
                stop_after=script.after,
                text_fails=(event.fails("text"), *[None] * (event.n - 1)),
            )
            if (dead_at := event.fails("sampling")) is not None:
                self._dead[first_id] = dead_at
            for at, request in enumerate(theirs):
                text = script.texts[at] if script.texts else SILENT
                self._callers[request] = Caller.of(request, event, settled, stops, text)
                self._answers[request] = range(first_id, self._submitted)
            self._callers[first_id] = self._callers[first_id].failing(event)
            self._occurrences.accepted(event)
            if event.client == "leaves":
                self._occurrences.happened("left at once")
        except Refused as refusal:
            theirs = refusal.reason
            self._events[-1] = f"({self._events[-1]} {refusal.reason})"
            self._occurrences.refused(refusal.reason, event)
        if self._rung is not None and mine != theirs and self._watching("decisions"):
            fact = Fact(f"submit r{first_id}", _answer(mine), _answer(theirs))
            self._found(Finding("decisions", self._iteration + 1, "the door differs", (fact,)))

    def _script(self, event: Submit, first_id: int, stops: frozenset[int], max_tokens: int) -> Script:
        """What is asked for alone. The oracle is not asked about what the door refuses for its prompt or its length."""
        prompt = prompt_tokens(event.prompt)
        if not askable(prompt) or len(prompt) + max_tokens > self._shape.max_model_len or max_tokens < 1:
            return Script((), ())
        return script(self._oracle, first_id, event, stops, max_tokens, self._shape)

    def abort(self, request: int) -> None:
        if request in self._callers and request not in self._over:
            self._occurrences.abort(request, self._state["status"].get(request, "waiting"))
        else:
            self._occurrences.abort(request, "over")
            self._events[-1] = f"({self._events[-1]})"  # changes nothing, and the timeline says so
        if (rung := self._rung) is not None:
            self._guarded(lambda: rung.abort(request), self._iteration + 1)
        self._forget(request)

    def _forget(self, request: int) -> None:
        """Aborts a request on the specification's side; with it, where choices are one answer, the other choices."""
        shared = self._rung is not None and self._rung.shared
        for each in self._answers.get(request, ()) if shared else (request,):
            self._over.add(each)
            self._model.abort(each)

    def fail(self, count: int) -> None:
        self._failing += count

    def shutdown(self) -> None:
        requests = range(self._submitted)
        self._occurrences.happened("shutdown")
        if (rung := self._rung) is not None:
            self._guarded(lambda: rung.shutdown(requests), self._iteration + 1)
        for request in requests:
            self._over.add(request)
            self._model.abort(request)

    def step(self) -> None:
        self._iteration += 1
        fails, self._failing = self._failing > 0, max(0, self._failing - 1)
        before = self._state
        step: dict[str, Any] = {}
        if self._model.has_work:
            step = self._model.step(self._token, fails)
            self._state = self._model.state()
            self._occurrences.step(step, before, self._state)
        record: Any = None
        ledger: Any = None
        if (rung := self._rung) is not None and self._asked(rung):
            try:
                rung.expect(step, self._state, self._callers)
                record = self._guarded(lambda: rung.step(fails=fails), self._iteration)
                ledger = self._guarded(rung.ledger, self._iteration)
            finally:
                self._keep(step, record, ledger)
            self._guarded(lambda: self._compare(rung, record, ledger, step, before), self._iteration)
        else:
            self._keep(step, record, ledger)
        failed = {request for request, reason in step.get("finished", ()) if reason == "error"}
        for request, token in step.get("sampled", ()):
            if request not in failed:  # nobody is told a token whose text failed
                self._callers[request].tokens.append(token)
                for name in self._callers[request].told_now():
                    self._occurrences.happened(name)
        self._over.update(request for request, _ in step.get("finished", ()))
        if self._rung is not None and self._rung.shared:
            for request in sorted(failed):  # who is told of the failure asks for no more
                self._forget(request)
        if self._iteration == self._until:
            raise Stop
        self._over_for = 0 if self._model.has_work else self._over_for + 1
        if self._iteration >= self._limit or (self._judge_all and self._over_for > LINGERS):
            if self._watching("drain"):
                self._found(Finding("drain", self._iteration, f"work is left after {self._iteration} iterations"))
            raise Stop

    def _token(self, request: int, k: int) -> int | None:
        """What the specification is told (SPEC 14.1)."""
        return None if self._dead.get(request) == k + 1 else self._oracle.token(request, k)

    # Comparing ---------------------------------------------------------------------------------------------------

    def _keep(self, step: dict[str, Any], record: StepRecord | None, ledger: Ledger | None) -> None:
        self._steps.append(Step(self._iteration, tuple(self._events), step, self._state, record, ledger))
        self._events.clear()

    def _compare(
        self, rung: Rung, record: StepRecord, ledger: Ledger, step: dict[str, Any], before: dict[str, Any]
    ) -> None:
        self._totals.add(record, self._callers)
        if self._watching("audit"):
            messages = rung.audit()
            if messages:
                facts = tuple(Fact("audit", message, "") for message in messages[1:])
                self._found(Finding("audit", self._iteration, messages[0], facts))
        if step:
            for check, facts in self._diffs(rung, record, ledger, step, before):
                found = finding(check, self._iteration, facts)
                if found is not None:
                    self._found(found)
        if self._watching("counters"):
            found = finding("counters", self._iteration, self._totals.differ(rung.counters, record, self._callers))
            if found is not None:
                self._found(found)

    def _diffs(
        self, rung: Rung, record: StepRecord, ledger: Ledger, step: dict[str, Any], before: dict[str, Any]
    ) -> Iterator[tuple[str, tuple[Fact, ...]]]:
        if self._watching("decisions"):
            yield "decisions", diff.decisions(record, step)
        if self._watching("ledger"):
            cache = diff.cache(record, self._contents.name(ledger), ledger, step, self._state)
            yield "ledger", (*diff.ledger(record, ledger, step, self._state), *cache)
        if self._watching("rows"):
            yield "rows", diff.rows(record, ledger, step, before, self._state)
        if self._watching("replay"):
            yield "replay", diff.replay(record, step)
        for check, facts in rung.facts().items():
            if self._watching(check):
                yield check, facts
        if self._watching("tokens"):
            yield "tokens", diff.tokens(record, step, self._callers)
        if self._watching("text"):
            yield "text", diff.text(rung.told(record), step, self._callers)  # text is made on the way

    def finish(self) -> None:
        """Judges the end: everything given back, every caller told what the request alone is told."""
        if self._rung is None:
            return
        if self._watching("solo"):
            facts = tuple(fact for caller in self._callers.values() for fact in judge(caller, self._oracle))
            found = finding("solo", self._iteration, facts)
            if found is not None:
                self._found(found)
        rung = self._rung
        for check, facts in self._guarded(rung.closing, self._iteration).items():
            if self._watching(check) and (found := finding(check, self._iteration, facts)) is not None:
                self._found(found)
        if self._watching("drain"):
            left = self._guarded(rung.ledger, self._iteration)
            blank = len(self._model.state()["blank"])
            held = self._guarded(lambda: _held_at_end(left, blank), self._iteration)
            found = finding("drain", self._iteration, held)
            if found is not None:
                self._found(found)

    def _watching(self, check: str) -> bool:
        return check in self._checks and check not in self._findings

    def _found(self, found: Finding) -> None:
        self._findings[found.check] = found
        if not self._judge_all:
            raise Stop

    def _guarded(self, call: Callable[[], Any], iteration: int) -> Any:
        """Any exception but the door's is a finding, and so is a call without end; the engine is left alone after it."""
        try:
            return self._guard(call)
        except (Refusal, Stop):
            raise
        except (Exception, Overtime) as error:  # the engine under test may raise whatever it likes
            self._rung = None
            self._findings.setdefault("raises", Finding("raises", iteration, self._guard.told(error)))
            raise Stop from error

    def close(self, rung: Rung) -> None:
        """Gives up what the rung holds, however the run ended."""
        with suppress(Stop):
            self._guarded(rung.close, max(1, self._iteration))

    def result(self) -> Run:
        rung, counters, left = self._rung, None, None
        occurred, late = self._occurrences.counts(), tuple(self._events)
        if rung is not None:
            with suppress(Stop):
                counters, left = self._guarded(lambda: (rung.counters, rung.ledger()), max(1, self._iteration))
            occurred.update(rung.happened())
        found = sorted(self._findings.values(), key=lambda f: f.iteration)  # stable: ties stay in order of finding
        return Run(tuple(self._steps), tuple(found), occurred, self._callers, late, counters, left)


def most_tokens(shape: Shape, prompt_len: int) -> int:
    """What an absent max_tokens means: the most that both limits allow (rule 1)."""
    return min(shape.max_model_len - prompt_len, shape.blocks * shape.block_size + 1 - prompt_len)


def limit(workload: Workload) -> int:
    """More iterations than any lawful run of this workload needs: a livelock ends here."""
    longest = workload.shape.max_model_len
    tokens = sum(
        event.n * min(longest, event.prompt_len + (event.max_tokens or longest))
        for event in workload.events
        if isinstance(event, Submit)
    )
    return 64 + sum(event.wait for event in workload.events) + 10 * tokens


def _held_at_end(left: Ledger, blocks: int) -> tuple[Fact, ...]:
    return tuple(
        Fact(name, mine, theirs)
        for name, mine, theirs in (
            ("waiting", str(left.waiting), "()"),
            ("running", str(left.running), "()"),
            ("tables", str(left.tables), "{}"),
            ("rows", str(left.rows), "{}"),
            ("blank blocks", str(len(left.blank)), str(blocks)),
        )
        if mine != theirs
    )


def _answer(answer: object) -> str:
    return f"refused: {answer}" if isinstance(answer, str) else f"accepted {answer}"
