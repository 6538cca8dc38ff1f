"""Ten faults thought up by somebody who had read engine/, server/ and SPEC.md and nothing of the harness.

A catalogue that grows out of its own checks proves little, so these came from outside and their texts are as they were given.
"""

from __future__ import annotations

from properties.arming import OUTSIDER, Fault, in_area, line

SCHEDULER = "engine.control.scheduler:Scheduler"

PREFIX = in_area(
    "prefix cache",
    Fault(
        "OUT1",
        "a resumed request keeps its count of announced blocks, so what was evicted is never published again",
        ("ledger",),
        line(
            SCHEDULER, "_seat", "request.published = len(hits)", "request.published = max(request.published, len(hits))"
        ),
        source=OUTSIDER,
        rules=("11.3",),
        needs="resumed",
    ),
    Fault(
        "OUT2",
        "all choices of a submission share one chain of block keys",
        ("ledger",),
        line(
            SCHEDULER,
            "submit",
            "chain=self._chain(submission),",
            "chain=self.requests[ids[0]].chain if choice else self._chain(submission),",
        ),
        source=OUTSIDER,
        rules=("11.2", "11.3"),
    ),
    Fault(
        "OUT3",
        "the digest of a block runs its tokens together",
        ("ledger",),
        line("engine.control.prefix", "block_key", 'b",".join(', 'b"".join('),
        source=OUTSIDER,
        rules=("11.2",),
    ),
)
COMPUTE = in_area(
    "rows",
    Fault(
        "OUT4",
        "the logits of one prefill batch are overwritten by the next of the same iteration",
        ("tokens", "solo"),
        line(
            "engine.compute.runner:PlanRunner", "_prefill", "results.append(logits.clone())", "results.append(logits)"
        ),
        source=OUTSIDER,
    ),
    Fault(
        "OUT5",
        "a swap leaves both rows with the block table of the request that was displaced",
        ("writes",),
        line(
            "engine.compute.row_state:RowState",
            "_move",
            "self.tables[[src, dst]] = self.tables[[dst, src]]",
            "self.tables[src], self.tables[dst] = self.tables[dst], self.tables[src]",
        ),
        source=OUTSIDER,
        rules=("7.4",),
        needs="swapped",
    ),
    rung="rows",
)
SAMPLER = in_area(
    "sampler",
    Fault(
        "OUT6",
        "when the table of penalties grows, its new places begin with the counts of the old ones",
        ("tokens", "solo"),
        line(
            "engine.compute.sampling_row:Penalties",
            "_slot",
            "np.concatenate([self._counts, np.zeros_like(self._counts)])",
            "np.resize(self._counts, len(self._ids))",
        ),
        source=OUTSIDER,
        rules=("14.1",),
    ),
    rung="tiny",
)
TEXT = in_area(
    "text",
    Fault(
        "OUT7",
        "the automaton of stop strings follows one failure link only",
        ("decisions", "text", "solo"),
        line("engine.text.stops", "_automaton", "_next(parent.fail, char)", "parent.fail.children.get(char, root)"),
        source=OUTSIDER,
        rules=("13.4",),
    ),
    Fault(
        "OUT8",
        "a character that is unfinished when the window slides is lost",
        ("text",),
        line(
            "engine.text.detokenize:Detokenizer",
            "_slide",
            "self._shown = len(text) - text.endswith(REPLACEMENT) + beyond",
            "self._shown = len(text) + beyond",
        ),
        source=OUTSIDER,
    ),
)
# Not in the catalogue, because no workload reaches them: the first needs a second thread between two lines of the bridge, the
# second a reader that is more than 256 tokens behind. They stay here until the wire rung can say both.
BEYOND = in_area(
    "streaming",
    Fault(
        "OUT9",
        "the bridge's delivery mark is cleared after the calls, so what is posted meanwhile is not scheduled",
        ("stream",),
        line(
            "server.bridge:Bridge",
            "_flush",
            "        self._scheduled = False\n    for call in calls:\n        call()",
            "        pass\n    for call in calls:\n        call()\n    self._scheduled = False",
        ),
        source=OUTSIDER,
    ),
    Fault(
        "OUT10",
        "an answer's event is cleared after its news was taken, so news that arrives meanwhile wakes nobody",
        ("stream",),
        line(
            "server.live:Generation",
            "news",
            "        self._changed.clear()\n"
            "        deltas = [delta for choice in self.choices if (delta := await choice.take())]",
            "        deltas = [delta for choice in self.choices if (delta := await choice.take())]\n"
            "        self._changed.clear()",
        ),
        source=OUTSIDER,
    ),
    rung="wire",
)
FAULTS = (*PREFIX, *COMPUTE, *SAMPLER, *TEXT)
