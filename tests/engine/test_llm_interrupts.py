"""Ctrl-C and several callers of one ``LLM``: nothing hangs, nothing is lost, the engine stays usable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine import LLM, InvalidRequest
from tests.engine.test_llm import GREEDY, SAMPLED, TEXTS, assert_clean, make, tokens
from tests.models import write_folder

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("part", ["_prefill", "_decode", "rows.apply", "sampler.sample"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_ctrl_c_inside_a_step(monkeypatch: pytest.MonkeyPatch, part: str, after: bool, streamed: bool) -> None:
    """Wherever in the runner it arrives: KeyboardInterrupt comes out, and the next answers are right."""
    llm = make()
    expected = tokens(llm.generate(TEXTS, GREEDY))
    owner: Any = llm.engine.runner
    *path, name = part.split(".")
    for step in path:
        owner = getattr(owner, step)
    real, calls = getattr(owner, name), iter(range(10**6))

    def interrupted(*arguments: Any) -> Any:
        now = next(calls) == (0 if streamed or part == "_prefill" else 2)  # all prompts are prefilled in few calls
        if now and not after:
            raise KeyboardInterrupt
        result = real(*arguments)
        if now:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream("hello", GREEDY)) if streamed else llm.generate(TEXTS, GREEDY)
    assert_clean(llm)
    assert tokens(llm.generate(TEXTS, GREEDY)) == expected


def generate_for_ever(llm: LLM, timer: threading.Timer) -> None:
    """Until ``timer`` ends it."""
    timer.start()
    while True:
        llm.generate(TEXTS, GREEDY)


def test_ctrl_c_at_any_moment() -> None:
    """Real signals at thirty different moments of a run."""
    llm = make()
    expected = tokens(llm.generate(TEXTS, GREEDY))
    for attempt in range(30):
        timer = threading.Timer(0.003 * (attempt + 1), lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever(llm, timer)
        timer.join()
        assert_clean(llm)
    assert tokens(llm.generate(TEXTS, GREEDY)) == expected


def test_more_choices_than_the_queue_holds() -> None:
    """Can never be submitted, so it is refused; it does not wait for ever."""
    llm = make(max_waiting=2)
    with pytest.raises(InvalidRequest, match=r"^prompt 1: n is 3, .*2") as refused:
        llm.generate(["hello", "water"], [SAMPLED, attrs.evolve(SAMPLED, n=3)])
    assert refused.value.param == "n"
    assert_clean(llm)


def test_two_streams_side_by_side() -> None:
    llm = make()
    alone = ["".join(llm.stream(text, GREEDY)) for text in TEXTS[:2]]
    one, other = (llm.stream(text, GREEDY) for text in TEXTS[:2])
    texts = [next(one), next(other)]
    texts[1] += "".join(other)
    texts[0] += "".join(one)
    assert texts == alone
    assert_clean(llm)


def test_generate_while_a_stream_is_open() -> None:
    llm = make()
    alone = "".join(llm.stream("hello", GREEDY))
    expected = tokens(llm.generate(TEXTS, GREEDY))
    stream = llm.stream("hello", GREEDY)
    text = next(stream)
    assert tokens(llm.generate(TEXTS, GREEDY)) == expected
    assert text + "".join(stream) == alone
    assert_clean(llm)


def test_ctrl_c_on_the_command_line(tmp_path: Path) -> None:
    """130 and no traceback, in the middle of an answer."""
    folder = write_folder(tmp_path / "tiny", max_position_embeddings=4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "hello", "--raw", "--model", str(folder), "--temperature", "9"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert b"Traceback" not in err, err.decode()
    assert process.returncode == 130
    assert time.monotonic() - began < 10


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    """``python -m engine ... | head -c 1``."""
    folder = write_folder(tmp_path / "tiny", max_position_embeddings=4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "hello", "--raw", "--model", str(folder), "--temperature", "9"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    _, err = process.communicate(timeout=30)
    assert b"Traceback" not in err, err.decode()
    assert b"Exception ignored" not in err, err.decode()
