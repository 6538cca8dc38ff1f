"""The storm of five hundred clients on the default model, against the real process: one round to its end, then SIGTERM in the
middle of a second one. The tiny model's rounds are in test_storm.py.

Here everything takes a while: a client that leaves does so before, in and after its prefill, and who stays waits in a long
queue. The process's listening socket has a small send buffer, so that an answer is larger than all that lies on its way.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.request
from collections import Counter

import pytest

from tests.server.storm import Outcome, alone, complaints, storm
from tests.server.test_server_cli import Running, finish

CLIENTS = 500
BLOCKS = 28
WHOLE = 40  # answers of the second round that are let through before the signal
PATIENCE = 3000.0  # seconds: the default model on a machine that others use, too
STALLED = (10.0, 20.0)  # seconds, until an answer is larger than all buffers: a token takes a while here
ADMIN = "storm-admin"
PROGRAM = """
import socket, sys
from server import cli

listen = cli.bind

def bind(host, port):
    sock = listen(host, port)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return sock

cli.bind = bind
sys.exit(cli.main(sys.argv[1:]))
"""


def get(server: Running, path: str) -> str:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def readings(server: Running) -> dict[str, float]:
    """The counters of /metrics that a storm must have moved, summed over their labels."""
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^lockstep:(\w+)(?:\{[^}]*\})? (\S+)$", get(server, "/metrics"), re.MULTILINE):
        found[name] += float(value)  # type: ignore[assignment]
    return dict(found)


def lost(server: Running) -> list[str]:
    """What is still held when the last client has gone, in words; waits for the reaping of the last ones."""
    deadline = time.monotonic() + 300
    while (ledger := json.loads(get(server, "/debug/ledger")))["requests"] and time.monotonic() < deadline:
        time.sleep(0.2)
    held = [f"block {block} has {count} owners" for block, count in enumerate(ledger["references"]) if count]
    held += [f"request {request} is {facts['status']}" for request, facts in ledger["requests"].items()]
    free = len(ledger["blank"]) + len(ledger["cached"])
    return [*held, *ledger["audit"], *([] if free == BLOCKS else [f"{free} of {BLOCKS} blocks are free"])]


def finished(server: Running) -> float:
    """Answers that came to their end."""
    found = re.search(
        r'^lockstep:request_success_total\{[^}]*"length"[^}]*\} (\S+)$', get(server, "/metrics"), re.MULTILINE
    )
    assert found is not None
    return float(found[1])


async def interrupted(server: Running, port: int) -> list[Outcome]:
    """SIGTERM when some answers have come to their end, and most have not."""
    before = await asyncio.to_thread(finished, server)
    storming = asyncio.create_task(storm(port, CLIENTS, 2, PATIENCE))
    while await asyncio.to_thread(finished, server) < before + WHOLE and not storming.done():  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    server.process.send_signal(signal.SIGTERM)
    return await storming


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_storm_on_the_default_model_and_sigterm_in_a_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    """``--check raise``: an audit that finds anything would end the process with 3."""
    server = Running(
        *("--max-model-len", "512", "--max-num-batched-tokens", "64", "--max-waiting", "2048", "--check", "raise"),
        *("--log-level", "error", "--drain-timeout", "5", "--send-timeout", "2", "--admin-key", ADMIN),
        program=("-c", PROGRAM),
        rows=16,
        blocks=BLOCKS,
    )
    port = int(server.url.rpartition(":")[2])
    try:
        solo = asyncio.run(alone(port))
        outcomes = asyncio.run(storm(port, CLIENTS, 1, PATIENCE, STALLED))
        assert complaints(outcomes, solo) == []
        assert lost(server) == []
        counted = readings(server)
        second = asyncio.run(interrupted(server, port))
        status, _, err = finish(server.process, 300)
    finally:
        server.process.kill()
        server.process.communicate()
    assert complaints(second, solo, draining=True) == []
    assert status == 0, err
    assert "Traceback" not in err
    assert counted["num_preemptions_total"] > 0  # the pool was tight
    assert (
        counted["requests_aborted_total"] > 0
    )  # how many is a matter of the machine: others leave before they are read
    assert counted["send_blocked_seconds_total"] > 0
    assert counted["invariant_checks_total"] > 0
    assert counted["invariant_violations_total"] == 0
    manners, ends = (Counter(outcome.manner for outcome in outcomes), Counter(str(one.error) for one in second))
    assert ends["server_shutdown"] + ends["refused"] > 0  # it was in the middle
    whole = sum(one.manner == "stays" and one.error is None and one.whole for one in second)
    assert whole > WHOLE // 4  # some of those were clients that left
    with capsys.disabled():
        print(f"\n{CLIENTS} clients on the default model: {dict(manners)}, every answer as alone, nothing lost;")
        names = ("num_preemptions", "requests_aborted", "send_blocked_seconds", "invariant_checks", "failed_steps")
        print({name: round(counted.get(f"{name}_total", 0.0), 1) for name in names})
        print(f"SIGTERM in a second round: {whole} whole answers as alone, ends {dict(ends)}, exit {status}")
