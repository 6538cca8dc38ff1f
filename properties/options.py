"""What the commands' options may be: numbers within bounds, a fault of the catalogue, files that can be written without harm."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from properties.faults import CATALOGUE

LISTING = "python -m properties faults --list"
MOST_MINUTES = 1_000_000


class Misuse(Exception):
    """Options that cannot be meant; the message is one sentence. Exit status 2."""


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_short(text)} is no integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small, it must be at least {least}")
        return value

    return number


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_short(text)} is no number") from None
    if not 0 < value < MOST_MINUTES:
        bounds = f"above 0 and below {MOST_MINUTES}"
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a length of time in minutes, it must be {bounds}")
    return value


def fault(text: str) -> str:
    """An id of the catalogue. The error names those that look alike, not all of them."""
    if text in CATALOGUE:
        return text
    near = difflib.get_close_matches(text.upper(), CATALOGUE, n=3, cutoff=0.5)
    perhaps = f"; did you mean {' or '.join(near)}?" if near else "."
    raise argparse.ArgumentTypeError(f"there is no fault {_short(text)}{perhaps} '{LISTING}' lists them all")


class Names(argparse.Action):
    """Several names, each read by ``known``: with spaces between them, as documented, or commas."""

    def __init__(self, option_strings: list[str], dest: str, *, known: Callable[[str], str], **told: Any) -> None:
        super().__init__(option_strings, dest, nargs="+", **told)
        self._known = known

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """Raises ``ArgumentError`` for what ``known`` does not know, and where no name is left."""
        names = [name.strip() for value in values for name in value.split(",") if name.strip()]
        if not names:
            raise argparse.ArgumentError(self, "expected at least one name")
        try:
            setattr(namespace, self.dest, [self._known(name) for name in names])
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def judge_outputs(options: argparse.Namespace) -> None:
    """Before anything runs: no output is the input or another output, and each has a folder to stand in. Raises ``Misuse``."""
    taken = {options.file.resolve(): "the workload"}
    for name in ("html", "perfetto", "output"):
        path: Path | None = getattr(options, name, None)
        if path is None:
            continue
        place = path.resolve()
        if not path.is_char_device() and place in taken:
            raise Misuse(f"--{name} is {path}, but that is where {taken[place]} is: it would be overwritten")
        if path.is_dir():
            raise Misuse(f"--{name} is {path}, but that is a folder, not a file")
        if not path.parent.is_dir():
            raise Misuse(f"--{name} is {path}, but there is no folder {path.parent}")
        taken[place] = f"--{name}"


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
