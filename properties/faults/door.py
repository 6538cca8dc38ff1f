"""Faults at the door and in the order of requests: what is let in, as which number, and who comes before whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from properties.arming import Fault, in_area, instead, line

MODULE = "engine.control.scheduler"  # the name through which submit reaches the door
SCHEDULER = "engine.control.scheduler:Scheduler"
REQUEST = "engine.control.request:Request"


def _door_without(name: str) -> Any:
    def make(check: Callable[..., int]) -> Any:
        return lambda limits, *rest: check(attrs.evolve(limits, **{name: 1 << 20}), *rest)

    return make


def _refused_ids_are_given_again(submit: Callable[..., Any]) -> Any:
    def faulty(scheduler: Any, submission: Any, n: int = 1) -> Any:
        try:
            return submit(scheduler, submission, n)
        except Exception:
            scheduler._next_id -= n
            raise

    return faulty


FAULTS = in_area(
    "scheduler",
    Fault(
        "S07",
        "the queue is as long as it likes",
        ("decisions",),
        instead(MODULE, "check_door", _door_without("max_waiting")),
        rules=("1.2", "1.4"),
        needs="refused: queue_full",
    ),
    Fault(
        "S08",
        "the door lets in what the pool can never hold",
        ("decisions",),
        instead(MODULE, "check_door", _door_without("num_blocks")),
        source="GeeeekExplorer/nano-vllm#274",
        rules=("1.2", "1.5"),
        needs="refused: pool",
    ),
    Fault(
        "S15",
        "ties of priority go to the later arrival",
        ("decisions", "ledger"),
        line(REQUEST, "order", "(self.priority, self.id)", "(self.priority, -self.id)"),
        rules=("2.1", "2.3"),
    ),
    Fault(
        "S21",
        "an empty prompt passes the first test and kills the next",
        ("raises",),
        line(MODULE, "check_door", "if not prompt:", "if False:"),
        source="vllm-project/vllm#7283",
        rules=("1.2",),
        needs="refused: empty_prompt",
    ),
    Fault(
        "S27",
        "priority is stored and never looked at",
        ("decisions", "ledger"),
        line(REQUEST, "order", "(self.priority, self.id)", "(0, self.id)"),
        rules=("2.1", "2.2"),
        needs="overtook by priority",
    ),
    Fault(
        "S29",
        "an absent max_tokens is one token short",
        ("decisions", "solo"),
        line(
            "engine.control.door",
            "most_tokens",
            "limits.max_model_len - prompt_len,",
            "limits.max_model_len - 1 - prompt_len,",
        ),
        rules=("1.3",),
    ),
    Fault(
        "S30",
        "aborted requests leave the queue's count at once",
        ("decisions",),
        line(SCHEDULER, "submit", "len(self.waiting)", "sum(not r.aborted for r in self.waiting)"),
        rules=("1.4",),
        needs="refused: queue_full",
    ),
    Fault(
        "S31",
        "the numbers of a refused request are given again",
        ("decisions",),
        instead(SCHEDULER, "submit", _refused_ids_are_given_again),
        rules=("1.1",),
    ),
)
