"""Faults of preemption: who falls, what is kept, and what a resumed request is taken for."""

from __future__ import annotations

from properties.arming import Fault, in_area, line

SCHEDULER = "engine.control.scheduler:Scheduler"

FAULTS = in_area(
    "preemption",
    Fault(
        "P01",
        "the victim is the oldest",
        ("decisions", "ledger"),
        line(SCHEDULER, "_grow", "self.running[-1]", "self.running[0]"),
        rules=("6.2",),
        needs="preempted",
    ),
    Fault(
        "P02",
        "the victim goes to the back of the queue",
        ("audit", "ledger"),
        line(SCHEDULER, "_preempt", "self._enqueue(victim)", "self.waiting.append(victim)"),
        rules=("2.2", "6.3"),
        needs="preempted",
    ),
    Fault(
        "P03",
        "the victim keeps its progress",
        ("audit", "ledger"),
        line(SCHEDULER, "_preempt", "victim.computed = 0", "pass"),
        rules=("6.3",),
        needs="preempted",
    ),
    Fault(
        "P04",
        "the victim keeps its blocks, so the head waits for what stands behind it",
        ("audit", "ledger"),
        line(
            SCHEDULER,
            "_preempt",
            "self._give_back(victim)",
            "victim.row\n    self.rows.release(row)\n    victim.row = None",
        ),
        source="vllm-project/vllm#45388",
        rules=("6.3",),
        needs="preempted",
    ),
    Fault(
        "P05",
        "the victim's row stays taken",
        ("audit",),
        line(
            SCHEDULER,
            "_preempt",
            "self._give_back(victim)",
            "victim.row\n    self.pool.release(victim.table)\n    victim.table, victim.row = [], None",
        ),
        source="tenstorrent/vllm#463",
        rules=("6.3",),
        needs="preempted",
    ),
    Fault(
        "P06",
        "an iteration that preempted admits nobody",
        ("decisions",),
        line(SCHEDULER, "plan", "self._admit(budget, work)", "[] if preempted else self._admit(budget, work)"),
        source="inference-sim/inference-sim#529",
        rules=("6.5", "8.1"),
        needs="readmitted at once",
    ),
    Fault(
        "P07",
        "the victim loses what it generated",
        ("ledger", "solo"),
        line(
            SCHEDULER, "_preempt", "victim.computed = 0", "victim.computed = 0; del victim.tokens[victim.prompt_len :]"
        ),
        rules=("6.3",),
        needs="preempted",
    ),
    Fault(
        "P08",
        "only decoding requests can be victims",
        ("decisions", "ledger"),
        line(
            SCHEDULER,
            "_grow",
            "self.running[-1]",
            "next(r for r in reversed(self.running) if r.status is Status.DECODING)",
        ),
        rules=("6.2",),
        needs="preempted while prefilling",
    ),
    Fault(
        "P09",
        "whoever asks for a block is never the victim",
        ("decisions", "ledger"),
        line(
            SCHEDULER,
            "_grow",
            "self.running[-1]",
            "([r for r in self.running if r is not request] or self.running)[-1]",
        ),
        rules=("6.2", "6.6"),
        needs="self-preempted",
    ),
    Fault(
        "P10",
        "the watermark is kept from those that run, too",
        ("decisions",),
        line(SCHEDULER, "_grow", "if self.pool.num_free:", "if self.pool.num_free > self.limits.watermark:"),
        rules=("6.4",),
    ),
    Fault(
        "K01",
        "preemptions are not counted",
        ("counters",),
        line(SCHEDULER, "_preempt", "self.counters.preemptions += 1", "pass"),
        needs="preempted",
    ),
    Fault(
        "M03",
        "a resumed request is recomputed from its prompt alone",
        ("tokens",),
        line(SCHEDULER, "_seat", "tuple(request.tokens)", "tuple(request.tokens[: request.prompt_len])"),
        source="vllm-project/vllm-gaudi PR#524",
        rules=("6.3",),
        needs="resumed",
    ),
    Fault(
        "M04",
        "a resumed request samples as soon as it is past its prompt",
        ("audit", "decisions"),
        line(
            SCHEDULER,
            "_chunk",
            "samples=count == request.missing",
            "samples=count == request.missing or request.computed < request.prompt_len <= request.computed + count",
        ),
        source="vllm-project/vllm-ascend PR#11334",
        rules=("9.5",),
        needs="resumed",
    ),
    Fault(
        "M05",
        "a request that generated something is never prefilled again, it decodes",
        ("audit", "decisions"),
        line(
            SCHEDULER,
            "_seat",
            "request.status = Status.PREFILLING",
            "request.status = Status.DECODING if request.generated else Status.PREFILLING",
        ),
        source="GeeeekExplorer/nano-vllm#144",
        rules=("9.7",),
        needs="resumed",
    ),
    Fault(
        "M06",
        "the generated tokens of a resumed request are appended twice to what compute knows",
        ("tokens",),
        line(
            SCHEDULER,
            "_seat",
            "tuple(request.tokens)",
            "(*request.tokens, *request.tokens[request.prompt_len :])",
        ),
        source="vllm-project/vllm-gaudi PR#524",
        rules=("6.3",),
        needs="resumed",
    ),
)
