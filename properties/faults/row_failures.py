"""Faults about a request that cannot go on (SPEC 13.7, 13.8): who ends with it, what it leaves behind, what is told. Letter E."""

from __future__ import annotations

from properties.arming import Fault, in_area, line

SCHEDULER = "engine.control.scheduler:Scheduler"
GENERATION = "server.live:Generation"
NO_TOKEN, TEXT = "row without a token", "text failed"

CONTROL = in_area(
    "scheduler",
    Fault(
        "E01",
        "who samples beside a row without a token ends with it",
        ("decisions", "solo"),
        line(
            SCHEDULER,
            "commit",
            "drawn = tuple(zip(plan.sampling, sampled, strict=True))",
            "why = next((got.failure for got in sampled if got.failure), None)\n"
            "    drawn = tuple(zip(plan.sampling, [attrs.evolve(got, failure=why) for got in sampled]))",
        ),
        rules=("13.7",),
        needs="went on beside a failure",
    ),
    Fault(
        "E02",
        "a request whose row has no token forgets its blocks, and nobody gets them back",
        ("audit", "ledger"),
        line(SCHEDULER, "_append", "if got.failure is not None:", "if got.failure and not request.table.clear():"),
        rules=("4.1", "13.7"),
        needs=NO_TOKEN,
    ),
    Fault(
        "E03",
        "what stands in the place of a token is told with the others",
        ("rows", "tokens", "solo"),
        line(SCHEDULER, "commit", "for entry, got in drawn if got.failure is None]", "for entry, got in drawn]"),
        rules=("13.7",),
        needs=NO_TOKEN,
    ),
    Fault(
        "E04",
        "a request whose row has no token is told that it ended, and goes on",
        ("audit", "ledger"),
        line(
            SCHEDULER,
            "_append",
            'return self._finish(request, "error", None, got.failure)',
            'return self._end(request, "error", None, got.failure)',
        ),
        rules=("13.7",),
        needs=NO_TOKEN,
    ),
    Fault(
        "E05",
        "a text that raises is given up, and its request goes on",
        ("decisions", "solo"),
        line(
            SCHEDULER,
            "_append",
            'return self._finish(request, "error", None, why, f"{type(error).__name__}: {error}")',
            "request.text = None",
        ),
        rules=("13.8",),
        needs=TEXT,
    ),
    Fault(
        "E06",
        "a text that raises ends the loop of everybody",
        ("raises",),
        line(SCHEDULER, "_append", "except Exception as error", "except ArithmeticError as error"),
        rules=("13.8",),
        needs=TEXT,
    ),
)
CACHE = in_area(
    "prefix cache",
    Fault(
        "E07",
        "what a row without a token wrote is published with the rest",
        ("ledger",),
        line(SCHEDULER, "_publish", "for i in ids if i not in doubtful]", "for i in ids]"),
        rules=("11.5", "13.7"),
        needs=NO_TOKEN,
    ),
)
SAMPLERS = in_area(
    "sampler",
    Fault(
        "E08",
        "a greedy row gets the id of its first NaN",
        ("decisions", "solo"),
        line("engine.compute.sampler", "argmax", "] = NO_TOKEN", "] += 0"),
        rung="rows",
        rules=("13.7",),
        needs=NO_TOKEN,
    ),
    Fault(
        "E09",
        "a sampler that finds a row without a token raises, and the step fails",
        ("raises",),
        line("engine.compute.sampler", "tell_flaws", "if got.token == NO_TOKEN:", "if got.token == NO_TOKEN / 0:"),
        rung="rows",
        rules=("13.7",),
        needs=NO_TOKEN,
    ),
    Fault(
        "E10",
        "the kernel's mark for a row without a token is taken for the first id",
        ("decisions", "solo"),
        line("engine.native.draw:NativeDraw", "__call__", "return drawn", "return [max(id, 0) for id in drawn]"),
        rung="native",
        rules=("13.7",),
        needs=NO_TOKEN,
    ),
)
WIRE = in_area(
    "streaming",
    Fault(
        "E11",
        "a token that could not be made text is sent with the error",
        ("stream",),
        line(GENERATION, "arrive", "token = None", "pass"),
        rules=("13.8",),
        needs=TEXT,
    ),
    Fault(
        "E12",
        "a request that could not go on is told like one that ran its length",
        ("stream",),
        line("server.live", "failure", "if end is None or", "if end is None or end.why or"),
        rules=("13.7", "13.8"),
    ),
    rung="wire",
)
FAULTS = (*CONTROL, *CACHE, *SAMPLERS, *WIRE)
