"""The harness's own bookkeeping: what each caller was told, and what the engine's totals must add up to.

Callers are judged against the solo oracle, totals against the engine's own records. Whether the records are right is for
the other checks; so a wrong decision is not reported here a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs

from engine.control.counters import Counters
from engine.control.plan import Replay
from engine.control.record import Finished, StepRecord
from engine.trace import Submit, prompt_tokens
from properties import solo
from properties.checks import Fact, differing
from properties.solo_text import SoloText


@attrs.define
class Caller:
    """One accepted request from the caller's side. ``tokens`` is prompt plus generated, as the specification has it."""

    request: int
    prompt_len: int
    tokens: list[int]
    max_tokens: int
    min_tokens: int
    stops: frozenset[int]
    text: SoloText  # the whole of it, and how much is told when
    fails: tuple[int, str] | None = None  # at which generated token, and how
    in_failed_step: bool = False
    delivered: list[int] = attrs.field(factory=list)  # as the engine's records had it
    ends: list[Finished] = attrs.field(factory=list)
    preempted: int = 0
    recomputed: int = 0
    replayed: int = 0
    first: int | None = None
    cached: int = 0  # tokens that the first admission found

    @classmethod
    def of(cls, request: int, event: Submit, max_tokens: int, stops: frozenset[int], text: SoloText) -> Caller:
        prompt = list(prompt_tokens(event.prompt))
        return cls(request, len(prompt), prompt, max_tokens, event.min_tokens, stops, text)

    def failing(self, event: Submit) -> Caller:
        """As the first choice of ``event``, the one that its failure is meant for."""
        return self if event.fail_at is None else attrs.evolve(self, fails=(event.fail_at, event.fail_by))

    def told_now(self) -> Iterator[str]:
        """What its last token did to its text, by name, for the floors."""
        generated, text = len(self.tokens) - self.prompt_len, self.text
        if generated == text.after:
            yield "stopped by a string"
        before, now = text.told(generated - 1), text.told(generated)
        if now == before and now != text.text:
            yield "text held back"
        if "\ufffd" in now[len(before) :]:
            yield "character told as U+FFFD"


def judge(caller: Caller, oracle: solo.Oracle) -> tuple[Fact, ...]:
    """Against the request alone, which has the same failure of its own. An abort or a failed step may cut the run short: then a
    prefix was told, and that is said."""
    alone = solo.outcome(
        oracle, caller.request, caller.stops, caller.min_tokens, caller.max_tokens, caller.text, caller.fails
    )
    name = f"r{caller.request}"
    if len(caller.ends) != 1:
        return (Fact(f"{name} ends", f"told {len(caller.ends)} times", "told once"),)
    end = caller.ends[0]
    told = tuple(caller.delivered)
    cut = end.reason == "abort" or (end.reason == "error" and caller.in_failed_step)
    usage = (end.facts.prompt_tokens, end.facts.generated_tokens) if end.facts else None
    return differing(
        [
            (f"{name} tokens", told, alone.tokens[: len(told)] if cut else alone.tokens),
            (f"{name} reason", end.reason, end.reason if cut else alone.reason),
            (f"{name} stopped by", end.stop, None if cut else alone.stop),
            (f"{name} usage", usage, (caller.prompt_len, len(told))),
        ]
    )


def zero() -> Counters:
    """Totals of an engine that did nothing. Written out here, since where the engine's own begin is for the check to judge."""
    totals = Counters()
    for item in attrs.fields(Counters):
        setattr(totals, item.name, Counter() if isinstance(getattr(totals, item.name), Counter) else 0)
    return totals


@attrs.define
class Totals:
    """What ``engine.counters`` must show, summed from records and refusals."""

    expected: Counters = attrs.field(factory=zero)

    def submitted(self, n: int, refused: str | None) -> None:
        self.expected.submitted += n
        if refused is not None:
            self.expected.refused[refused] += n

    def add(self, record: StepRecord, callers: dict[int, Caller]) -> None:
        """Sums one record, and notes in ``callers`` what each of them was told."""
        total, plan = self.expected, record.plan
        total.iterations += 1
        total.preemptions += len(record.preempted)
        seated = {seat.request for seat in plan.seated}
        total.prefix_hit_tokens += sum(chunk.start for chunk in plan.chunks if chunk.request in seated)
        for request in record.preempted:
            if request in callers:
                callers[request].preempted += 1
        starts = {chunk.request: chunk.start for chunk in plan.chunks}
        for seat in plan.seated:
            if seat.request in callers and callers[seat.request].first is None:
                callers[seat.request].first = record.iteration
                callers[seat.request].cached = starts.get(seat.request, 0)
        if record.error is None:
            self._forward(record, callers)
        else:
            total.failed_steps += 1
            for end in record.finished:
                if end.request in callers:
                    callers[end.request].in_failed_step = True
        for end in (*record.aborted, *record.finished):
            total.finished[end.reason] += 1
            if end.request in callers:
                callers[end.request].ends.append(end)

    def _forward(self, record: StepRecord, callers: dict[int, Caller]) -> None:
        total, plan = self.expected, record.plan
        total.forward_iterations += bool(plan.chunks or plan.decodes)
        for chunk in plan.chunks:
            total.prefill_tokens += len(chunk.tokens)
            caller = callers.get(chunk.request)
            if caller is not None and caller.preempted:
                caller.recomputed += len(chunk.tokens)
                total.recomputed_tokens += len(chunk.tokens)
        total.forward_tokens += sum(len(chunk.tokens) for chunk in plan.chunks) + len(plan.decodes)
        total.row_moves += len(plan.moves)
        if plan.decodes:
            total.decode_rows[len(plan.decodes)] += 1
        if isinstance(plan.launch, Replay):
            total.replays[plan.launch.rows, plan.launch.width] += 1
            total.padded_rows += plan.launch.padding
            for decode in plan.decodes:
                if decode.request in callers:
                    callers[decode.request].replayed += 1
        elif plan.launch is not None:
            total.eager[plan.launch.reason] += 1
        total.sampled_tokens += len(record.sampled)
        for request, got in record.sampled:
            if request in callers:
                callers[request].delivered.append(got.token)

    def differ(self, counters: Counters, record: StepRecord, callers: dict[int, Caller]) -> tuple[Fact, ...]:
        pairs: list[tuple[str, object, object]] = []
        if counters != self.expected:
            names = [item.name for item in attrs.fields(Counters)]
            pairs += [(name, _plain(getattr(counters, name)), _plain(getattr(self.expected, name))) for name in names]
        for end in (*record.aborted, *record.finished):
            caller = callers.get(end.request)
            if caller is None or end.facts is None:
                continue
            facts = end.facts
            pairs.append(
                (
                    f"facts of r{end.request}",
                    (
                        facts.preemptions,
                        facts.recomputed_tokens,
                        facts.replayed_steps,
                        facts.first_iteration,
                        facts.cached_tokens,
                    ),
                    (caller.preempted, caller.recomputed, caller.replayed, caller.first, caller.cached),
                )
            )
            pairs.append((f"last iteration of r{end.request}", facts.last_iteration, record.iteration))
        return differing(pairs)


def _plain(value: object) -> object:
    return dict(sorted(value.items())) if isinstance(value, Counter) else value
