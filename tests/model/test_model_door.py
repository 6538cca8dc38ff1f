"""The door and the limits of the model, clause by clause where no golden trace goes."""

from __future__ import annotations

from typing import Any

import pytest

from model_sim import Model, Refused


def make(**limits: Any) -> Model:
    return Model(**{"blocks": 4, "block_size": 2, "rows": 2, "budget": 4, "max_model_len": 12, "vocab": 10} | limits)


def reason(model: Model, *args: Any, **options: Any) -> str:
    with pytest.raises(Refused) as refused:
        model.submit(*args, **options)
    assert str(refused.value).startswith(refused.value.reason + ": ")
    return refused.value.reason


def sampled_until_idle(model: Model) -> int:
    count = 0
    while model.has_work:
        count += len(model.step(lambda request, k: 0)["sampled"])
    return count


def test_each_check_comes_before_the_next() -> None:  # 1.2
    model = make(max_waiting=0)
    assert reason(model, (), 0) == "empty_prompt"
    assert reason(model, (10,), 0) == "token_out_of_range"
    assert reason(model, (-1,), 0) == "token_out_of_range"
    assert reason(model, (9,) * 12, 0) == "max_tokens"
    assert reason(model, (9,) * 12, 1) == "max_model_len"
    assert reason(model, (9,) * 8, 2) == "pool"
    assert reason(model, (9,) * 8, 1) == "queue_full"


def test_the_last_token_needs_no_block() -> None:  # 1.2
    assert make().submit((1,) * 5, 4) == [0]
    assert reason(make(), (1,) * 5, 5) == "pool"


@pytest.mark.parametrize(
    ("prompt", "max_model_len", "tokens"),
    [(5, 12, 4), (5, 7, 2), (8, 12, 1), (1, 9, 8), (1, 8, 7)],
)
def test_absent_max_tokens_is_the_most_that_fits(prompt: int, max_model_len: int, tokens: int) -> None:  # 1.3
    model = make(max_model_len=max_model_len)
    model.submit((1,) * prompt, None)
    assert sampled_until_idle(model) == tokens


def test_absent_max_tokens_without_room() -> None:  # 1.3
    assert reason(make(max_model_len=12), (1,) * 9, None) == "pool"
    assert reason(make(max_model_len=8), (1,) * 8, None) == "max_model_len"
    assert reason(make(max_model_len=8), (1,) * 9, None) == "max_model_len"


def test_choices_are_taken_or_refused_together() -> None:  # 1.1 1.4
    model = make(max_waiting=3)
    assert model.submit((1,), 1) == [0]
    assert reason(model, (1,), 1, n=3) == "queue_full"
    assert model.state()["waiting"] == [0]
    assert model.submit((1,), 1, n=2) == [4, 5]
    assert sampled_until_idle(model) == 3


def test_no_choice_is_a_mistake_and_takes_no_number() -> None:  # 1.1
    model = make()
    with pytest.raises(ValueError, match="n is 0"):
        model.submit((1,), 1, n=0)
    assert model.submit((1,), 1) == [0]


def test_preempted_requests_fill_the_queue() -> None:  # 1.4
    model = make(blocks=3, max_waiting=1)
    model.submit((1, 2), 4)
    model.step(lambda request, k: 0)
    model.submit((1, 2), 3)
    for _ in range(3):
        model.step(lambda request, k: 0)
    assert model.state()["waiting"] == [1]
    assert model.state()["num_tokens"][1] == 3  # it has run
    assert reason(model, (1,), 1) == "queue_full"


def test_a_preempted_request_prefills_again_in_parts() -> None:  # 6.3 9.3
    model = make(blocks=3, budget=2)
    model.submit((1, 2), 4)
    model.submit((1, 2), 3)
    preempted = [model.step(lambda request, k: 0)["preempted"] for _ in range(4)]
    assert preempted == [[], [], [], [1]]
    seen = model.step(lambda request, k: 0)
    assert (seen["admitted"], seen["chunks"]) == ([(1, 0, (0, 1))], [(1, 0, 0, 2, False)])
    assert model.state()["status"] == {1: "prefilling"}
    seen = model.step(lambda request, k: 0)
    assert (seen["chunks"], seen["decodes"]) == ([(1, 0, 2, 1, True)], [])


@pytest.mark.parametrize(("prompt", "together"), [(4, True), (5, False), (6, False)])
def test_the_watermark_binds_up_to_what_it_leaves(prompt: int, together: bool) -> None:  # 8.3
    model = make(watermark=1, budget=9)
    model.submit((1,), 1)
    model.submit((1,) * prompt, 1)
    assert len(model.step(lambda request, k: 0)["admitted"]) == 1 + together


def test_an_abort_judges_at_the_call() -> None:  # 4.4
    model = make()
    model.abort(0)
    model.submit((1,), 2)
    assert model.step(lambda request, k: 0)["aborted"] == []
    model.abort(0)
    assert model.state()["status"] == {0: "decoding"}  # 3.3
    seen = model.step(lambda request, k: 0)
    assert (seen["aborted"], seen["reaped"], seen["finished"]) == ([0], [0], [])
    assert not model.has_work


@pytest.mark.parametrize(
    "limits",
    [{"budget": 1}, {"blocks": 0}, {"block_size": 0}, {"rows": 0}, {"max_model_len": 0}, {"watermark": -1}],
    ids=str,
)
def test_limits_that_are_refused_at_start(limits: dict[str, Any]) -> None:  # 9.1
    with pytest.raises(ValueError, match="at least"):
        make(**limits)
