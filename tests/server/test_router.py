"""docs/scale-out.md as it stands: its router, with its options, over two worker processes, one of which is killed under load.

Nobody waits for ever, everybody gets the right answer or an error that cannot be missed, and once the dead worker is
ejected every request is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest

from server.options import Options
from tests.models import write_folder
from tests.server.test_server_cli import ROOT, start

GUIDE = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
PATIENCE = 30.0  # seconds; whoever waits longer hangs
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
WHOLE = "whole"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None, reason="sglang-router has no wheel for this platform"
    ),
    pytest.mark.timeout(1500),
]


def options_of(program: str) -> list[str]:
    """What follows ``program`` in the guide's shell command."""
    block = next(block for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL) if program in block)
    return shlex.split(block.replace("\\\n", " ").partition(program)[2].splitlines()[0])


def free_ports(count: int) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


@attrs.define
class Cluster:
    url: str
    workers: list[subprocess.Popen[str]]
    urls: list[str]
    folder: Path
    router: subprocess.Popen[bytes]

    def worker(self, port: int) -> subprocess.Popen[str]:
        sizes = ("--max-num-seqs", "8", "--num-kv-blocks", "512", "--max-model-len", "512", "--compute", "torch")
        return start("--port", str(port), "--model", str(self.folder), "--log-level", "error", *sizes)

    def healthy(self) -> set[str]:
        return {worker["url"] for worker in get(self.url + "/workers")["workers"] if worker["is_healthy"]}

    def wait_healthy(self, urls: set[str], seconds: float = 900) -> float:
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            for url, worker in zip(self.urls, self.workers, strict=True):
                if url in urls and worker.poll() is not None:
                    raise AssertionError(worker.communicate()[1])
            with contextlib.suppress(OSError):
                if self.healthy() == urls:
                    return time.monotonic() - began
            time.sleep(0.1)
        raise AssertionError(f"the router sees {self.healthy()}, not {urls}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one, two, port, metrics = free_ports(4)
    urls = [f"http://127.0.0.1:{one}", f"http://127.0.0.1:{two}"]
    options = options_of("launch_router")
    for name, values in {"--port": [port], "--worker-urls": urls, "--prometheus-port": [metrics]}.items():
        at = options.index(name) + 1
        options[at : at + len(values)] = map(str, values)
    folder = write_folder(tmp_path_factory.mktemp("model") / "tiny", "llama")
    command = [sys.executable, "-m", "sglang_router.launch_router", *options, "--log-level", "error"]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cluster = Cluster(f"http://127.0.0.1:{port}", [], urls, folder, router)
    try:
        cluster.workers = [cluster.worker(one), cluster.worker(two)]
        cluster.wait_healthy(set(urls))
        yield cluster
    finally:
        for process in (router, *cluster.workers):
            process.kill()
            process.communicate(timeout=30)


@attrs.frozen
class Outcome:
    began: float
    seconds: float
    stream: bool
    how: str  # WHOLE, "another answer", or the error
    answer: str = ""


async def ask(client: httpx2.AsyncClient, url: str, prompt: str, stream: bool) -> Outcome:
    began = time.monotonic()
    body = {**BODY, "prompt": prompt, "stream": stream}
    how, text = WHOLE, ""
    try:
        async with asyncio.timeout(2 * PATIENCE), client.stream("POST", url + "/v1/completions", json=body) as response:
            data = (await response.aread()).decode()
        if response.status_code != 200:
            how = f"status {response.status_code}"
        elif stream:
            events = [line[6:] for line in data.split("\n\n") if line.startswith("data: ")]
            chunks = [json.loads(event) for event in events if event != "[DONE]"]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))
            if any("error" in chunk for chunk in chunks):
                how = "an error event"
            elif events[-1:] != ["[DONE]"]:
                how = "ended as if it were whole"
        else:
            text = json.loads(data)["choices"][0]["text"]
    except (httpx2.HTTPError, TimeoutError) as error:
        how = type(error).__name__
    return Outcome(began, time.monotonic() - began, stream, how, text)


def prompt_of(number: int) -> str:
    return f"{'abcdefgh'[number % 8] * 60} {number % 16}"


@attrs.define
class Load:
    """Clients that ask one request after the other until ``enough``. ``outcomes`` in the order in which they came."""

    url: str
    solo: dict[str, str]
    outcomes: list[Outcome] = attrs.field(factory=list)
    enough: bool = False

    async def run(self, clients: int) -> None:
        limits = httpx2.Limits(max_connections=clients)
        async with httpx2.AsyncClient(timeout=2 * PATIENCE, limits=limits) as client:
            await asyncio.gather(*(self._one(client, number, clients) for number in range(clients)))

    async def _one(self, client: httpx2.AsyncClient, number: int, clients: int) -> None:
        while not self.enough:
            prompt = prompt_of(number)
            outcome = await ask(client, self.url, prompt, stream=number % 4 != 0)
            if outcome.how == WHOLE and outcome.answer != self.solo[prompt]:
                outcome = attrs.evolve(outcome, how="another answer")
            self.outcomes.append(outcome)
            number += clients + 1
            if outcome.how != WHOLE:
                await asyncio.sleep(0.05)

    async def more(self, count: int, since: float) -> None:
        """Waits for ``count`` more outcomes of requests that began after ``since``."""
        while sum(one.began >= since for one in self.outcomes) < count:  # noqa: ASYNC110 - the clients are other tasks
            await asyncio.sleep(0.01)


def answers(url: str, prompts: list[str]) -> dict[str, str]:
    async def one_by_one() -> dict[str, str]:
        async with httpx2.AsyncClient(timeout=60) as client:
            outcomes = {prompt: await ask(client, url, prompt, False) for prompt in prompts}
        assert {one.how for one in outcomes.values()} == {WHOLE}
        return {prompt: one.answer for prompt, one in outcomes.items()}

    return asyncio.run(one_by_one())


def hits(url: str) -> int:
    return int(get(url + "/server_info")["readings"]["prefix_hit_tokens"])


def test_prompts_that_begin_alike_meet_their_blocks_again(cluster: Cluster) -> None:
    """Eight families of four prompts each: with their blocks on one worker, three of four begin with a hit."""
    before = sum(map(hits, cluster.urls))
    answers(cluster.url, [f"{letter * 100} {number}" for number in range(4) for letter in "ABCDEFGH"])
    found = sum(map(hits, cluster.urls)) - before
    assert (
        found >= 8 * 3 * 80
    )  # of 96 tokens in whole blocks each; sent to either worker in turn it would be two thirds


def until_busy(url: str, rows: int = 4) -> None:
    """Returns in a moment in which so many answers are on their way: three of four are streams, which no router can repeat."""
    while get(url + "/server_info")["readings"]["running"] < rows:
        time.sleep(0.005)


def test_kill_9_of_one_worker_under_load(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    solo = answers(cluster.urls[0], [prompt_of(number) for number in range(16)])
    assert answers(cluster.urls[1], list(solo)) == solo
    loading = Load(cluster.url, solo)

    async def scene() -> tuple[float, float]:
        clients = asyncio.create_task(loading.run(12))
        await loading.more(30, 0)
        await asyncio.to_thread(until_busy, cluster.urls[1])
        cluster.workers[1].kill()
        killed = time.monotonic()
        await asyncio.to_thread(cluster.wait_healthy, {cluster.urls[0]})
        ejected = time.monotonic()
        await loading.more(30, ejected)
        loading.enough = True
        await clients
        return killed, ejected

    killed, ejected = asyncio.run(scene())
    outcomes = loading.outcomes
    before = [one for one in outcomes if one.began + one.seconds < killed]
    hit = [one for one in outcomes if one.began + one.seconds >= killed and one.began < ejected]
    after = [one for one in outcomes if one.began >= ejected]
    with capsys.disabled():
        print(
            f"\nkill -9 of 1 of 2 workers: {len(outcomes)} requests, longest {max(o.seconds for o in outcomes):.1f} s, "
            f"ejected after {ejected - killed:.1f} s; around the kill {dict(Counter(one.how for one in hit))}, "
            f"after the ejection {dict(Counter(one.how for one in after))}"
        )
    assert max(one.seconds for one in outcomes) < PATIENCE
    assert {one.how for one in before} == {WHOLE}
    assert len(before) > 12
    assert {one.how for one in hit} <= {
        WHOLE,
        "RemoteProtocolError",
        "ReadError",
        "status 503",
        "status 502",
        "status 500",
    }
    assert len({one.how for one in hit}) > 1  # somebody noticed: the kill did come under load
    assert {one.how for one in after} == {WHOLE}
    assert len(after) > 12
    assert cluster.workers[0].poll() is None

    cluster.workers[1].communicate()
    port = int(cluster.urls[1].rpartition(":")[2])
    cluster.workers[1] = cluster.worker(port)
    cluster.wait_healthy(set(cluster.urls))  # whoever comes back is taken in again


def test_the_manifest_speaks_of_what_there_is() -> None:
    """Options that exist, probes of paths that need no key, and time enough to drain before the end."""
    manifest = re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert manifest is not None
    text = manifest[1]
    worker, _, router = text.partition("name: lockstep-router")
    given = set(re.findall(r'"--([a-z-]+)"', worker))
    assert given <= {field.name.replace("_", "-") for field in attrs.fields(Options)}
    assert given >= {"host", "drain-timeout"}
    probes = dict(re.findall(r"(\w+)Probe:.*\n\s+httpGet: {path: (\S+),", worker))
    assert probes == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}
    grace, drain, pre_stop = (
        int(re.search(pattern, worker)[1])  # type: ignore[index]
        for pattern in (r"terminationGracePeriodSeconds: (\d+)", r'"--drain-timeout", "(\d+)"', r'"sleep", "(\d+)"')
    )
    assert pre_stop + drain + 5 < grace
    known = subprocess.run(
        [sys.executable, "-m", "sglang_router.launch_router", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for flag in (
        *re.findall(r'"(--[a-z-]+)"', router),
        *(one for one in options_of("launch_router") if one[:2] == "--"),
    ):
        assert f"{flag} " in known, flag
