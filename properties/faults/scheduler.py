"""Faults of an iteration: reaping, admission, budget, appending and ending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from properties.arming import Fault, in_area, instead, line

SCHEDULER = "engine.control.scheduler:Scheduler"


def _reaps_one_iteration_late(reap: Callable[..., Any]) -> Any:
    seen: set[int] = set()

    def faulty(scheduler: Any) -> Any:
        fresh = [r for r in scheduler.running if r.status == "finished" and r.id not in seen]
        seen.update(r.id for r in fresh)
        scheduler.running = [r for r in scheduler.running if r not in fresh]
        result = reap(scheduler)
        scheduler.running = sorted([*scheduler.running, *fresh], key=lambda r: r.order)
        return result

    return faulty


def _second_abort_raises(abort: Callable[..., None]) -> Any:
    def faulty(scheduler: Any, request_id: int) -> None:
        if scheduler.requests[request_id].aborted:
            raise RuntimeError(f"request {request_id} is already aborted")
        abort(scheduler, request_id)

    return faulty


def _forgets_aborts_of_preempted(abort: Callable[..., None]) -> Any:
    def faulty(scheduler: Any, request_id: int) -> None:
        request = scheduler.requests.get(request_id)
        if request is None or not (request.preemptions and request.status == "waiting"):
            abort(scheduler, request_id)

    return faulty


FAULTS = in_area(
    "scheduler",
    Fault(
        "S01",
        "a row is enough to be admitted, blocks or not",
        ("raises",),
        instead(SCHEDULER, "_fits", lambda _: lambda scheduler, request, hits: True),
        rules=("8.2",),
        needs="pool exhausted",
    ),
    Fault(
        "S02",
        "admission looks at the first chunk instead of the whole context",
        ("raises",),
        line(SCHEDULER, "_fits", "request.num_tokens", "min(request.num_tokens, self.limits.max_num_seqs)"),
        source="vllm-project/vllm#21809",
        rules=("8.2",),
        needs="pool exhausted",
    ),
    Fault(
        "S03",
        "a head that does not fit is overtaken",
        ("decisions", "ledger"),
        line(
            SCHEDULER,
            "_admit",
            "request = self.waiting[0]",
            "request = next((r for r in self.waiting if self._fits(r, self._hits(r))), self.waiting[0])",
        ),
        rules=("8.4",),
        needs="pool exhausted",
    ),
    Fault(
        "S05",
        "a finished request stays one iteration too long",
        ("decisions", "ledger"),
        instead(SCHEDULER, "_reap", _reaps_one_iteration_late),
        rules=("4.1",),
    ),
    Fault(
        "S06",
        "decoding rows do not count against the budget",
        ("decisions",),
        line(
            SCHEDULER, "plan", "self.limits.max_num_batched_tokens - len(decodes)", "self.limits.max_num_batched_tokens"
        ),
        rules=("9.1", "9.2"),
        needs="budget exhausted",
    ),
    Fault(
        "S09",
        "one token more than max_tokens",
        ("decisions", "solo"),
        line(SCHEDULER, "_append", "request.generated >= request.max_tokens", "request.generated > request.max_tokens"),
        rules=("13.3",),
        needs="finished: length",
    ),
    Fault(
        "S10",
        "a stop at the last token is reported as length",
        ("decisions", "solo"),
        line(
            SCHEDULER,
            "_append",
            "if may_stop and token",
            "if request.generated < request.max_tokens and may_stop and token",
        ),
        rules=("13.1", "13.3"),
        needs="finished: stop",
    ),
    Fault(
        "S11",
        "the abort of a preempted request is forgotten",
        ("decisions", "ledger"),
        instead(SCHEDULER, "abort", _forgets_aborts_of_preempted),
        rules=("3.3", "4.3"),
        needs="aborted while preempted",
    ),
    Fault(
        "S12",
        "a waiting request that is aborted is never told",
        ("decisions", "solo"),
        line(SCHEDULER, "_reap", "aborted.append(", "request.row is None or aborted.append("),
        rules=("4.3",),
        needs="aborted while waiting",
    ),
    Fault(
        "S13",
        "a second abort raises",
        ("raises",),
        instead(SCHEDULER, "abort", _second_abort_raises),
        rules=("4.4",),
        needs="aborted while over",
    ),
    Fault(
        "S14",
        "stop tokens count before min_tokens",
        ("decisions", "solo"),
        line(SCHEDULER, "_append", "if may_stop and token", "if token"),
        rules=("13.2",),
        needs="finished: stop",
    ),
    Fault(
        "S16",
        "a failed step counts what it would have computed",
        ("ledger",),
        line(
            SCHEDULER,
            "fail",
            "opened = self._close(plan)",
            "opened = self._close(plan)\n"
            "    for chunk in plan.chunks:\n"
            "        self.requests[chunk.request].computed += len(chunk.tokens)",
        ),
        rules=("3.4",),
        needs="failed step",
    ),
    Fault(
        "S17",
        "while a prompt is prefilled, nobody decodes",
        ("decisions",),
        line(
            SCHEDULER,
            "_decodes",
            "r.row is not None]",
            "r.row is not None and all(o.status is not Status.PREFILLING for o in self.running)]",
        ),
        source="vllm-project/vllm#1026",
        rules=("9.2",),
        needs="mixed step",
    ),
    Fault(
        "S18",
        "an abort gives back blocks and row of a request that was never seated",
        ("raises",),
        line(
            SCHEDULER, "_reap", "self.waiting.remove(request)", "self.waiting.remove(request); self._give_back(request)"
        ),
        source="vllm-project/vllm#49118",
        rules=("4.3",),
        needs="aborted while waiting",
    ),
    Fault(
        "S19",
        "the prompt counts towards min_tokens",
        ("decisions", "solo"),
        line(
            SCHEDULER, "_append", "request.generated >= request.min_tokens", "request.num_tokens >= request.min_tokens"
        ),
        source="NVIDIA/TensorRT-LLM PR#12358",
        rules=("13.2",),
        needs="finished: stop",
    ),
    Fault(
        "S20",
        "an answer that was cut by length is said to have stopped",
        ("decisions", "solo"),
        line(SCHEDULER, "_append", '"length"', '"stop"'),
        source="PaddlePaddle/FastDeploy PR#4543",
        rules=("13.3",),
        needs="finished: length",
    ),
    Fault(
        "S22",
        "the last position of the context can never be scheduled",
        ("decisions", "drain"),
        line(
            SCHEDULER,
            "_chunk",
            "min(budget, request.missing)",
            "max(0, min(budget, request.missing, self.limits.max_model_len - 2 - request.computed))",
        ),
        source="vllm-project/vllm PR#29633",
        rules=("9.2",),
    ),
    Fault(
        "S23",
        "a part of a prompt that is not its end samples, too",
        ("decisions",),
        line("engine.control.plan:Plan", "sampling", "if chunk.samples", "if chunk.tokens"),
        source="tenstorrent/tt-xla#5830",
        rules=("9.5",),
        needs="chunked",
    ),
    Fault(
        "S32",
        "requests are reaped by arrival and not in order",
        ("decisions",),
        line(SCHEDULER, "_reap", "key=lambda r: r.order", "key=lambda r: r.id"),
        rules=("4.1", "4.5"),
    ),
    Fault(
        "S33",
        "a failed step ends the decoding requests before the others",
        ("rows",),
        line(
            SCHEDULER,
            "fail",
            "for request_id in ids)",
            "for request_id in (*ids[len(plan.chunks) :], *ids[: len(plan.chunks)]))",
        ),
        rules=("3.7",),
        needs="failed step",
    ),
    Fault(
        "S34",
        "a running prefill is given half of what the budget leaves",
        ("decisions",),
        line(SCHEDULER, "_continue_prefills", "self._chunk(request, budget)", "self._chunk(request, -(-budget // 2))"),
        rules=("9.2", "9.3"),
        needs="chunked",
    ),
    Fault(
        "S35",
        "one admission an iteration",
        ("decisions",),
        line(SCHEDULER, "_admit", "while self.waiting", "while not seated and self.waiting"),
        rules=("8.1",),
    ),
    Fault(
        "S36",
        "rows are compacted before the running requests grow",
        ("rows",),
        line(
            SCHEDULER,
            "plan",
            "grown, preempted, more_vacated = self._grow()\n    moves = self._compact()",
            "moves = self._compact()\n    grown, preempted, more_vacated = self._grow()",
        ),
        rules=("3.1",),
        needs="moved",
    ),
    Fault(
        "S37",
        "an end is dated one iteration late",
        ("counters",),
        line(SCHEDULER, "_end", "facts(self.iteration)", "facts(self.iteration + 1)"),
        rules=("3.2",),
    ),
    Fault(
        "S38",
        "an admitted request is first computed in the next iteration",
        ("decisions",),
        line(SCHEDULER, "_admit", "work.append(chunk)", "pass"),
        rules=("8.6",),
    ),
    Fault(
        "S39",
        "chunks are listed by row and not as they were planned",
        ("decisions",),
        line(
            SCHEDULER,
            "plan",
            "tuple(entry for entry in work if isinstance(entry, Chunk))",
            "tuple(sorted((e for e in work if isinstance(e, Chunk)), key=lambda chunk: chunk.row))",
        ),
        rules=("9.4",),
    ),
    Fault(
        "S40",
        "min_tokens above max_tokens is lowered to it",
        ("decisions", "solo"),
        line(
            SCHEDULER,
            "_append",
            "request.generated >= request.min_tokens",
            "request.generated >= min(request.min_tokens, request.max_tokens)",
        ),
        rules=("1.6",),
    ),
    Fault(
        "S41",
        "the last token of a prompt waits for an iteration of its own",
        ("audit", "decisions"),
        line(SCHEDULER, "_chunk", "min(budget, request.missing)", "min(budget, max(1, request.missing - 1))"),
        rules=("9.3",),
    ),
    Fault(
        "K02",
        "usage counts the prompt as generated",
        ("solo",),
        line(
            "engine.control.request:Request",
            "facts",
            "generated_tokens=self.generated",
            "generated_tokens=self.num_tokens",
        ),
    ),
    Fault(
        "K03",
        "the engine stops before finished requests gave back what they hold",
        ("drain",),
        line(
            SCHEDULER, "has_work", "bool(self.requests)", "any(r.status != 'finished' for r in self.requests.values())"
        ),
        rules=("3.5",),
    ),
    Fault(
        "M01",
        "two neighbours get each other's token",
        ("tokens", "solo"),
        line(
            SCHEDULER,
            "commit",
            "zip(plan.sampling, sampled, strict=True)",
            "zip(plan.sampling, sampled[::-1], strict=True)",
        ),
        rules=("9.6", "14.1"),
    ),
    Fault(
        "M02",
        "a decoding row is fed the token before the last",
        ("tokens",),
        line(SCHEDULER, "_decodes", "r.tokens[-1]", "r.tokens[-2]"),
        rules=("9.6",),
    ),
)
