"""The driver of a foreign scheduler: plays a workload against a ``Subject`` and checks what must hold of any scheduler.

It is the same interpreter of workloads as in the lockstep, and what comes out is the same ``Run``, so that reports, pages, the
reducer and the hunter take it as it is; the side that is shown is the subject's own. What it cannot see is a decision that is
lawful for some scheduler but not the one that was meant: for that there must be a specification to compare with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from engine.trace import Shape, Submit, Workload
from properties import subject_checks as must
from properties.checks import ALL, Fact, Finding
from properties.guard import CPU_SECONDS, Guard, Overtime
from properties.lockstep import Run, Step, limit
from properties.play import Stop, play
from properties.solo_text import SILENT
from properties.subject import Ask, Batch, ComputeFailed, Holdings, MakeSubject, Promises, Refused, Subject, Told, judge
from properties.subject_cache import Alone, Cache
from properties.subject_words import Known, asked, state_of, step_of
from properties.tally import Caller

PATIENCE = 5  # iterations in which nothing is computed, told or given back, before it counts as standing still

FLOORS: Mapping[str, float] = {
    "computed": 0.47,
    "ran beside another": 0.2,
    "waited": 0.3,
    "chunked": 0.2,
    "row reused": 0.3,
    "block reused": 0.3,
    "aborted while waiting": 0.06,
    "aborted while running": 0.06,
    "finished: length": 0.4,
    "finished: stop": 0.2,
}
"""In which share of the workloads each must happen: half of what was measured, rounded down. A hunt that reached less of a
scheduler proves nothing about it."""
IF_PROMISED: Mapping[str, float] = {"preempted": 0.05, "failed step": 0.09, "row without a token": 0.02}


@attrs.frozen
class SubjectRun(Run):
    """A run with one side only: the subject's own."""


def floors_for(make: MakeSubject, shape: Shape) -> Mapping[str, float]:
    """A subject that does not preempt, or that survives no failure, cannot reach those. ``shape`` is one that it was
    run with; one that cannot be made for it was found already, as ``raises``, and is asked for nothing more."""
    try:
        promises = make(shape).promises
    except Exception:  # noqa: BLE001 - a foreign scheduler may raise anything
        return FLOORS
    kept = {
        "preempted": promises.preempts,
        "failed step": promises.survives,
        "row without a token": promises.survives_rows,
    }
    return {**FLOORS, **{name: share for name, share in IF_PROMISED.items() if kept[name]}}


def run_subject(
    workload: Workload, make: MakeSubject, *, until: int | None = None, cpu_seconds: float = CPU_SECONDS
) -> SubjectRun:
    """Runs a workload to its end or to the first finding. A call into the subject that takes more than ``cpu_seconds`` of CPU
    time is one, of the check ``raises``. Raises ``NoSubject`` when ``make`` makes something else."""
    with Guard(cpu_seconds) as guard:
        watch = Watch(workload, until, guard)
        try:
            watch.begin(make)
            play(workload, watch)
            watch.finish()
        except Stop:
            pass
        return watch.result()


class Watch:
    """The target of ``play``, from ``begin`` on."""

    _subject: Subject
    _promises: Promises

    def __init__(self, workload: Workload, until: int | None, guard: Guard) -> None:
        self._shape, self._until, self._guard = workload.shape, until, guard
        self._cache = Cache(workload.shape.block_size)
        self._known: dict[int, Known] = {}
        self._callers: dict[int, Caller] = {}
        self._held = Holdings((), (), {}, {}, ())
        self._batch: Batch | None = None
        self._again: set[int] = set()  # started again in this iteration
        self._sampled: dict[int, int | None] = {}
        self._failing = self._iteration = self._idle = self._submitted = 0
        self._raised = False
        self._events: list[str] = []
        self._steps: list[Step] = []
        self._finding: Finding | None = None
        self._occurred: Counter[str] = Counter()
        self._used: set[tuple[str, int]] = set()
        self._limit = limit(workload)

    def begin(self, make: MakeSubject) -> None:
        """Raises ``NoSubject``."""
        self._subject = self._guarded(lambda: make(self._shape))
        judge(self._subject)
        self._promises = self._subject.promises
        self._held = self._ledger()

    # The target ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._guarded(lambda: self._subject.has_work))

    def note(self, label: str) -> None:
        self._events.append(label)

    def submit(self, event: Submit) -> None:
        """Only its first choice fails, and only where that was promised; a text that raises has no words here."""
        fails_at = event.fails("sampling") if self._promises.survives_rows else None
        if event.fail_at is not None and fails_at is None:
            self._events[-1] += f" (fails by {event.fail_by})"
        for request in range(self._submitted, self._submitted + event.n):
            ask = asked(event, request, self._shape)
            reason = "not offered" if ask is None else self._offer(ask, event)
            if reason is not None:
                self._events[-1] += f" (r{request} {reason})"
            elif request == self._submitted:
                self._known[request].fails_at = fails_at
        self._submitted += event.n

    def _offer(self, ask: Ask, event: Submit) -> str | None:
        """The reason of a refusal, or None."""
        try:
            self._guarded(lambda: self._subject.submit(ask))
        except Refused as refused:
            self._occurred["refused"] += 1
            return f"refused: {refused}"
        self._known[ask.request] = Known(ask, Alone(ask), list(ask.prompt))
        self._callers[ask.request] = Caller.of(ask.request, event, ask.max_tokens, ask.stop_ids, SILENT)
        return None

    def abort(self, request: int) -> None:
        known = self._known.get(request)
        if known is None:
            self._events[-1] = f"({self._events[-1]})"
            return
        if not known.ends:
            status = "running" if request in self._held.rows else "waiting"
            self._occurred[f"aborted while {status}"] += not known.aborted
            known.aborted = True
        self._guarded(lambda: self._subject.abort(request))

    def fail(self, count: int) -> None:
        if self._promises.survives:
            self._failing += count
        else:
            self._events[-1] = f"({self._events[-1]})"

    def shutdown(self) -> None:
        for request, known in self._known.items():
            if not known.ends:
                self.abort(request)

    def step(self) -> None:
        self._iteration += 1
        self._batch, self._sampled, self._raised = None, {}, False
        before = self._held
        told: Told = self._guarded(lambda: self._subject.step(self._compute))
        if self._finding is not None:  # found while it computed, and the subject contained the exception
            raise Stop
        self._say("raises", must.told(told))
        self._held = self._ledger()
        self._tell(told)
        self._keep(told, before)
        self._judge(told, before)
        if self._iteration == self._until:
            raise Stop
        if self._iteration >= self._limit:
            self._found("drain", f"work is left after {self._limit} iterations")

    # The model that is played ----------------------------------------------------------------------------------------

    def _compute(self, batch: Batch) -> Mapping[int, int | None]:
        if self._batch is not None:
            self._found("raises", "compute is called twice in one iteration")
        self._batch = batch
        self._say("raises", must.plan(batch, self._shape))
        unknown = [work.request for work in batch.work if work.request not in self._known]
        self._say("raises", (f"r{request} is computed, but was never accepted" for request in unknown))
        self._cache.copy(batch)
        if self._failing:
            self._failing -= 1
            self._raised = True
            raise ComputeFailed("injected by the workload")
        self._say("decisions", must.budget(batch, self._shape))
        self._say("writes", must.writes(batch, self._still_held(batch), self._shape.block_size))
        for work in batch.work:
            known = self._known[work.request]
            self._say("tokens", must.tokens(work, known.tokens, known.computed, self._promises))
        for work in batch.work:
            self._cache.write(work, self._known[work.request].alone)
        for work in batch.work:
            self._say("writes", self._cache.wrong(work, self._known[work.request].alone))
            if work.samples:
                known = self._known[work.request]
                known.dead = len(known.generated) + 1 == known.fails_at
                self._sampled[work.request] = None if known.dead else self._cache.read(work)
        return dict(self._sampled)

    def _ledger(self) -> Holdings:
        held: Holdings = self._guarded(self._subject.ledger)
        self._say("raises", must.holdings(held))
        return held

    def _still_held(self, batch: Batch) -> dict[int, tuple[int, ...]]:
        """Tables that were held before this iteration and are still told of: within it, somebody may have given back."""
        now = self._ledger()
        over = {request for request, known in self._known.items() if known.ends}
        return {r: table for r, table in now.tables.items() if self._held.tables.get(r) == table and r not in over}

    # Judging ---------------------------------------------------------------------------------------------------------

    def _tell(self, told: Told) -> None:
        """Updates what is known, before anything is judged."""
        self._again = set()
        for request in told.preempted:
            if request in self._known:
                self._known[request].computed = 0
        for work in () if self._batch is None or self._raised else self._batch.work:
            known = self._known[work.request]
            if work.start < known.computed:
                self._again.add(work.request)
            known.computed = work.start + len(work.tokens)
            if (token := self._sampled.get(work.request)) is not None:
                known.tokens.append(token)
                self._callers[work.request].tokens.append(token)
        for request, reason in told.ended:
            if request in self._known:
                self._known[request].ends.append(reason)

    def _judge(self, told: Told, before: Holdings) -> None:
        work = () if self._batch is None else self._batch.work
        complaints = self._guarded(self._subject.audit)
        self._say("raises", must.audit(complaints))
        self._say("audit", complaints)
        if not self._promises.preempts:
            self._say("decisions", (f"r{request} is set back" for request in told.preempted))
        self._say("decisions", (f"r{r} starts again, but is not told to be set back" for r in sorted(self._again)))
        fresh = [item.request for item in work if not self._known[item.request].started]
        for request in fresh:
            self._known[request].started = True
        never = [
            request for request in self._held.waiting if request in self._known and not self._known[request].started
        ]
        priority = {request: known.ask.priority for request, known in self._known.items()}
        self._say("decisions", must.order(fresh, never, self._promises, priority))
        self._say("ledger", must.blocks(self._held, self._shape, self._promises))
        self._say("rows", must.rows(self._held, self._shape))
        self._say("solo", self._endings(told))
        dead = [request for request, known in self._known.items() if known.dead and not known.ends]
        self._say("solo", (f"r{request} has no token in this iteration, but is not told its end" for request in dead))
        deaf = [request for request, known in self._known.items() if known.aborted and not known.ends]
        self._say(
            "solo", (f"r{request} was aborted before this iteration, but is not told its end" for request in deaf)
        )
        moved = bool(work or told.ended or told.preempted or self._held != before)
        self._idle = 0 if moved else self._idle + 1
        if self._idle >= PATIENCE:
            names = " ".join(f"r{request}" for request in (*self._held.waiting, *self._held.running))
            self._found("drain", f"nothing moves for {PATIENCE} iterations, with work left: {names or 'nobody listed'}")

    def _endings(self, told: Told) -> Iterable[str]:
        for request, reason in told.ended:
            known = self._known.get(request)
            if known is None:
                yield f"r{request} ends, but was never accepted"
            elif len(known.ends) > 1:
                yield f"r{request} is told its end {len(known.ends)} times: {', '.join(known.ends)}"
            else:
                yield from self._ending(known, reason)

    def _ending(self, known: Known, reason: str) -> Iterable[str]:
        name, (tokens, alone) = f"r{known.ask.request}", known.alone.outcome()
        if reason == "abort" and not known.aborted:
            yield f"{name} ends with abort, but nobody aborted it"
        elif reason != "abort" and known.aborted:
            yield f"{name} was aborted before this iteration, but ends with {reason}"
        elif known.dead and reason != "error" and not known.aborted:
            yield f"{name} has no token in this iteration, but ends with {reason}"
        elif reason == "error" and not self._raised and not known.dead:
            yield f"{name} ends with error, but nothing raised and it has its token"
        elif reason not in ("abort", "error") and (known.generated, reason) != (tokens, alone):
            yield f"{name} is told {known.generated} and {reason}, alone {tokens} and {alone}"
        elif known.generated != tokens[: len(known.generated)]:
            yield f"{name} is told {known.generated}, alone {tokens}"

    def finish(self) -> None:
        self._say("solo", (f"r{r} was never told its end" for r, known in self._known.items() if not known.ends))
        left = self._held
        still = {
            "waits": left.waiting,
            "runs": left.running,
            "holds blocks": [request for request, table in left.tables.items() if table],
            "has a row": list(left.rows),
        }
        self._say("drain", (f"r{request} still {what} at the end" for what, held in still.items() for request in held))
        if len(left.free) != self._shape.blocks:
            self._found("drain", f"{len(left.free)} of {self._shape.blocks} blocks are free at the end")

    def _say(self, check: str, complaints: Iterable[str]) -> None:
        said = list(complaints)
        if said:
            self._found(check, said[0], tuple(Fact("also", sentence, "") for sentence in said[1:]))

    def _found(self, check: str, headline: str, facts: tuple[Fact, ...] = ()) -> None:
        assert check in ALL
        self._iteration = max(1, self._iteration)
        if self._finding is None:  # the first one counts, whatever a subject made of the exception
            self._finding = Finding(check, self._iteration, headline, facts)
        raise Stop

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Whatever the subject raises, except a refusal, is a finding; so is a call without end."""
        try:
            return self._guard(call)
        except (Refused, Stop):
            raise
        except Overtime as error:
            self._found("raises", self._guard.told(error))
        except Exception as error:  # noqa: BLE001 - a foreign scheduler may raise anything
            self._found("raises", f"{type(error).__name__}: {error}")

    # What is kept ----------------------------------------------------------------------------------------------------

    def _keep(self, told: Told, before: Holdings) -> None:
        step = step_of(self._held, before, self._batch, told, self._known)
        after = state_of(self._held, self._known)
        step["error"] = self._raised
        step["sampled"] = sorted((request, token) for request, token in self._sampled.items() if token is not None)
        self._steps.append(Step(self._iteration, tuple(self._events), step, after))
        self._events.clear()
        self._count(step, after)

    def _count(self, step: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        seen = self._occurred
        seen["computed"] += bool(step["chunks"] or step["decodes"])
        seen["failed step"] += self._raised
        seen["row without a token"] += None in self._sampled.values()
        seen["copied"] += bool(self._batch and self._batch.copies)
        seen["ran beside another"] += len(after["rows"]) > 1
        seen["waited"] += bool(after["waiting"])
        seen["chunked"] += sum(not samples for *_, samples in step["chunks"])
        seen["preempted"] += len(step["preempted"])
        for _, row, table in step["admitted"]:
            for kind, place in (("row", row), *(("block", block) for block in table)):
                seen[f"{kind} reused"] += (kind, place) in self._used
                self._used.add((kind, place))
        for _, reason in step["finished"]:
            seen[f"finished: {reason}"] += 1

    def result(self) -> SubjectRun:
        if self._finding is not None and (not self._steps or self._steps[-1].iteration < self._finding.iteration):
            none: dict[str, Any] = {}
            after = state_of(self._held, self._known)
            self._steps.append(Step(self._finding.iteration, tuple(self._events), none, after))
            self._events.clear()
        found = () if self._finding is None else (self._finding,)
        return SubjectRun(tuple(self._steps), found, self._occurred, self._callers, tuple(self._events))
