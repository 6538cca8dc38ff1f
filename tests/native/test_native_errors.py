"""The printed table of errors: every kernel and weight type is in it, all bounds hold, and a worse kernel breaks one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ci.native_errors import errors, main
from engine.native.kernels import Kernels
from engine.native.library import INTEGER, TYPES
from tests.native.kit import kernels


def test_all_bounds_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for kind in (*TYPES, *INTEGER.values()):
        assert f"| {kind} |" in printed


def test_a_worse_kernel_breaks_a_bound() -> None:
    """Inputs rounded to bf16 before the product."""

    class Worse:
        def __init__(self, real: Kernels) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def linear(self, weight: Any, bias: Any, x: torch.Tensor, out: torch.Tensor) -> None:
            self.real.linear(weight, bias, x.bfloat16().float(), out)

    found = errors(Worse(kernels()))  # type: ignore[arg-type]
    assert {one.type for one in found if not one.holds} == set(TYPES)
