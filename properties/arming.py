"""Arming one mistake from outside: a function of ``engine.*`` or ``server.*`` replaced, or one place in its text.

The engine has no switch for any of it. A place is replaced in the function's own source, compiled in its own module; when
the engine's text no longer holds that place exactly once, arming raises, so that a fault cannot fade away unnoticed.

Owners are named, ``"engine.control.blocks:BlockPool"`` or a module alone, and imported when a fault is armed: a catalogue
of faults in the whole house costs nothing to load, and a replay on the ledger rung never imports torch.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import attrs

Owner = object  # a class or module, or its name
Change = tuple[object, str, Any]  # owner, name, what stands there while the fault is armed

AREAS = (
    "allocator",
    "scheduler",
    "preemption",
    "rows",
    "prefix cache",
    "graph replay",
    "sampler",
    "text",
    "streaming",
)
OWN, OUTSIDER = "own", "outsider"  # sources that are no public report


_ARMED: ContextVar[tuple[Change, ...]] = ContextVar("armed", default=())  # what stood there before


class Faded(Exception):
    """The engine no longer holds the text that a fault replaces: bring the fault up to date."""


@attrs.frozen
class Fault:
    """One mistake. ``change`` is made anew each time it is armed, so a fault that counts starts from nothing in every run.

    ``expect``: the checks that must see it, each judged alone. ``rung``: the one on which it must be found. ``source``: the
    public report that it re-creates ("owner/repo#1", "owner/repo PR#1"), ``own``, or ``outsider``. ``rules``: clauses of
    SPEC.md that it breaks, none where the specification ends. ``needs``: the floor event (properties/floors.py) without
    which it cannot show, so that "never reached" is told from "reached and unseen"; empty where any workload will do.
    """

    id: str
    title: str
    expect: tuple[str, ...]
    change: Callable[[], Change]
    area: str = attrs.field(default="", kw_only=True)
    rung: str = attrs.field(default="ledger", kw_only=True)
    source: str = attrs.field(default=OWN, kw_only=True)
    rules: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    needs: str = attrs.field(default="", kw_only=True)

    @property
    def public(self) -> bool:
        return self.source not in (OWN, OUTSIDER)


def in_area(area: str, *faults: Fault, rung: str | None = None) -> tuple[Fault, ...]:
    """The faults of one file: their area, and their rung where it is not each fault's own."""
    return tuple(attrs.evolve(fault, area=area, rung=rung or fault.rung) for fault in faults)


@contextmanager
def arm(change: Change) -> Iterator[None]:
    owner, name, value = change
    before = _ARMED.set((*_ARMED.get(), (owner, name, inspect.getattr_static(owner, name))))
    try:
        with patch.object(owner, name, value):
            yield
    finally:
        _ARMED.reset(before)


@contextmanager
def disarmed() -> Iterator[None]:
    """The engine as it is, whatever is armed around it: for an oracle that runs engine code and must not err with it."""
    with ExitStack() as stack:
        for owner, name, original in reversed(_ARMED.get()):
            stack.enter_context(patch.object(owner, name, original))
        yield


def line(owner: Owner, name: str, old: str, new: str) -> Callable[[], Change]:
    """A change of one place in the text of a function or property. ``old`` must stand there exactly once."""
    made: list[Change] = []  # the text does not change while the process lives, so it is compiled once

    def change() -> Change:
        if not made:
            made.append(_changed(_resolve(owner), name, old, new))
        return made[0]

    return change


def instead(owner: Owner, name: str, make: Callable[[Any], Any]) -> Callable[[], Change]:
    """A whole new function. ``make`` gets the one that stands there."""

    def change() -> Change:
        found = _resolve(owner)
        return found, name, make(inspect.getattr_static(found, name))

    return change


def _changed(owner: object, name: str, old: str, new: str) -> Change:
    found = inspect.getattr_static(owner, name)
    function: Any = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    text = textwrap.dedent(inspect.getsource(function))
    if text.count(old) != 1:
        raise Faded(f"{name} holds {old!r} {text.count(old)} times, but a fault needs it exactly once")
    made: dict[str, Any] = {}
    code = compile(text.replace(old, new), f"<{name} with a fault>", "exec")
    exec(code, vars(inspect.getmodule(function)), made)
    return owner, name, made[name]


def _resolve(owner: Owner) -> object:
    if not isinstance(owner, str):
        return owner
    module, _, path = owner.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found
