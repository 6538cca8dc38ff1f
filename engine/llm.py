"""The offline convenience: a list of prompts in, a list of answers out.

Drives the same ``Engine`` as the server; only the loop is here.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import attrs

from engine.config import EngineConfig
from engine.control.plan import Logprobs, Sampled
from engine.control.record import Facts, Finished
from engine.engine import Engine
from engine.request import InvalidRequest, SamplingParams
from engine.text.stops import StopSet
from engine.text.stream import TextStream

Prompt = str | Sequence[int]


@attrs.frozen
class Choice:
    """One answer. ``stop`` is the token id or string that ended it; ``seed`` makes it repeatable. ``error``: what was wrong with
    this request alone, where ``finish_reason`` is ``error`` (rules 13.7 and 13.8)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: int | str | None
    seed: int
    sampled: tuple[Sampled, ...] = attrs.field(repr=False)
    facts: Facts | None = attrs.field(default=None, repr=False)
    error: str | None = None


@attrs.frozen
class Output:
    """The answers to one prompt; ``text``, ``token_ids`` and ``finish_reason`` are those of the first choice."""

    prompt_token_ids: tuple[int, ...] = attrs.field(repr=False)
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def prompt_logprobs(self) -> tuple[Logprobs, ...] | None:
        """One for each prompt token but the first; None unless ``SamplingParams.prompt_logprobs`` asked for them, or when no
        token was sampled."""
        sampled = self.choices[0].sampled
        return sampled[0].prompt if sampled else None

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens that the first choice found in the prefix cache; its neighbours find what it computes."""
        facts = self.choices[0].facts
        return 0 if facts is None else facts.cached_tokens


@attrs.define
class _Live:
    """A request on its way: its text so far and what was sampled."""

    text: TextStream
    seed: int
    stops_in_commit: bool
    sampled: list[Sampled] = attrs.field(factory=list)
    end: Finished | None = None
    error: str | None = None

    def take(self, token: Sampled, end: Finished | None) -> None:
        """Nothing of a token whose text failed is kept; then ``error`` says so, and the request has to end."""
        if end is not None and end.why is not None:
            return
        ended_by_id = end is not None and isinstance(end.stop, int)
        if not self.stops_in_commit and not ended_by_id:  # the stop token itself is not part of the text
            self._try(lambda: self.text.push(token.token, False))
        if self.error is None:
            self.sampled.append(token)

    def finish(self, end: Finished) -> None:
        if end.reason in ("stop", "length") and self.error is None:
            self._try(self.text.finish)
        self.error = self.error or (f"{end.why}: {end.cause}" if end.cause else end.why)
        self.end = end if self.error is None else attrs.evolve(end, reason="error", stop=None)

    def _try(self, make: Callable[[], object]) -> None:
        """Text may be the caller's code: what it raises is the end of this request, and no business of the others."""
        try:
            make()
        except Exception as error:  # noqa: BLE001
            self.error = f"the text of output token {len(self.sampled) + 1} failed: {type(error).__name__}: {error}"

    def choice(self) -> Choice:
        end = self.end
        assert end is not None
        tokens = tuple(s.token for s in self.sampled)
        return Choice(
            self.text.text, tokens, end.reason, end.stop, self.seed, tuple(self.sampled), end.facts, self.error
        )


class LLM:
    """``LLM("folder, .gguf file or hub id", max_num_seqs=8, ...)``; every keyword is a field of ``EngineConfig``."""

    def __init__(self, model: str | None = None, *, engine: Engine | None = None, **settings: Any) -> None:
        """Raises ``LoadError`` or ``ConfigError``. ``engine`` hands in one that exists already."""
        self.engine = engine or Engine.from_config(EngineConfig(model=model, **settings))
        self._lives: dict[int, _Live] = {}  # of every caller: whoever steps delivers to all

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str | None = None,
        progress: bool = True,
    ) -> list[Output]:
        """One ``Output`` per prompt, in order. Prompts are text or token ids; all are checked before the first runs.
        ``salt``: the prefix cache is shared only with requests that have the same one.

        Raises ``InvalidRequest`` (its message starts with the prompt's index). A step that fails ends its requests with
        finish reason ``error``, and so does a request that cannot go on, alone (``Choice.error``). Ctrl-C aborts what is
        running and leaves the engine usable.
        """
        batch = _as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise InvalidRequest("params", f"{len(each)} sampling parameters were given for {len(batch)} prompts")
        encoded = [self._encode(prompt) for prompt in batch]
        for index, (ids, one) in enumerate(zip(encoded, each, strict=True)):
            try:
                self.engine.check(ids, one, salt)
            except InvalidRequest as error:
                raise InvalidRequest(error.param, f"prompt {index}: {error}", error.code) from None
        return self._run(encoded, each, salt, progress)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        salt: str | None = None,
        progress: bool = False,
    ) -> Output:
        """One conversation through the model's chat template."""
        return self.generate([self.render(messages)], params, salt=salt, progress=progress)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | None = None) -> Iterator[str]:
        """The text of one answer, piece by piece; the pieces join to ``generate``'s text. Closing it aborts the request.

        Raises ``InvalidRequest``, and ``RuntimeError`` behind the last piece of an answer that failed (``Choice.error``).
        """
        one = params or SamplingParams()
        if one.n != 1:
            raise InvalidRequest("n", f"n is {one.n}, but a stream has one answer")
        requests: list[int] = []
        try:
            with _ctrl_c_afterwards():  # so that whatever was submitted is left
                ((request, live),) = self._submit(self._encode(prompt), one, StopSet(one.stop), salt)
                requests.append(request)
            while live.end is None:
                self._step()
                if piece := live.text.take():
                    yield piece
            if piece := live.text.take():  # what came while another caller stepped
                yield piece
            if live.end.reason == "error":  # the pieces so far are no answer
                raise RuntimeError(live.error or "the step failed")
        finally:
            self._leave(requests)

    def render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the answer. Raises ``InvalidRequest`` without a chat template."""
        model = self.engine.model
        if model.template is None or model.tokenizer is None:
            raise InvalidRequest("messages", f"{model.name} has no chat template; use generate with a plain prompt")
        return model.tokenizer.encode(model.template.render(list(messages)), add_special_tokens=False)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.engine.model.tokenizer is None:
            raise InvalidRequest("prompt", f"{self.engine.model.name} has no tokenizer; pass token ids")
        return self.engine.model.tokenizer.encode(prompt)

    def _submit(
        self, ids: list[int], params: SamplingParams, stops: StopSet, salt: str | None
    ) -> list[tuple[int, _Live]]:
        texts = [
            TextStream(
                self.engine.model.tokenizer,
                ids,
                stop=stops,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
            for _ in range(params.n)
        ]
        submitted = self.engine.submit(ids, params, texts=texts if params.stop else (), salt=salt)
        lives = [_Live(text, seed, bool(params.stop)) for text, seed in zip(texts, submitted.seeds, strict=True)]
        mine = list(zip(submitted.requests, lives, strict=True))
        self._lives.update(mine)
        return mine

    def _step(self) -> int:
        """One iteration, delivered to everybody who waits; returns the number of tokens sampled."""
        with _ctrl_c_afterwards():
            record = self.engine.step()
            ends = {end.request: end for end in (*record.aborted, *record.finished)}
            for request, sampled in record.sampled:
                if (live := self._lives.get(request)) is not None:
                    live.take(sampled, ends.get(request))
                    if live.error is not None:
                        self.engine.abort(request)
            for request, end in ends.items():
                if request in self._lives:
                    self._lives.pop(request).finish(end)
        return len(record.sampled)

    def _leave(self, requests: Sequence[int]) -> None:
        """Aborts what still runs and steps until blocks and rows are back; other callers' requests go on."""
        for request in requests:
            self.engine.abort(request)
        while any(request in self.engine.scheduler.requests for request in requests):
            self._step()
        for request in requests:
            self._lives.pop(request, None)

    def _run(
        self, encoded: list[list[int]], each: list[SamplingParams], salt: str | None, progress: bool
    ) -> list[Output]:
        groups: list[list[_Live]] = []
        running: dict[int, _Live] = {}
        submitted: list[int] = []
        pending = list(zip(encoded, each, strict=True))[::-1]
        sets = {stop: StopSet(stop) for stop in {tuple(one.stop) for one in each}}  # one for all who stop at the same
        with _bar(sum(p.n for p in each)) if progress else nullcontext() as bar:
            try:
                while pending or running:
                    # The queue has a bound; what does not fit yet waits here.
                    while (
                        pending
                        and len(self.engine.scheduler.waiting) + pending[-1][1].n <= self.engine.limits.max_waiting
                    ):
                        with _ctrl_c_afterwards():
                            ids, one = pending.pop()
                            group = self._submit(ids, one, sets[tuple(one.stop)], salt)
                            submitted.extend(request for request, _ in group)
                        groups.append([live for _, live in group])
                        running.update(group)
                    tokens = self._step()
                    done = [request for request, live in running.items() if live.end is not None]
                    for request in done:
                        del running[request]
                    if bar is not None:
                        bar(len(done), tokens)
            finally:
                self._leave(submitted)
        return [
            Output(tuple(ids), tuple(live.choice() for live in group))
            for ids, group in zip(encoded, groups, strict=True)
        ]


@contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """Holds Ctrl-C back until the block is done, so that no iteration is left half done; a second one does not wait."""
    held = False

    def hold(number: int, frame: Any) -> None:
        nonlocal held
        if held:
            signal.default_int_handler(number, frame)
        held = True

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a list of token ids is one prompt; anything else is a list of prompts."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


class _bar:
    """A progress bar over answers with the rate of output tokens, on stderr, only on a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=total, tokens=0)
        self.tokens = 0

    def __enter__(self) -> _bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, answers: int, tokens: int) -> None:
        self.tokens += tokens
        self.bar.update(self.task, advance=answers, tokens=self.tokens)
