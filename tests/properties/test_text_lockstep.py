"""Text under lockstep on the ledger rung: the check sees its faults by itself, and the workload language means what it says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.trace import CLIENTS, Abort, FormatError, Shape, Shutdown, Submit, Workload, dumps, loads
from properties import corpus
from properties.arming import arm, line
from properties.faults import CATALOGUE, armed
from properties.generate import RandomSource, workload
from properties.lockstep import run
from properties.report import timeline
from properties.shrink import shrink

SHAPE = Shape(blocks=16, block_size=4, rows=4)
ONE = Submit(0, (("a", 2),), 12)
SAW_TEXT = sorted(fault.id for fault in CATALOGUE.values() if fault.area == "text" and "text" in fault.expect)


def test_faults_of_text_are_many() -> None:
    assert len(SAW_TEXT) >= 16


@pytest.mark.parametrize("fault", SAW_TEXT)
def test_the_check_alone_sees_what_text_may_not_be(fault: str) -> None:
    """In a witness of the fault, or in the first workloads that the hunter would draw."""
    candidates = [w for w in corpus.workloads().values() if w.fault == fault]
    for candidate in (*candidates, *(workload(RandomSource(f"text {number}")) for number in range(150))):
        with armed(fault):
            found = run(candidate, checks=frozenset({"text"})).first
        if found is not None and found.check == "text":
            assert run(candidate).first is None
            return
    raise AssertionError(f"{fault} is not seen by text alone")


def test_a_stop_string_ends_a_request_where_its_own_text_says() -> None:
    ran = run(Workload(SHAPE, (replace(ONE, stop_text=5),)))
    assert ran.first is None
    (caller,) = ran.callers.values()
    assert caller.text.after is not None
    assert len(caller.delivered) == caller.text.after < 12
    assert [(end.reason, end.stop) for end in caller.ends] == [("stop", caller.text.stop)]
    assert ran.occurred["stopped by a string"] == 1
    assert ran.occurred["text held back"] > 0
    include = run(Workload(SHAPE, (replace(ONE, stop_text=5, include_stop=True),))).callers[0].text
    assert include.text == caller.text.text + str(include.stop)


@pytest.mark.parametrize("fallback", [False, True])
def test_what_only_the_last_token_makes_certain_ends_a_request_with_reason_stop(fallback: bool) -> None:
    """SPEC 13.5; an engine that says ``length`` there differs from the specification."""
    shape = replace(SHAPE, byte_fallback=fallback)
    asked = [replace(ONE, prompt=((name, 2),), max_tokens=k, stop_text=10) for k in range(1, 9) for name in "abcd"]
    held = 0
    for event in asked:
        ran = run(Workload(shape, (event,)))
        assert ran.first is None
        (caller,) = ran.callers.values()
        if caller.text.stop is None or caller.text.after != event.max_tokens:
            continue
        held += 1
        assert [(end.reason, end.stop) for end in caller.ends] == [("stop", caller.text.stop)]
        with arm(line("engine.control.scheduler:Scheduler", "_append", "may_stop, last)", "may_stop)")()):
            found = run(Workload(shape, (event,))).first
        assert found is not None
        assert found.check in ("decisions", "solo")
    assert held > 3


@pytest.mark.parametrize("fallback", [False, True])
def test_min_tokens_moves_the_stop(fallback: bool) -> None:
    shape = replace(SHAPE, byte_fallback=fallback)
    after = [run(Workload(shape, (replace(ONE, stop_text=2, min_tokens=k),))) for k in (0, 3)]
    assert [ran.first for ran in after] == [None, None]
    first, second = (ran.callers[0].text.after for ran in after)
    assert first in (1, 2)
    assert second is None or second >= 3


def test_shutdown_ends_everybody_and_everything_behind_it_is_ignored() -> None:
    ran = run(Workload(SHAPE, (ONE, ONE, Shutdown(3), ONE, Abort(0, 0))))
    assert ran.first is None
    assert sorted(ran.callers) == [0, 1]
    assert {end.reason for caller in ran.callers.values() for end in caller.ends} == {"abort"}
    assert len(ran.steps) == 4
    assert "shutdown" in "\n".join(timeline(ran))


def test_who_leaves_at_once_is_aborted_before_the_first_iteration() -> None:
    ran = run(Workload(SHAPE, (replace(ONE, client="leaves", n=2), ONE)))
    assert ran.first is None
    assert [caller.ends[0].reason for _, caller in sorted(ran.callers.items())] == ["abort", "abort", "length"]
    assert ran.steps[0].events == ("+r0..r1", "leave r0", "leave r1", "+r2")


def test_the_new_words_are_written_only_where_they_say_something() -> None:
    whole = Workload(
        replace(SHAPE, byte_fallback=True),
        (replace(ONE, stop_text=3, include_stop=True, client="stalls"), Shutdown(2)),
    )
    text = dumps(whole)
    assert loads(text) == whole
    assert '"stop_text": 3, "include_stop": true, "client": "stalls"' in text
    assert '{"wait": 2, "shutdown": true}' in text
    plain = dumps(Workload(SHAPE, (ONE,)))
    assert not any(word in plain for word in ("stop_text", "include_stop", "client", "byte_fallback"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop_text": 0}, "submit.stop_text is 0"),
        ({"include_stop": 1}, "submit.include_stop is 1, but must be true or false"),
        ({"client": "waits"}, f"submit.client is 'waits', but must be one of {', '.join(CLIENTS)}"),
    ],
)
def test_what_no_client_does_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        replace(ONE, **change)  # type: ignore[arg-type]


def test_a_shutdown_is_true_or_not_there() -> None:
    text = dumps(Workload(SHAPE, (Shutdown(0),))).replace("true}]", "false}]")
    with pytest.raises(FormatError, match="event 1: shutdown is False, but must be true"):
        loads(text)


def test_everything_said_of_text_and_clients_can_be_shrunk_away() -> None:
    dressed = Workload(
        replace(SHAPE, byte_fallback=True),
        (replace(ONE, stop_text=9, include_stop=True, min_tokens=3, client="whole"), Shutdown(4)),
    )
    small, _ = shrink(dressed, lambda candidate: True)
    assert len(small.events) <= 1
    assert small.shape == Shape(1, 1, 1)
    kept, _ = shrink(dressed, lambda candidate: any(isinstance(e, Submit) and e.stop_text for e in candidate.events))
    (event,) = kept.events
    assert isinstance(event, Submit)
    assert (event.stop_text, event.include_stop, event.client, kept.shape.byte_fallback) == (1, False, "streams", False)


def test_text_on_the_ledger_rung_needs_no_library() -> None:
    witness = next(path for path in corpus.files() if path.name.startswith("D04"))
    code = (
        "import sys; from properties.__main__ import main; "
        f"status = main(['replay', {str(witness)!r}, '--arm', 'D04']); "
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'fastapi', 'server') if m in sys.modules]); sys.exit(status)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 1, done.stderr
    assert done.stdout.rstrip().endswith("[]")
    assert "text of r0" in done.stdout
