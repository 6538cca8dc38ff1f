"""Group (e), the prefix cache, on the real runner: what a hit skips was computed by somebody else, and no answer shows it.

Everything is compared with the same request alone on an engine without the cache (``oracle.solo``), logits digests included;
``Watched`` rejects a write into a block that a table shares, and a hit on a block that was never written to its end.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from engine.control import prefix, scheduler
from engine.control.record import StepRecord
from engine.control.scheduler import Scheduler
from engine.engine import Engine
from engine.request import SamplingParams
from properties.arming import arm, instead, line
from tests.cases.oracle import Ask, differences, engine, greedy, play, seeded, text


def ample(**knobs: Any) -> Engine:
    return engine(**{"num_kv_blocks": 32, "max_num_batched_tokens": 64, "watched": True} | knobs)


def cached(engine: Engine, asks: list[Ask], records: list[StepRecord] | None = None) -> list[int]:
    """Plays and judges ``asks``; tokens that each found in the cache."""
    answers = play(engine, asks, records)
    assert differences(asks, answers) == []
    assert getattr(engine.runner, "complaints", []) == []
    ends = [answer.ends[0].facts for answer in answers]
    return [-1 if facts is None else facts.cached_tokens for facts in ends]


@pytest.mark.parametrize("length", [4, 8, 12])
@pytest.mark.parametrize(
    "params", [greedy(6), greedy(1), greedy(4, logprobs=5), seeded(6, 9)], ids=["6", "1", "logprobs", "seeded"]
)
def test_b052_a_prompt_that_is_cached_to_its_end(length: int, params: SamplingParams) -> None:
    """The whole prompt is cached and fills its blocks: one token is left to compute, in a block of one's own."""
    shared = ample()
    prompt = text(7, length)
    rounds = [cached(shared, [Ask(prompt, params)])[0] for _ in range(2)]
    assert rounds == [0, length - 4]
    assert cached(shared, [Ask((*prompt, 11), params)]) == [length]
    assert cached(shared, [Ask(prompt[:-1], params)]) == [length - 4]


def test_b052_several_choices_of_a_cached_prompt() -> None:
    shared = ample(max_num_seqs=8)
    prompt = text(7, 8)
    told: list[list[list[int]]] = []
    for _ in range(2):
        ids = shared.submit(prompt, seeded(6, 3, n=3)).requests
        answers: dict[int, list[int]] = {request: [] for request in ids}
        while shared.has_work:
            for request, sampled in shared.step().sampled:
                answers[request].append(sampled.token)
        told.append(list(answers.values()))
    assert told[0] == told[1]
    assert len({tuple(tokens) for tokens in told[0]}) == 3
    assert shared.counters.prefix_hit_tokens == 4 * 5  # all but the very first
    first = cached(shared, [Ask(prompt, seeded(6, 3))])
    assert first == [4]


def test_b054_equal_prompts_in_one_step() -> None:
    """Four identical cold prompts: blocks in flight are no hits, so three wait one iteration and then share."""
    records: list[StepRecord] = []
    asks = [Ask(text(5, 9), params) for params in (greedy(5), seeded(5, 1), seeded(5, 2), greedy(5))]
    assert cached(ample(), asks, records) == [0, 8, 8, 8]
    assert [len(record.plan.seated) for record in records[:2]] == [1, 3]


def test_b055_a_collision_serves_nobody_elses_content(monkeypatch: pytest.MonkeyPatch) -> None:
    real = prefix.block_key
    monkeypatch.setattr(prefix, "block_key", lambda parent, held: attrs.evolve(real(parent, held), digest=b"same"))
    asks = [Ask(text(seed, 9), greedy(6), at=at) for at, seed in enumerate((5, 6, 5, 7, 6))]
    cached(ample(), asks)


def test_b057_the_whole_way_to_a_block_is_its_key() -> None:
    """[A, B, C] and [X, Y, C] share nothing, nor do [A, C] and [C]."""
    a, b, c = text(1, 4), text(2, 4), text(3, 4)
    shared = ample()
    rest = (9, 9)
    for prompt, hit in (
        ((*a, *b, *c, *rest), 0),
        ((*b, *a, *c, *rest), 0),
        ((*a, *c, *rest), 4),
        ((*c, *rest), 0),
        ((*a, *b, *c, *rest), 12),
    ):
        assert cached(shared, [Ask(prompt, greedy(3))]) == [hit]


def test_b058_a_salt_is_part_of_the_key() -> None:
    """Model, adapter, rope and dtype cannot change while an engine lives; what can change is the salt."""
    shared = ample()
    found = []
    for salt in (None, "a", "b", "a", None):
        before = shared.counters.prefix_hit_tokens
        shared.submit(text(4, 9), greedy(2), salt=salt)
        while shared.has_work:
            shared.step()
        found.append(shared.counters.prefix_hit_tokens - before)
    assert found == [0, 0, 0, 8, 8]


def test_b058_engines_share_nothing() -> None:
    """Two engines of one process, as after a restart: the second begins cold."""
    assert [cached(ample(), [Ask(text(4, 9), greedy(2))]) for _ in range(2)] == [[0], [0]]


def test_b060_positions_start_behind_the_hit() -> None:
    """The second of two equal prompts arrives while the first generates."""
    records: list[StepRecord] = []
    asks = [Ask(text(8, 11), greedy(9)), Ask(text(8, 11), greedy(9), at=4), Ask(text(8, 7), seeded(9, 1), at=5)]
    assert cached(ample(), asks, records) == [0, 8, 4]
    starts = {chunk.request: chunk.start for record in records for chunk in record.plan.chunks}
    assert starts == {0: 0, 1: 8, 2: 4}


def test_b061_who_needs_every_position_takes_no_hit() -> None:
    """Their values are checked in ``tests/conformance/test_prompt_logprobs.py``, also after the prompt was cached."""
    shared = ample()
    starts = []
    for takes_hits in (True, False, True):
        shared.submit(text(4, 9), greedy(2), takes_hits=takes_hits)
        starts.append(shared.step().plan.chunks[0].start)
        while shared.has_work:
            shared.step()
    assert starts == [0, 0, 8]
    assert shared.audit() == []


def test_b063_hits_at_every_length() -> None:
    shared = ample(max_model_len=32)
    for length in range(1, 21):
        prompt = text(100 + length, length)
        rounds = [cached(shared, [Ask(prompt, greedy(2))]) for _ in range(2)]
        assert rounds == [[0], [(length - 1) // 4 * 4]], length


def test_b064_what_lies_behind_an_evicted_block_is_no_hit() -> None:
    """Of three cached blocks the head alone is evicted: asked again, nothing hits, though the other two are still there.

    A request that takes no hits computes the head again and publishes the tail, so that the tail was freed later.
    """
    shared = engine(max_num_batched_tokens=64, watched=True)
    prompt = text(12, 13)
    cached(shared, [Ask(prompt[:5], greedy(1))])
    (head,) = shared.ledger().published
    shared.submit(prompt, greedy(1), takes_hits=False)
    while shared.has_work:
        shared.step()
    behind = [block for block in shared.ledger().published if block != head]
    assert shared.ledger().cached == (head, *reversed(behind))
    cached(shared, [Ask(text(13, 23), greedy(1))])  # the five blank blocks and one more
    assert head not in behind
    assert set(behind) < set(shared.ledger().published)
    assert cached(shared, [Ask(prompt, greedy(2))]) == [0]


CHURN = [
    Ask(text(seed % 3, 5 + seed * 5 % 11), greedy(7) if seed % 2 else seeded(7, seed), at=seed // 2)
    for seed in range(12)
]


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("blocks", [8, 11, 32])
def test_churn_with_shared_prefixes(blocks: int, budget: int) -> None:
    """Hits, evictions, preemptions and chunks together; what was evicted is computed again."""
    shared = ample(num_kv_blocks=blocks, max_num_batched_tokens=budget)
    cached(shared, CHURN)
    assert shared.counters.prefix_hit_tokens > 0
    assert (shared.counters.preemptions > 0) == (blocks < 32)


def _too_early(real: Any) -> Any:
    """B054: blocks are announced when they are handed out."""

    def seat(self: Scheduler, request: Any, hits: list[int]) -> Any:
        result = real(self, request, hits)
        for index, key in enumerate(self._full_keys(request, request.num_tokens)):
            if index >= request.published:
                self.pool.publish(request.table[index], key)
        return result

    return seat


@pytest.mark.parametrize(
    ("change", "fires"),
    [
        (
            line(
                prefix.BlockKey, "same_content", "self.parent == other.parent and self.tokens == other.tokens", "True"
            ),
            55,
        ),
        (instead(Scheduler, "_seat", _too_early), 54),
        (line(Scheduler, "_eligible", "(request.num_tokens - 1) //", "request.num_tokens //"), 52),
        (line(Scheduler, "_eligible", "(request.num_tokens - 1) //", "(request.num_tokens - 2) //"), 63),
        (line(prefix.Chain, "upto", "self.keys[-1].digest if self.keys else self.salt_root", "self.salt_root"), 57),
        (line(scheduler, "root", 'b"salt:" + salt.encode("utf-8", "surrogatepass")', 'b""'), 58),
        (line(Scheduler, "_seat", "request.computed = len(hits)", "request.computed = 0 * len(hits)"), 60),
        (line(Scheduler, "_eligible", "or not request.takes_hits", ""), 61),
        (line(Scheduler, "_hits", "break", "continue"), 64),
    ],
)
def test_a_mistake_in_the_cache_is_seen(change: Any, fires: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: dict[int, Any] = {
        52: lambda: test_b052_a_prompt_that_is_cached_to_its_end(8, greedy(6)),
        54: test_b054_equal_prompts_in_one_step,
        55: lambda: test_b055_a_collision_serves_nobody_elses_content(monkeypatch),
        57: test_b057_the_whole_way_to_a_block_is_its_key,
        58: test_b058_a_salt_is_part_of_the_key,
        60: test_b060_positions_start_behind_the_hit,
        61: test_b061_who_needs_every_position_takes_no_hit,
        63: test_b063_hits_at_every_length,
        64: test_b064_what_lies_behind_an_evicted_block_is_no_hit,
    }
    cases[fires]()
    with pytest.raises((AssertionError, RuntimeError, ValueError)), arm(change()):
        cases[fires]()
