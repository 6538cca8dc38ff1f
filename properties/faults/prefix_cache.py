"""Faults of the prefix cache: names of content, hits, publication and eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from properties.arming import Fault, in_area, instead, line

POOL = "engine.control.blocks:BlockPool"
SCHEDULER = "engine.control.scheduler:Scheduler"


def _finds_by_half_a_byte(find: Callable[..., int | None]) -> Any:
    """Sixteen names for all contents, and nobody compares the tokens."""

    def faulty(pool: Any, key: Any) -> int | None:
        return next((b for b, held in pool._published.items() if held.digest[0] >> 4 == key.digest[0] >> 4), None)

    return faulty


def _publishes_what_failed(fail: Callable[..., Any]) -> Any:
    def faulty(scheduler: Any, plan: Any, why: str) -> Any:
        before = {chunk.request: scheduler.requests[chunk.request].computed for chunk in plan.chunks}
        for chunk in plan.chunks:
            scheduler.requests[chunk.request].computed += len(chunk.tokens)
        scheduler._publish(plan)
        for request, computed in before.items():
            scheduler.requests[request].computed = computed
        return fail(scheduler, plan, why)

    return faulty


FAULTS = in_area(
    "prefix cache",
    Fault(
        "C01",
        "the hash of a block leaves out its parent",
        ("ledger",),
        line("engine.control.prefix", "block_key", "blake2b(parent + text", "blake2b(text"),
        source="vllm-project/aibrix#2329",
        rules=("11.2",),
    ),
    Fault(
        "C02",
        "the salt is ignored",
        ("decisions", "ledger"),
        line(SCHEDULER, "_chain", "root(submission.salt)", "root(None)"),
        source="vllm-project/vllm#30931",
        rules=("11.2",),
        needs="prefix hit",
    ),
    Fault(
        "C03",
        "content is found by a short hash and its tokens are not compared",
        ("audit", "decisions"),
        instead(POOL, "find", _finds_by_half_a_byte),
        source="openvinotoolkit/openvino.genai#3722",
        rules=("11.2", "11.6"),
    ),
    Fault(
        "C04",
        "a block counts as full when it is begun",
        ("ledger", "audit"),
        line(SCHEDULER, "_full_keys", "computed // self.limits.block_size", "-(-computed // self.limits.block_size)"),
        rules=("11.3",),
    ),
    Fault(
        "C05",
        "a prompt may be a hit to its last token",
        ("decisions",),
        line(SCHEDULER, "_eligible", "(request.num_tokens - 1)", "request.num_tokens"),
        source="vllm-project/vllm PR#11186",
        rules=("11.6",),
        needs="prefix hit",
    ),
    Fault(
        "C06",
        "hits are not referenced",
        ("audit", "ledger"),
        line(POOL, "share", "self.references[block] += 1", "pass"),
        rules=("8.5",),
        needs="prefix hit",
    ),
    Fault(
        "C07",
        "hits that nobody owns are not charged against the free blocks",
        ("raises",),
        line(SCHEDULER, "_fits", "- len(hits) + unowned", "- len(hits)"),
        rules=("8.2",),
        needs="prefix hit",
    ),
    Fault(
        "C08",
        "the block that was freed last is evicted first",
        ("ledger",),
        line(POOL, "take", "next(iter(self._cached))", "next(reversed(self._cached))"),
        rules=("10.4", "10.6"),
        needs="evicted",
    ),
    Fault(
        "C09",
        "the watermark is waived by what is left after hits",
        ("decisions",),
        line(SCHEDULER, "_fits", "if need >", "if need - len(hits) >"),
        rules=("8.3",),
        needs="prefix hit",
    ),
    Fault(
        "C10",
        "nobody waits for a block that is about to be published",
        ("decisions",),
        line(SCHEDULER, "_admit", "in coming", "in ()"),
        rules=("8.7",),
        needs="head held back with the cache on",
    ),
    Fault(
        "C11",
        "an evicted block can still be found",
        ("raises",),
        line(POOL, "take", "del self._index[self._published.pop(block).digest]", "self._published.pop(block)"),
        source="ovg-project/kvcached#362",
        rules=("10.5",),
        needs="evicted",
    ),
    Fault(
        "C12",
        "cached blocks are no free blocks, so requests are preempted for want of them",
        ("decisions",),
        line(POOL, "num_free", "len(self._blank) + len(self._cached)", "len(self._blank)"),
        rules=("6.2", "8.2"),
    ),
    Fault(
        "C13",
        "blocks can be hit before the forward that writes them has run",
        ("audit", "decisions", "ledger"),
        line(
            SCHEDULER,
            "_seat",
            "request.published = len(hits)",
            "request.published = len(hits)\n"
            "    if request.chain is not None:\n"
            "        for block, key in zip(request.table, self._full_keys(request, request.num_tokens)):\n"
            "            self.pool.publish(block, key)",
        ),
        source="GeeeekExplorer/nano-vllm PR#209",
        rules=("11.3", "11.5"),
    ),
    Fault(
        "C14",
        "a prompt whose length is a multiple of the block size has no hits",
        ("decisions",),
        line(
            SCHEDULER,
            "_eligible",
            "if request.chain is None or",
            "if request.num_tokens % self.limits.block_size == 0 or request.chain is None or",
        ),
        source="vllm-project/vllm PR#50409",
        rules=("11.6",),
        needs="prefix hit",
    ),
    Fault(
        "C15",
        "blocks behind one that was evicted still count as hits",
        ("audit", "decisions"),
        line(SCHEDULER, "_hits", "break", "continue"),
        source="llm-d/llm-d-inference-sim#705",
        rules=("11.6",),
        needs="evicted",
    ),
    Fault(
        "C16",
        "an attempt that does not fit keeps the hits that it referenced",
        ("audit", "ledger"),
        line(
            SCHEDULER,
            "_admit",
            "in coming:\n",
            "in coming:\n            for block in hits:\n                self.pool.share(block)\n",
        ),
        source="neuralmagic/vllm PR#92",
        rules=("8.4",),
        needs="head held back with the cache on",
    ),
    Fault(
        "C17",
        "how much there is to compute is settled before the hits are known",
        ("audit", "decisions"),
        line(SCHEDULER, "_chunk", "min(budget, request.missing)", "min(budget, request.num_tokens)"),
        source="GeeeekExplorer/nano-vllm PR#211",
        rules=("9.2",),
        needs="prefix hit",
    ),
    Fault(
        "C18",
        "the first chunk behind hits starts at position 0",
        ("decisions",),
        line(SCHEDULER, "_chunk", "request.row, request.computed,", "request.row, request.computed - request.cached,"),
        source="Wenyueh/MinivLLM PR#98",
        rules=("8.5", "9.3"),
        needs="prefix hit",
    ),
    Fault(
        "C19",
        "with the cache off, blocks are published all the same",
        ("raises",),
        line(SCHEDULER, "_publish", "if not self.limits.prefix_cache", "if False"),
        source="vllm-project/vllm-ascend PR#2083",
        rules=("11.1",),
    ),
    Fault(
        "C20",
        "of two equal blocks the second takes over the name",
        ("audit", "ledger"),
        line(POOL, "publish", "if key.digest not in self._index:", "if True:"),
        rules=("11.4",),
    ),
    Fault(
        "C21",
        "a request evicts its own hits while it takes new blocks",
        ("raises",),
        line(
            SCHEDULER,
            "_seat",
            "for block in hits:\n"
            "        self.pool.share(block)\n"
            "    missing = self.limits.blocks_for(request.num_tokens) - len(hits)\n"
            "    request.table = [*hits, *(self.pool.take() for _ in range(missing))]",
            "missing = self.limits.blocks_for(request.num_tokens) - len(hits)\n"
            "    new = [self.pool.take() for _ in range(missing)]\n"
            "    for block in hits:\n"
            "        self.pool.share(block)\n"
            "    request.table = [*hits, *new]",
        ),
        rules=("8.5",),
        needs="evicted",
    ),
    Fault(
        "C22",
        "a failed step publishes what it would have written",
        ("audit", "ledger"),
        instead(SCHEDULER, "fail", _publishes_what_failed),
        rules=("3.4", "11.5"),
        needs="failed step",
    ),
    Fault(
        "C23",
        "part of a prompt is not published before all of it is computed",
        ("ledger",),
        line(SCHEDULER, "_publish", "for chunk in plan.chunks)", "for chunk in plan.chunks if chunk.samples)"),
        rules=("11.3",),
        needs="chunked",
    ),
    Fault(
        "C24",
        "generated tokens are not published",
        ("ledger",),
        line(SCHEDULER, "_publish", "for decode in plan.decodes)", "for decode in ())"),
        rules=("11.3",),
    ),
    Fault(
        "C25",
        "only the first choice of a submission carries its salt",
        ("decisions", "ledger"),
        line(
            SCHEDULER,
            "submit",
            "chain=self._chain(submission)",
            "chain=self._chain(submission if choice == 0 else attrs.evolve(submission, salt=None))",
        ),
        rules=("1.8", "11.2"),
    ),
    Fault(
        "C26",
        "the last block that was hit is computed again, by everybody who holds it",
        ("audit", "decisions", "ledger"),
        line(SCHEDULER, "_seat", "request.computed = len(hits)", "request.computed = max(0, len(hits) - 1)"),
        rules=("11.6",),
        needs="prefix hit",
    ),
)
