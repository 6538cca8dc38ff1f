"""Which functions of ``engine.compute`` ran: everything that a module defines, against what a profile hook saw called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import engine.compute

COMPUTE = Path(engine.compute.__file__).parent


def defined(module: str) -> set[str]:
    """``module.Class.function`` of every function in a module, nested ones and properties included; lambdas and
    comprehensions belong to the function around them."""
    path = COMPUTE / f"{module}.py"

    def inside(code: CodeType) -> Iterator[str]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                if "<lambda>" not in constant.co_qualname and "<" not in constant.co_name and not is_class(constant):
                    yield f"{module}.{constant.co_qualname.replace('.<locals>', '')}"
                yield from inside(constant)

    def is_class(code: CodeType) -> bool:
        return "__qualname__" in code.co_names and not code.co_flags & 0x02  # a class body has no fast locals

    return set(inside(compile(path.read_text(encoding="utf-8"), str(path), "exec")))


@contextmanager
def calls() -> Iterator[set[str]]:
    """Collects the functions of ``engine.compute`` that are called inside."""
    seen: set[str] = set()
    codes: set[CodeType] = set()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(hook)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        for code in codes:
            path = Path(code.co_filename)
            if path.parent == COMPUTE:
                seen.add(f"{path.stem}.{code.co_qualname.replace('.<locals>', '')}")
