"""The callers of a rung that has no server: each has its text from the production ``TextStream``, fed where the server feeds it.

Text with stop strings grows on the engine's side, in commit, because a match ends the request (rule 13); all other text is
made of the tokens afterwards, by whoever reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.control.record import StepRecord
from engine.text.stream import TextStream
from engine.trace import Submit, prompt_tokens
from properties.toy_text import vocabulary


class Readers:
    def __init__(self, byte_fallback: bool) -> None:
        self._vocabulary = vocabulary(byte_fallback)
        self._reading: dict[int, tuple[TextStream, bool]] = {}  # by request; and whether commit feeds it

    def open(self, event: Submit, stops: Sequence[str]) -> tuple[TextStream, ...]:
        """One text for each choice, to be handed to the engine where there are stop strings."""
        prompt = prompt_tokens(event.prompt)
        return tuple(
            TextStream(self._vocabulary, prompt, stop=stops, include_stop=event.include_stop) for _ in range(event.n)
        )

    def add(self, requests: Sequence[int], texts: Sequence[TextStream], in_commit: bool) -> None:
        for request, text in zip(requests, texts, strict=True):
            self._reading[request] = (text, in_commit)

    def hear(self, record: StepRecord) -> Mapping[int, str]:
        """What each caller of this iteration has been told since it began. An abort or an error tells nothing more."""
        told: dict[int, str] = {}
        ends = {end.request: end for end in (*record.aborted, *record.finished)}
        for request, sampled in record.sampled:
            if request not in self._reading:
                continue
            text, in_commit = self._reading[request]
            end = ends.get(request)
            if not in_commit and not (end is not None and isinstance(end.stop, int)):  # a stop token is no text
                text.push(sampled.token, False)
            told[request] = text.text
        for request, end in ends.items():
            if request in self._reading:
                text, _ = self._reading.pop(request)
                if end.reason in ("stop", "length"):
                    text.finish()
                told[request] = text.text
        return told
