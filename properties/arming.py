"""Arming one mistake from outside: a function of ``engine.*`` replaced, or one place in its text.

The engine has no switch for any of it. A place is replaced in the function's own source, compiled in its own module; when
the engine's text no longer holds that place exactly once, arming raises, so that a fault cannot fade away unnoticed.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import attrs

Change = tuple[object, str, Any]  # owner, name, what stands there while the fault is armed


class Faded(Exception):
    """The engine no longer holds the text that a fault replaces: bring the fault up to date."""


@attrs.frozen
class Fault:
    """``change`` is made anew each time the fault is armed, so a fault that counts starts from nothing in every run."""

    id: str
    title: str
    expect: tuple[str, ...]
    change: Callable[[], Change]


def line(owner: object, name: str, old: str, new: str) -> Callable[[], Change]:
    """A change of one place in the text of a function or property. ``old`` must stand there exactly once."""

    def change() -> Change:
        found = inspect.getattr_static(owner, name)
        function: Any = found.fget if isinstance(found, property) else found
        text = textwrap.dedent(inspect.getsource(function))
        if text.count(old) != 1:
            raise Faded(f"{name} holds {old!r} {text.count(old)} times, but a fault needs it exactly once")
        made: dict[str, Any] = {}
        exec(compile(text.replace(old, new), f"<{name} with a fault>", "exec"), vars(inspect.getmodule(function)), made)
        return owner, name, made[name]

    return change


def instead(owner: object, name: str, make: Callable[[Any], Any]) -> Callable[[], Change]:
    """A whole new function. ``make`` gets the one that stands there."""
    return lambda: (owner, name, make(inspect.getattr_static(owner, name)))
