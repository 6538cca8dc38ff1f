"""What was freed between things that stay goes back to the system, and building an engine asks for that at its end."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

import engine.build
from engine.config import EngineConfig
from engine.loading.heap import give_back
from tests.models import write_gguf

MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc")
def test_memory_between_what_stays_is_given_back() -> None:
    many = [bytearray(100_000) for _ in range(640)]  # 61 MiB, each below the size at which the C library maps memory
    stays = many[::64]
    full = resident()
    many.clear()
    freed = resident()
    give_back()
    assert len(stays) == 10
    assert freed - resident() > 30 * MIB  # so freeing alone had not done it
    assert full - resident() > 50 * MIB


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ctypes, "CDLL", asked.append)  # an object without malloc_trim: None
    give_back()
    assert asked == [None]


def test_an_engine_is_built_before_memory_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    assemble = engine.build.assemble

    def noted(*given: Any) -> Any:
        order.append("built")
        return assemble(*given)

    monkeypatch.setattr(engine.build, "assemble", noted)
    monkeypatch.setattr(engine.build, "give_back", lambda: order.append("given back"))
    path = write_gguf(tmp_path / "a.gguf", "llama", "F32")
    engine.build.build(EngineConfig(model=str(path), num_kv_blocks=8, weights_cache="off"))
    assert order == ["built", "given back"]
