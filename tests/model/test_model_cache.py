"""Scenarios of the prefix cache: three wordings of the rules that failed, and what the golden traces leave out."""

from __future__ import annotations

from typing import Any

import pytest
from model_cache_checks import Kind, check_content
from model_world import World

from model_sim import Model, Refused
from model_sim.model import Request


def make(model: type[Model] = Model, **limits: Any) -> Model:
    defaults = {"blocks": 4, "block_size": 2, "rows": 2, "budget": 8, "max_model_len": 16, "vocab": 100}
    return model(**{**defaults, "prefix_cache": True, **limits})


def token(request: int, k: int) -> int:
    return 10 * request + k


def drain(model: Model) -> list[dict[str, Any]]:
    steps = []
    while model.has_work:
        steps.append(model.step(token))
        assert len(steps) < 100, "does not drain"
    return steps


# -- wordings that failed --------------------------------------------------------------------------------------------


class EvictsOwnHits(Model):
    """First takes new blocks, then references the hits."""

    def _hits(self, request: Request) -> Any:
        hits, missed = super()._hits(request)
        self._unreferenced = hits
        return hits, missed

    def _held(self) -> list[int]:
        held = super()._held()
        for request in self._live.values():
            for block in self._unreferenced if request.table and request.row is None else ():
                held.remove(block)
        return held


def own_hits(model: Model) -> tuple[int, ...]:
    """A request hits the cached block that is next to be evicted, and needs the whole pool."""
    model.submit((1, 2), 1)
    drain(model)
    model.submit((3, 4), 1)
    drain(model)
    assert (model.state()["cached"], model.state()["blank"]) == ([0, 1], [2, 3])
    model.submit((1, 2, 9, 9, 9, 9, 9), 1)
    table: tuple[int, ...] = model.step(token)["admitted"][0][2]
    return table


def test_own_hits_are_not_evicted_while_the_request_allocates() -> None:  # 8.5
    assert own_hits(make()) == (0, 2, 3, 1)


def test_own_hits_evicted_would_write_over_them() -> None:
    assert own_hits(make(EvictsOwnHits)) == (0, 2, 3, 0)


class ChargesNoHit(Model):
    """T - H <= blank + cached - reserve."""

    def _fits(self, need: int, hits: list[int]) -> bool:
        return need - len(hits) <= len(self._free())


def unowned_hits(model: Model) -> dict[str, Any]:
    """A request of three blocks hits two of the last two free ones; one more than none is left."""
    model.submit((1, 2, 3, 4), 1)
    drain(model)
    model.submit((7, 8, 9), 4)
    model.step(token)
    assert (model.state()["cached"], model.state()["blank"]) == ([1, 0], [])
    model.submit((1, 2, 3, 4, 5), 1)
    return model.step(token)


def test_unowned_hits_are_charged() -> None:  # 8.2
    model = make()
    assert unowned_hits(model)["admitted"] == []
    assert model.state()["cached"] == [1, 0]  # 8.4
    assert [step["hits"] for step in drain(model) if step["hits"]] == [[(2, 1)]]  # request 1 grew into block 1


def test_unowned_hits_not_charged_would_overcommit() -> None:
    with pytest.raises(IndexError):
        unowned_hits(make(ChargesNoHit))


def test_owned_hits_are_not_charged() -> None:  # 8.2
    model = make()
    model.submit((1, 2, 3, 4, 5), 2)
    model.step(token)
    model.submit((1, 2, 3, 4, 6), 1)
    seen = model.step(token)
    assert (seen["admitted"], seen["hits"]) == ([(1, 1, (0, 1, 3))], [(1, 2)])
    assert model.state()["blank"] == []


class WaivesOnWhatIsLeft(Model):
    """The watermark is waived if T - H > blocks - watermark."""

    def _fits(self, need: int, hits: list[int]) -> bool:
        unowned = len(set(hits) & set(self._free()))
        reserve = self.watermark if need - len(hits) <= self.blocks - self.watermark else 0
        return need - len(hits) + unowned <= len(self._free()) - reserve


def waived(model: Model) -> list[dict[str, Any]]:
    """A request of all four blocks that hits one, with one block in reserve."""
    model.submit((1, 2), 1)
    drain(model)
    model.submit((1, 2, 3, 4, 5, 6, 7), 1)
    return drain(model)


def test_the_waiver_looks_at_all_blocks() -> None:  # 8.3
    assert waived(make(watermark=1))[0]["hits"] == [(1, 1)]


def test_a_waiver_after_hits_would_exclude_for_ever() -> None:
    with pytest.raises(AssertionError, match="does not drain"):
        waived(make(WaivesOnWhatIsLeft, watermark=1))


# -- the rest --------------------------------------------------------------------------------------------------------


def test_without_the_cache_nothing_has_content() -> None:  # 11.1
    model = make(prefix_cache=False)
    model.submit((1, 2, 3, 4, 5), 2, n=2, salt="a", takes_hits=False)
    seen = model.step(token)
    assert seen["admitted"] == [(0, 0, (0, 1, 2))]  # the second does not fit; it does not wait for the first
    assert not {"hits", "evicted", "published"} & seen.keys()
    assert not {"cached", "published", "references"} & model.state().keys()
    drain(model)
    assert sorted(model.state()["blank"]) == [0, 1, 2, 3]


def test_two_equal_prompts_do_not_wait_without_the_cache() -> None:  # 8.7 11.1
    model = make(prefix_cache=False)
    model.submit((1, 2, 3), 1, n=2)
    assert len(model.step(token)["admitted"]) == 2


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_one_token_is_always_computed(length: int, hits: int) -> None:  # 11.6
    model = make(blocks=8)
    prompt = (1, 2, 3, 4, 5)
    model.submit(prompt, 1)
    drain(model)
    model.submit(prompt[:length], 1)
    seen = model.step(token)
    assert seen["hits"] == [(1, hits)]
    assert seen["chunks"] == [(1, 0, 2 * hits, length - 2 * hits, True)]


def test_hits_cost_no_budget() -> None:  # 9.2
    model = make(blocks=8, budget=5)
    model.submit((1, 2, 3, 4, 5), 1)
    drain(model)
    model.submit((1, 2, 3, 4, 6), 1)
    model.submit((9, 9, 9, 9), 1)
    assert model.step(token)["chunks"] == [(1, 0, 4, 1, True), (2, 1, 0, 4, True)]


def test_a_part_prefilled_prompt_publishes_what_is_full() -> None:  # 11.3
    model = make(blocks=8, budget=3)
    model.submit((1, 2, 3, 4, 5, 6, 7), 1)
    published = [step["published"] for step in drain(model)]
    assert published == [[(0, (None, (1, 2)))], [(1, (None, (1, 2, 3, 4))), (2, (None, (1, 2, 3, 4, 5, 6)))], [], []]


def test_publication_is_in_order_not_in_plan_order() -> None:  # 11.3 11.4
    model = make(blocks=8)
    model.submit((1, 2, 3), 3)
    model.step(lambda request, k: 4)
    model.submit((1, 2, 3, 4), 1, takes_hits=False)  # its chunk comes first in the plan, its rank is higher
    seen = model.step(token)
    assert (seen["chunks"], seen["decodes"]) == ([(1, 1, 0, 4, True)], [(0, 0, 3)])
    assert seen["published"] == [(1, (None, (1, 2, 3, 4)))]
    assert model.state()["tables"] == {0: (0, 1), 1: (2, 3)}


def test_a_duplicate_stays_unpublished_when_the_first_is_gone() -> None:  # 11.4
    model = make(blocks=6, rows=3)
    model.submit((1, 2), 1)
    drain(model)
    model.submit((1, 2, 3), 4, takes_hits=False)  # block 1 is a duplicate of block 0
    model.step(token)
    model.submit((5, 6, 5, 6, 5, 6), 1)
    model.submit((7,), 1)
    seen = model.step(token)
    assert (seen["evicted"], seen["admitted"][-1]) == ([0], (3, 2, (0,)))
    contents = model.state()["published"].values()
    assert (None, (1, 2)) not in contents
    assert model.state()["tables"][1][0] not in model.state()["published"]


def test_a_shared_block_is_freed_by_its_last_owner() -> None:  # 4.2 10.2
    model = make(blocks=8)
    model.submit((1, 2, 3), 2)
    model.step(token)
    model.submit((1, 2, 4), 3)
    model.step(token)
    assert model.state()["references"][0] == 2
    assert model.step(token)["reaped"] == [0]
    assert model.state()["references"][0] == 1
    assert 0 not in [*model.state()["cached"], *model.state()["blank"]]
    drain(model)
    assert model.state()["references"] == {}
    assert model.state()["cached"][-1] == 0


def test_a_failure_keeps_what_was_published_and_the_hits() -> None:  # 3.4 10.5 11.5
    model = make()
    model.submit((1, 2, 3), 3)
    model.step(token)
    model.submit((1, 2, 4, 5), 1)
    seen = model.step(token, fails=True)
    assert (seen["hits"], seen["published"]) == ([(1, 1)], [])
    assert model.state()["computed"] == {0: 3, 1: 2}
    drain(model)
    assert model.state()["published"] == {0: (None, (1, 2))}


def test_choices_share_a_salt() -> None:  # 1.8 11.2
    model = make(blocks=8)
    model.submit((1, 2, 3), 1, n=2, salt="a")
    assert [step["hits"] for step in drain(model)[:2]] == [[(0, 0)], [(1, 1)]]


def test_the_door_does_not_count_hits() -> None:  # 1.8
    model = make()
    model.submit((1, 2, 3, 4, 5, 6), 1)
    drain(model)
    with pytest.raises(Refused, match="pool"):
        model.submit((1, 2, 3, 4, 5, 6, 7), 3)


@pytest.mark.parametrize(("rows", "law"), [(1, "a published block is written"), (2, "a shared block is written")])
def test_a_write_into_a_hit_is_noticed(rows: int, law: str) -> None:  # 11.8
    model = make(blocks=8, rows=rows)
    kinds = (Kind((1, 2, 3), rows), Kind((1, 2, 4), 1))
    world = World(model, kinds, 0)
    memory = world.memory
    model.submit(kinds[0].prompt, kinds[0].max_tokens)
    for _ in range(3 - rows):
        before = model.state()
        seen = model.step(lambda request, k: k)
        memory = check_content(model, world, before, seen, model.state()) if seen["chunks"] else memory
    model.submit(kinds[1].prompt, 1)
    before = model.state()
    seen = model.step(lambda request, k: k)
    world = World(model, kinds, 0, memory)
    check_content(model, world, before, seen, model.state())
    seen["chunks"] = [(1, row, 0, 3, True) for _, row, *_ in seen["chunks"]]  # from the start instead of behind the hit
    with pytest.raises(AssertionError, match=law):
        check_content(model, world, before, seen, model.state())
