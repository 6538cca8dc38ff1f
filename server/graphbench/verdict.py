"""The verdict over two arms: ``worse`` is what the capture did, ``void`` is why this pair of runs cannot say anything.

A comparison that was not crowded, or in which the arms did different work, would come out equal whatever the graphs do;
so it fails too, under its own kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import attrs

from server.bench.summary import Summary, quantile
from server.graphbench.clients import Said
from server.graphbench.readings import Happened

REDRAWS = 400


@attrs.frozen
class Paced:
    """An open-loop pass of one arm at one rate. ``gaps``: seconds between tokens, by request; none of a failed one."""

    rate: float
    summary: Summary
    gaps: tuple[tuple[float, ...], ...]
    happened: Happened

    @property
    def samples(self) -> int:
        return sum(map(len, self.gaps))


@attrs.frozen
class ArmRun:
    """Everything that one arm gave. ``alone`` is empty when no pass without neighbours was asked for. ``compute``: the compute
    path, in words; with ``computes_otherwise`` the arm was told to have one of its own."""

    name: str
    replays: bool  # whether it was told to replay
    rows: int  # max_num_seqs
    boot_s: float
    memory_mib: float | None
    promises: Mapping[str, object]  # what the server said at start
    crowd: Sequence[Said]
    crowd_happened: Happened
    alone: Sequence[Said] = ()
    paced: Sequence[Paced] = ()
    compute: str = ""
    computes_otherwise: bool = False

    @property
    def happened(self) -> tuple[Happened, ...]:
        return (self.crowd_happened, *(paced.happened for paced in self.paced))


@attrs.frozen
class Complaint:
    """``kind`` is "worse" or "void"; ``check`` a stable word; ``text`` names the arms and the numbers."""

    kind: str
    check: str
    text: str


@attrs.frozen
class Tolerance:
    """``tail``: the largest accepted ratio of the ITL p99, above which its whole interval must lie to count as worse.
    ``samples``: gaps that each rate needs for a p99."""

    tail: float = 1.25
    samples: int = 200


@attrs.frozen
class Ratio:
    """``low`` .. ``high``: the middle 90 % of what redrawn requests give."""

    value: float
    low: float
    high: float


def judge(graphs: ArmRun, other: ArmRun, tolerance: Tolerance) -> list[Complaint]:
    """``graphs`` is the arm that replays; ``other`` what it is compared with."""
    return [*_void(graphs, other, tolerance), *_worse(graphs, other, tolerance)]


def promised_equal(one: ArmRun, other: ArmRun) -> bool:
    """Whether both must give the same bytes: not where one was told to compute otherwise, and does."""
    return one.compute == other.compute or not (one.computes_otherwise or other.computes_otherwise)


def _void(graphs: ArmRun, other: ArmRun, tolerance: Tolerance) -> list[Complaint]:
    found: list[Complaint] = []

    def void(check: str, text: str) -> None:
        found.append(Complaint("void", check, text))

    for arm in (graphs, other):
        failed = [said.error for said in (*arm.crowd, *arm.alone) if said.error is not None]
        failed += [error for paced in arm.paced for error in paced.summary.errors]
        if failed:
            void("failed", f"{arm.name}: {len(failed)} requests failed, the first with {failed[0]}")
        wanted = min(arm.rows, len(arm.crowd))
        if arm.crowd_happened.peak_rows < wanted:
            void("not crowded", f"{arm.name}: at most {arm.crowd_happened.peak_rows} of {wanted} rows decoded at once")
        for paced in arm.paced:
            if paced.samples < tolerance.samples:
                text = f"{paced.samples} inter-token samples, {tolerance.samples} are needed for a p99"
                void("too few samples", f"{arm.name} at {paced.rate:g}/s: {text}")
    if not graphs.crowd_happened.replayed:
        void("nothing replayed", f"{graphs.name} replayed none of {graphs.crowd_happened.decode_steps} decode steps")
    if other.crowd_happened.replayed and not other.replays:
        void("not eager", f"{other.name} replayed {other.crowd_happened.replayed} steps, but was told to replay none")
    if graphs.compute != other.compute and promised_equal(graphs, other):
        void("different compute", f"{graphs.name} computes on {graphs.compute}, {other.name} on {other.compute}")
    for mine, theirs in zip(graphs.happened, other.happened, strict=True):
        if mine.sampled_tokens != theirs.sampled_tokens:
            tokens = f"{graphs.name} sampled {mine.sampled_tokens} tokens, {other.name} {theirs.sampled_tokens}"
            void("different work", tokens)
    return found


def _worse(graphs: ArmRun, other: ArmRun, tolerance: Tolerance) -> list[Complaint]:
    found: list[Complaint] = []

    def worse(check: str, text: str) -> None:
        found.append(Complaint("worse", check, text))

    for name, mine, theirs in (("crowd", graphs.crowd, other.crowd), ("alone", graphs.alone, other.alone)):
        if promised_equal(graphs, other) and (different := answered_differently(mine, theirs)):
            worse("answers differ", f"{name}: {_clients(different)} differ between {graphs.name} and {other.name}")
    for arm in (graphs, other):
        if arm.alone and (different := answered_differently(arm.crowd, arm.alone)):
            worse(
                "crowd differs from alone", f"{arm.name}: {_clients(different)} got another answer without neighbours"
            )
    recorded = sum(happened.recorded for happened in graphs.happened)
    if recorded:
        worse("recorded while serving", f"{graphs.name} recorded {recorded} graphs after it was ready")
    steps = sum(happened.decode_steps for happened in graphs.happened)
    replayed = sum(happened.replayed for happened in graphs.happened)
    if replayed < steps:
        why: dict[str, int] = {}
        for happened in graphs.happened:
            for reason, count in happened.eager.items():
                why[reason] = why.get(reason, 0) + count
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items()))
        worse("not every step replayed", f"{graphs.name} replayed {replayed} of {steps} decode steps ({reasons})")
    for paced, compared in zip(graphs.paced, other.paced, strict=True):
        tail = ratio_of(paced, compared, 99)
        if tail is not None and tail.low > tolerance.tail:
            told = (
                f"{tail.value:.2f} times that of {other.name} (at least {tail.low:.2f}), allowed is {tolerance.tail:g}"
            )
            worse("tail worse", f"at {paced.rate:g}/s: ITL p99 of {graphs.name} is {told}")
    return found


def ratio_of(mine: Paced, theirs: Paced, percent: float) -> Ratio | None:
    """A quantile of the gaps between tokens over the other arm's, with where it lies in 90 of 100 redraws.

    Both arms were asked the same requests at the same moments, so requests are redrawn, in pairs: the gaps of one request
    are no independent samples. One slow moment of the machine widens the interval instead of being a verdict.
    """
    pairs = [(a, b) for a, b in zip(mine.gaps, theirs.gaps, strict=False) if a and b]
    below = _quantile([b for _, b in pairs], percent)
    if not below:
        return None
    draw = random.Random(0)
    redrawn = []
    for _ in range(REDRAWS):
        chosen = draw.choices(pairs, k=len(pairs))
        redrawn.append(_quantile([a for a, _ in chosen], percent) / _quantile([b for _, b in chosen], percent))
    redrawn.sort()
    value = _quantile([a for a, _ in pairs], percent) / below
    return Ratio(value, redrawn[REDRAWS // 20], redrawn[-1 - REDRAWS // 20])


def _quantile(gaps: Iterable[Sequence[float]], percent: float) -> float:
    values = [gap for some in gaps for gap in some]
    return quantile(values, percent) if values else 0.0


def unequal(mine: Sequence[Said], theirs: Sequence[Said]) -> list[int]:
    """Clients that were told something else. A failed request differs from every answer."""
    if not mine or not theirs:
        return []
    return [n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b or a.error is not None]


def answered_differently(mine: Sequence[Said], theirs: Sequence[Said]) -> list[int]:
    """Of those, the ones that both sides did answer: a failed request is a complaint of its own."""
    return [n for n in unequal(mine, theirs) if mine[n].error is None and theirs[n].error is None]


def _clients(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
    return f"the answers of {len(numbers)} clients ({shown})"
