"""Triton settles on its interpreter when it is first imported: on a machine without a GPU that is before any test runs."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
