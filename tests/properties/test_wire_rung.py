"""The wire rung: every kind of client and end happens, the check alone sees its faults, and a refusal keeps the numbers right."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from engine.trace import OUTSIDE, Abort, FailStep, Shape, Shutdown, Submit, Workload, dumps, loads
from properties import corpus
from properties.faults import CATALOGUE, armed
from properties.generate import RandomSource, workload
from properties.killing import first_kill, outcome, reduced
from properties.lockstep import Run, run
from properties.wire import WireRung
from properties.wire_client import STALL, Client
from properties.wire_loop import QuietLoop

SHAPE = Shape(blocks=24, block_size=4, rows=4)
ONE = Submit(0, (("a", 2),), 8)
STREAMING = sorted(fault.id for fault in CATALOGUE.values() if fault.area == "streaming")
SAW_STREAM = [fault for fault in STREAMING if "stream" in CATALOGUE[fault].expect]


class Watched(WireRung):
    """A wire rung that counts what became of its clients."""

    def __init__(self, shape: Shape, counts: Counter[str], clients: list[Client]) -> None:
        super().__init__(shape)
        self._counts, self._all = counts, clients

    def submit(self, *arguments: object) -> tuple[int, ...]:
        requests = super().submit(*arguments)  # type: ignore[arg-type]
        self._all.append(self._clients[-1])
        return requests

    def close(self) -> None:
        super().close()
        for client in self._all:
            self._counts[f"status {client.status}"] += 1
            self._counts["left"] += client.left
            self._counts["cut"] += bool(client.errors)
            self._counts["whole" if not client.streams else "stalled" if client.stalls else "streamed"] += 1
            self._counts["told a stop string"] += any(isinstance(stop, str) for f in client.finishes for _, stop in f)
        self._all = []


def watched(given: Workload) -> tuple[Run, Counter[str], list[Client]]:
    counts: Counter[str] = Counter()
    clients: list[Client] = []
    return run(given, make_rung=lambda shape: Watched(shape, counts, clients)), counts, clients


def test_generated_workloads_hold_and_make_every_kind_of_client() -> None:
    total: Counter[str] = Counter()
    for number in range(60):
        ran, counts, _ = watched(workload(RandomSource(f"wire {number}")))
        assert ran.first is None, number
        total += counts
    kinds = ("status 200", "status 500", "left", "cut", "whole", "stalled", "streamed", "told a stop string")
    assert {kind: total[kind] for kind in kinds if not total[kind]} == {}


def test_the_same_workload_sends_the_same_thing_twice() -> None:
    for number in range(5):
        given = workload(RandomSource(f"wire again {number}"))
        (_, _, first), (_, _, second) = watched(given), watched(given)
        told = [[(c.messages, c.texts, c.tokens, c.finishes, c.errors) for c in clients] for clients in (first, second)]
        assert told[0] == told[1]


def test_faults_of_streaming_are_many() -> None:
    assert len(STREAMING) >= 20
    assert {CATALOGUE[fault].rung for fault in STREAMING} == {"wire"}


@pytest.mark.parametrize("fault", SAW_STREAM)
def test_the_check_alone_sees_what_a_stream_may_not_be(fault: str) -> None:
    """In the witness of the fault, or in the first workloads that the hunter would draw."""
    (witness,) = [w for w in corpus.workloads().values() if w.fault == fault]
    for candidate in (witness, *(workload(RandomSource(f"wire {number}")) for number in range(60))):
        with armed(fault):
            found = run(candidate, make_rung=WireRung, checks=frozenset({"stream"})).first
        if found is not None and found.check == "stream":
            return
    raise AssertionError(f"{fault} is not seen by stream alone")


def test_the_hunt_finds_shrinks_and_replays_on_this_rung() -> None:
    kill = first_kill("V09", 3, workloads=100)
    assert kill is not None
    small, found, _ = reduced(kill, "V09")
    assert (found.check, len(small.events)) == ("stream", 1)
    assert outcome(loads(dumps(small)), "V09").first == found
    assert outcome(small, None, rung="wire").first is None


def test_leaving_twice_after_the_end_and_before_admission_changes_nothing_else() -> None:
    full = replace(SHAPE, rows=1)
    waiting = (ONE, ONE, Abort(2, 1), Abort(0, 1), Abort(1, 1), Abort(9, 0), Abort(0, 0))
    ran, counts, clients = watched(Workload(full, waiting))
    assert ran.first is None
    assert (counts["left"], counts["status 200"]) == (
        1,
        2,
    )  # the second was told that a stream begins, and nothing else
    assert clients[1].texts == [""]
    assert clients[0].dones == 1


def test_leaving_ends_every_choice_of_an_answer_and_nobody_elses() -> None:
    ran, _, clients = watched(Workload(SHAPE, (replace(ONE, n=3), ONE, Abort(3, 1))))
    assert ran.first is None
    assert {r: caller.ends[0].reason for r, caller in ran.callers.items()} == dict.fromkeys(range(3), "abort") | {
        3: "length"
    }
    assert clients[0].done
    assert len(ran.callers[0].delivered) == 3


@pytest.mark.parametrize("manner", ["streams", "whole"])
def test_a_failing_step_ends_the_answers_in_it_and_no_others(manner: str) -> None:
    """Of three choices two are in the step; the third, which waits, is aborted with them; the other answer is whole."""
    small = replace(SHAPE, rows=2)
    ran, counts, clients = watched(Workload(small, (replace(ONE, n=3, client=manner), ONE, FailStep(2, 1))))
    assert ran.first is None
    assert [ran.callers[r].ends[0].reason for r in range(4)] == ["error", "error", "abort", "length"]
    assert clients[0].errors == ["engine_error"]
    assert (clients[0].dones, clients[1].dones, clients[1].errors) == (1, 1, [])
    assert counts["status 500"] == (manner == "whole")


@pytest.mark.parametrize("manner", ["streams", "whole", "stalls"])
def test_shutdown_answers_everybody(manner: str) -> None:
    full = replace(SHAPE, rows=1)
    ran, _, clients = watched(Workload(full, (replace(ONE, client=manner), replace(ONE, client=manner), Shutdown(2))))
    assert ran.first is None
    assert [client.errors for client in clients] == [["server_shutdown"]] * 2
    assert all(client.done for client in clients)


def test_a_slow_reader_gets_everything_later_in_fewer_pieces() -> None:
    ran, _, (fast, slow) = watched(Workload(SHAPE, (ONE, replace(ONE, client="stalls"))))
    assert ran.first is None
    assert fast.messages - STALL <= slow.messages < fast.messages
    assert len(slow.tokens[0]) == len(fast.tokens[0]) == 8
    assert len(ran.steps) == 9  # and the engine did not wait for it


def test_a_slow_reader_gets_what_came_before_a_failure() -> None:
    ran, _, (client,) = watched(Workload(SHAPE, (replace(ONE, client="stalls"), FailStep(4, 1))))
    assert ran.first is None
    assert client.errors == ["engine_error"]
    assert client.tokens[0] == ran.callers[0].delivered
    assert len(client.tokens[0]) == 4


def test_refusals_keep_the_numbers_of_both_sides_together() -> None:
    """A refusal before the queue uses no number of the engine, one by the queue does; on both sides all of them count."""
    tight = replace(SHAPE, rows=1, max_waiting=2, max_model_len=32)
    refused = (
        replace(ONE, prompt=()),
        replace(ONE, prompt=((OUTSIDE, 1),)),
        replace(ONE, max_tokens=0),
        replace(ONE, max_tokens=100),
        replace(ONE, n=3),
        ONE,
        ONE,
        ONE,
        replace(ONE, max_tokens=1, wait=20),
    )
    ran, _, clients = watched(Workload(tight, refused))
    assert ran.first is None
    assert ran.counters is not None
    assert dict(ran.counters.refused) == {
        "empty_prompt": 1,
        "token_out_of_range": 1,
        "max_tokens": 1,
        "max_model_len": 1,
        "queue_full": 4,
    }
    assert sorted(ran.callers) == [7, 8, 10]
    assert len(clients) == 3


def test_a_client_that_is_gone_is_told_so_as_its_server_speaks() -> None:
    async def main(spec: str) -> None:
        client = Client(range(1), "streams", spec)
        client.leave()
        await client._send({"type": "http.response.start", "status": 200})

    asyncio.run(main("2.3"))
    with pytest.raises(OSError, match="gone"):
        asyncio.run(main("2.4"))


def test_the_loop_runs_what_is_ready_and_keeps_what_failed() -> None:
    loop = QuietLoop()
    said: list[str] = []

    async def chain(depth: int) -> None:
        if depth:
            await loop.create_task(chain(depth - 1))
        said.append(str(depth))

    async def forever() -> None:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            said.append("the clock ran")

    async def broken() -> None:
        raise ValueError("broken")

    waiting = loop.create_task(forever())
    loop.create_task(chain(20))
    loop.create_task(broken())
    loop.settle()
    assert said == [str(depth) for depth in range(21)]
    assert not waiting.done()
    waiting.cancel()
    loop.settle()
    import gc

    gc.collect()
    loop.settle()
    loop.close()
    assert any("ValueError: broken" in failure for failure in loop.failures)


def test_what_the_server_logs_as_an_error_is_a_finding() -> None:
    class Loud(WireRung):
        def _turn(self) -> None:
            from server import bridge

            bridge.log.error("something is wrong", error="on purpose")
            super()._turn()

    found = run(Workload(SHAPE, (ONE,)), make_rung=Loud).first
    assert found is not None
    assert (found.check, found.headline) == ("stream", "logged differs")
