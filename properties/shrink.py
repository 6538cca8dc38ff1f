"""A reducer on the value itself: what Hypothesis cannot shrink (saved files, the hunter's finds, recorded traffic), this can.

Greedy: try smaller workloads in an order from coarse to fine (drop events, join equal ones, then simplify the shape, then single
fields), keep each one that still fails with the same check, and start over until nothing smaller fails. No randomness: the same
file shrinks to the same file.

Requests are named by number, in aborts and in streams of somebody's answer. So events are dropped in two ways: as they stand,
and with those names following whom they meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from string import ascii_lowercase
from typing import Any

from engine.trace import ANSWER, BELOW, OUTSIDE, Abort, Event, FailStep, FormatError, Shape, Submit, Workload

MOST_CHOICES = 64  # of one submission
Fails = Callable[[Workload], bool]

_SIMPLEST: dict[str, Any] = {
    "budget": 2048,
    "watermark": 0,
    "max_model_len": 64,
    "max_waiting": 64,
    "capture_rows": (),
    "capture_widths": (),
    "persistent_batch": True,
    "prefix_cache": False,
    "byte_fallback": False,
}


def shrink(workload: Workload, fails: Fails, *, budget: int = 5000) -> tuple[Workload, int]:
    """The smallest workload found that still fails, and how many were tried. ``budget`` bounds the tries."""
    workload = replace(workload, digests=())  # of the run as it was recorded, and of no smaller one
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(workload):
            if tries >= budget:
                return workload, tries
            tries += 1
            if fails(candidate):
                workload, smaller = candidate, True
                break
    return workload, tries


def _candidates(workload: Workload) -> Iterator[Workload]:
    """Ever smaller neighbours; every one is strictly simpler, so the loop ends."""
    events = workload.events
    size = len(events)
    span = size // 2
    while span:  # halves, quarters, ... single events
        for at in range(0, size, span):
            yield replace(workload, events=events[:at] + events[at + span :])
        span //= 2
    span = size // 2
    while span:
        for at in range(0, size, span):
            yield from _followed(workload, at, min(size, at + span))
        span //= 2
    yield from _joined(workload)
    yield from _renamed(workload)
    for shape in _shapes(workload.shape):
        yield replace(workload, shape=shape)
    for at, event in enumerate(events):
        for simpler in _events(event):
            yield replace(workload, events=(*events[:at], simpler, *events[at + 1 :]))


def _joined(workload: Workload) -> Iterator[Workload]:
    """Two submissions that follow each other at once and ask for the same, as one of so many choices. Numbers stay."""
    events = workload.events
    for at, (one, two) in enumerate(pairwise(events)):
        if not isinstance(one, Submit) or not isinstance(two, Submit) or two.wait or one.n + two.n > MOST_CHOICES:
            continue
        if replace(one, wait=0, n=1) == replace(two, n=1):
            yield replace(workload, events=(*events[:at], replace(one, n=one.n + two.n), *events[at + 2 :]))


def _followed(workload: Workload, at: int, end: int) -> Iterator[Workload]:
    """Without the events from ``at`` up to ``end``, but with the same requests meant and the same iterations met; nothing
    where a later event means a request that is gone, or where plain dropping comes to the same."""
    events = workload.events
    first = sum(event.n for event in events[:at] if isinstance(event, Submit))
    gone = sum(event.n for event in events[at:end] if isinstance(event, Submit))
    late = sum(event.wait for event in events[at:end])
    submitted, kept = first + gone, list(events[:at])
    try:
        for event in events[end:]:
            kept.append(_following(event, submitted, first, gone))
            submitted += event.n if isinstance(event, Submit) else 0
        plain = [*events[:at], *events[end:]]
        if kept != plain:
            yield replace(workload, events=tuple(kept))
        if late and end < len(events):
            kept[at] = replace(kept[at], wait=kept[at].wait + late)
            yield replace(workload, events=tuple(kept))
    except (_Gone, FormatError):
        return


class _Gone(Exception):
    """Somebody is meant who is no longer there."""


def _following(event: Event, submitted: int, first: int, gone: int) -> Event:
    """The event after requests ``first`` up to ``first + gone`` are gone, ``submitted`` having been there before it."""

    def number(request: int) -> int:
        if first <= request < first + gone:
            raise _Gone
        return request if request < first else request - gone

    match event:
        case Abort():
            target = event.target(submitted)
            return event if target is None else replace(event, of=number(target))
        case Submit():
            pieces = tuple(
                (f"{ANSWER}{number(int(stream[len(ANSWER) :]))}" if _is_answer(stream) else stream, length)
                for stream, length in event.prompt
            )
            return replace(event, prompt=pieces)
    return event


def _is_answer(stream: str) -> bool:
    return stream.startswith(ANSWER) and stream[len(ANSWER) :].isdecimal()


def _renamed(workload: Workload) -> Iterator[Workload]:
    """The streams called a, b, c in order of appearance; what stands for an answer, or outside the vocabulary, keeps its name."""
    submits = [event for event in workload.events if isinstance(event, Submit)]
    streams = dict.fromkeys(stream for event in submits for stream, _ in event.prompt)
    plain = [stream for stream in streams if stream not in (OUTSIDE, BELOW) and not _is_answer(stream)]
    names = dict(
        zip(plain, ascii_lowercase, strict=False)
    )  # those beyond the 26th keep theirs, if it is nobody's by now
    if all(name == stream for stream, name in names.items()) or not set(plain[26:]).isdisjoint(ascii_lowercase):
        return
    yield replace(
        workload,
        events=tuple(
            replace(event, prompt=tuple((names.get(stream, stream), length) for stream, length in event.prompt))
            if isinstance(event, Submit)
            else event
            for event in workload.events
        ),
    )


def _shapes(shape: Shape) -> Iterator[Shape]:
    changes: list[dict[str, Any]] = [
        {name: simplest} for name, simplest in _SIMPLEST.items() if getattr(shape, name) != simplest
    ]
    for name in ("capture_rows", "capture_widths"):
        listed = getattr(shape, name)
        changes += [{name: listed[:at] + listed[at + 1 :]} for at in range(len(listed))]
    for name, least in (("blocks", 1), ("rows", 1), ("block_size", 1), ("watermark", 0)):
        changes += [{name: value} for value in _lower(getattr(shape, name), least)]
    if shape.budget != _SIMPLEST["budget"]:
        changes += [{"budget": value} for value in _lower(shape.budget, shape.rows)]
    for change in changes:
        try:
            yield replace(shape, **change)
        except FormatError:
            continue


def _events(event: Event) -> Iterator[Event]:
    for wait in _lower(event.wait, 0):
        yield replace(event, wait=wait)
    match event:
        case Submit():
            yield from _submits(event)
        case Abort():
            for of in _lower(abs(event.of), 0):
                yield replace(event, of=of)
        case FailStep():
            for count in _lower(event.count, 1):
                yield replace(event, count=count)


def _submits(event: Submit) -> Iterator[Submit]:
    for item in fields(Submit):
        default: Any = item.default
        if item.name not in ("wait", "prompt", "max_tokens") and getattr(event, item.name) != default:
            yield replace(event, **{item.name: default})
    if len(event.prompt) > 1:
        yield replace(event, prompt=(("a", event.prompt_len),))
        for at in range(len(event.prompt)):
            yield replace(event, prompt=event.prompt[:at] + event.prompt[at + 1 :])
    for at, (stream, length) in enumerate(event.prompt):
        for shorter in _lower(length, 1):
            yield replace(event, prompt=(*event.prompt[:at], (stream, shorter), *event.prompt[at + 1 :]))
        if stream != "a":
            yield replace(event, prompt=(*event.prompt[:at], ("a", length), *event.prompt[at + 1 :]))
    leasts = {"max_tokens": 1, "stop_at": 1, "stop_text": 1, "fail_at": 1, "min_tokens": 0, "n": 1}
    for name, least in leasts.items():
        value = getattr(event, name)
        if value is not None:
            for lower in _lower(value, least):
                change: dict[str, Any] = {name: lower}
                yield replace(event, **change)


def _lower(value: int, least: int) -> Iterator[int]:
    """Smaller values, the smallest first; then by halves, then by one."""
    if value > least:
        yield from dict.fromkeys((least, (value + least) // 2, value - 1))
