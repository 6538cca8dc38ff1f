"""A second generator of the same workloads: rules that look at the run before they choose.

A list of events drawn beforehand cannot ask to abort the request that is being prefilled right now, or to submit a prompt that
begins like something that is cached at this moment. These rules can: the specification runs along while events are chosen,
and tells what there is. What comes out is a plain ``Workload``, which the driver then runs like any other, so that a failure
shrinks, is saved and is replayed as always. It is no second harness: nothing is compared here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.trace import FAILURES, Abort, Event, FailStep, Shape, Submit, Workload, prompt_tokens
from model_sim.model import Refused
from properties.lockstep import model_of
from properties.solo import AffineOracle

Prompt = tuple[tuple[str, int], ...]
small = st.integers(1, 3)


class Rules(RuleBasedStateMachine):
    """``judge`` gets the workload of each example when its rules are through. ``chosen`` counts the rules that ran."""

    chosen: ClassVar[Counter[str]]

    def judge(self, workload: Workload) -> None:
        raise NotImplementedError

    @initialize(
        blocks=st.integers(3, 6),
        block_size=small,
        rows=small,
        spare=st.sampled_from((64, 0, 1, 3)),
        persistent=st.sampled_from((True, True, False)),
        cache=st.sampled_from((True, True, False)),
    )
    def start(self, blocks: int, block_size: int, rows: int, spare: int, persistent: bool, cache: bool) -> None:
        self.shape = Shape(
            blocks,
            block_size,
            rows,
            rows + spare,
            capture_rows=(rows,),
            capture_widths=(max(1, blocks - 1),),
            persistent_batch=persistent,
            prefix_cache=cache,
        )
        self.model, self._oracle = model_of(self.shape), AffineOracle()
        self.events: list[Event] = []
        self.asked: dict[int, Submit] = {}  # by request
        self.states: list[dict[str, Any]] = []  # after each iteration
        self._dead: dict[int, int] = {}  # request -> at which generated token its row cannot be sampled
        self._submitted = self._waited = self._failing = 0
        self._state = self.model.state()

    # What there is ---------------------------------------------------------------------------------------------------

    def _requests(self, status: str, *, resumed: bool = False) -> list[int]:
        """Live requests in a state; ``resumed``: only those that have generated something."""
        told = self._state["num_tokens"]
        return [
            number
            for number, state in self._state["status"].items()
            if state == status and (not resumed or told[number] > self.asked[number].prompt_len)
        ]

    def _cached_prompts(self) -> list[Prompt]:
        """Prompts whose first block is published at this moment."""
        held = {tokens for salt, tokens in self._state.get("published", {}).values() if salt is None}
        size = self.shape.block_size
        prompts = {event.prompt: None for event in self.asked.values() if event.prompt_len >= size}
        return [prompt for prompt in prompts if prompt_tokens(prompt)[:size] in held]

    # Rules -----------------------------------------------------------------------------------------------------------

    @rule(count=small)
    def let_pass(self, count: int) -> None:
        for _ in range(count):
            if self.model.has_work:
                self._step()

    @rule(stream=st.sampled_from("abc"), length=st.integers(1, 6), most=st.integers(1, 8), n=st.sampled_from((1, 2, 3)))
    def submit(self, stream: str, length: int, most: int, n: int) -> None:
        self._submit("submit", Submit(self._wait(), ((stream, length),), most, n=n))

    @rule(stream=st.sampled_from("ab"), blocks=small, generated=st.sampled_from((1, 2)))
    def submit_up_to_a_border(self, stream: str, blocks: int, generated: int) -> None:
        """Prompt and answer end at block borders."""
        size = self.shape.block_size
        self._submit("submit_up_to_a_border", Submit(self._wait(), ((stream, blocks * size),), generated * size))

    @precondition(lambda self: self._cached_prompts())
    @rule(data=st.data(), tail=st.sampled_from((0, 1, 2)))
    def submit_what_is_cached(self, data: st.DataObject, tail: int) -> None:
        prompt = data.draw(st.sampled_from(self._cached_prompts()))
        self._submit("submit_what_is_cached", Submit(self._wait(), (*prompt, ("d", tail)) if tail else prompt, 2))

    @precondition(lambda self: not self._state["status"].keys() >= self.asked.keys())
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """The same request once more, when its first answer is over."""
        over = sorted(set(self.asked) - set(self._state["status"]))
        before = self.asked[data.draw(st.sampled_from(over))]
        self._submit("ask_again", Submit(self._wait(), before.prompt, before.max_tokens, n=before.n))

    @precondition(lambda self: self._state["status"])
    @rule(blocks=small, at=small, by=st.sampled_from(FAILURES))
    def submit_one_that_cannot_go_on(self, blocks: int, at: int, by: str) -> None:
        """Beside others. Its prompt ends at a block border, so that with its first token it also publishes."""
        prompt = (("a", blocks * self.shape.block_size),)
        self._submit("submit_one_that_cannot_go_on", Submit(self._wait(), prompt, at + 1, n=2, fail_at=at, fail_by=by))

    @precondition(lambda self: self._cached_prompts())
    @rule(data=st.data(), at=small, by=st.sampled_from(FAILURES))
    def hit_and_not_go_on(self, data: st.DataObject, at: int, by: str) -> None:
        """What it hit must stay published, and what it computed behind it must not be."""
        prompt = (*data.draw(st.sampled_from(self._cached_prompts())), ("d", self.shape.block_size))
        self._submit("hit_and_not_go_on", Submit(self._wait(), prompt, at + 1, fail_at=at, fail_by=by))

    @precondition(lambda self: self._state["status"] and not self._state["waiting"])
    @rule(blocks=small, by=st.sampled_from(FAILURES))
    def wait_for_one_that_cannot_go_on(self, blocks: int, by: str) -> None:
        """The second would hit what the first is about to publish (SPEC 8.7)."""
        prompt = (("e", blocks * self.shape.block_size),)
        self._submit("wait_for_one_that_cannot_go_on", Submit(self._wait(), prompt, 2, fail_at=1, fail_by=by))
        self._submit("wait_for_one_that_cannot_go_on", Submit(self._wait(), (*prompt, ("d", 1)), 2))

    @precondition(lambda self: self._requests("prefilling"))
    @rule()
    def abort_the_one_that_prefills(self) -> None:
        self._abort("abort_the_one_that_prefills", self._requests("prefilling")[0])

    @precondition(lambda self: self._requests("waiting", resumed=True))
    @rule()
    def abort_one_that_was_preempted(self) -> None:
        self._abort("abort_one_that_was_preempted", self._requests("waiting", resumed=True)[-1])

    @precondition(lambda self: self._requests("decoding"))
    @rule(data=st.data())
    def abort_one_that_decodes(self, data: st.DataObject) -> None:
        self._abort("abort_one_that_decodes", data.draw(st.sampled_from(self._requests("decoding"))))

    @precondition(lambda self: self._requests("prefilling"))
    @rule()
    def fail_while_one_prefills(self) -> None:
        self.chosen["fail_while_one_prefills"] += 1
        self.events.append(FailStep(self._wait(), 1))
        self._failing += 1

    def teardown(self) -> None:
        if getattr(self, "events", None):
            self.judge(self.workload())

    # The workload ----------------------------------------------------------------------------------------------------

    def workload(self) -> Workload:
        return Workload(self.shape, tuple(self.events))

    def drain(self) -> None:
        while self.model.has_work:
            self._step()

    def _wait(self) -> int:
        waited, self._waited = self._waited, 0
        return waited

    def _step(self) -> None:
        self.model.step(self._token, self._failing > 0)
        self._failing = max(0, self._failing - 1)
        self._state = self.model.state()
        self.states.append(self._state)
        self._waited += 1

    def _token(self, request: int, k: int) -> int | None:
        return None if self._dead.get(request) == k + 1 else self._oracle.token(request, k)

    def _submit(self, name: str, event: Submit) -> None:
        self.chosen[name] += 1
        self.events.append(event)
        first, self._submitted = self._submitted, self._submitted + event.n
        try:
            text_fails = (event.fails("text"), *[None] * (event.n - 1))
            numbers = self.model.submit(prompt_tokens(event.prompt), event.max_tokens, n=event.n, text_fails=text_fails)
        except Refused:
            return
        assert numbers == list(range(first, self._submitted))
        if (dead_at := event.fails("sampling")) is not None:
            self._dead[first] = dead_at
        self.asked.update(dict.fromkeys(numbers, event))
        self._state = self.model.state()

    def _abort(self, name: str, request: int) -> None:
        self.chosen[name] += 1
        self.events.append(Abort(self._wait(), request))
        self.model.abort(request)
