"""Runs the commands of README.md, so that none of them is a promise only.

Each ```bash block stands under a comment that says what becomes of it: ``<!-- ci: run -->`` must exit with 0;
``<!-- ci: server -->`` is started, must answer on /health, serves the blocks below it and is ended with SIGTERM;
``<!-- ci: elsewhere: WHERE -->`` is run by WHERE. A block without such a comment is an error.
The README's port 8000 is swapped for a free one, so that a server that runs already is neither asked nor disturbed.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import attrs

README_PORT = 8000
KINDS = ("run", "server", "elsewhere")
_BLOCK = re.compile(
    r"(?:^<!-- ci: (?P<kind>\w+)(?:: (?P<where>[^\n]*?))? -->\n)?^```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class ReadmeError(Exception):
    """A block that is not marked, or a command that does not do what the README says."""


@attrs.frozen
class Block:
    """One fenced block: ``line`` is where its command starts, ``kind`` one of ``KINDS``."""

    line: int
    kind: str
    text: str


def blocks(readme: str) -> list[Block]:
    """The bash blocks in order. Raises ``ReadmeError`` for one without a marker or with an unknown one."""
    found = []
    for match in _BLOCK.finditer(readme):
        line = readme.count("\n", 0, match.start("text")) + 1
        kind = match["kind"]
        if kind not in KINDS or (kind == "elsewhere" and not match["where"]):
            raise ReadmeError(
                f"README.md:{line}: needs <!-- ci: run -->, server or 'elsewhere: WHERE' above it, has {kind!r}"
            )
        found.append(Block(line, kind, match["text"]))
    return found


class Server:
    """A command that goes on running; used as a context, so that it never outlives the run."""

    def __init__(self, command: str, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}/health"
        self.process = subprocess.Popen(["bash", "-euc", command], cwd=folder, start_new_session=True)

    def wait(self, seconds: float) -> None:
        """Returns once /health answers 200. Raises ``ReadmeError`` when the process ends first or time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise ReadmeError(f"the server ended with status {code} before it answered")
            try:
                with urllib.request.urlopen(self.url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise ReadmeError(f"the server did not answer on {self.url} within {seconds:.0f} s")

    def stop(self, seconds: float = 30) -> None:
        """SIGTERM to the command and all its children; SIGKILL to those that are left after ``seconds``."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self._signal(0) and time.monotonic() < deadline:
            self.process.poll()  # without this the leader stays as a zombie, which still takes signals
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> bool:
        """False when no process of the group is left."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(readme: str, folder: Path, *, start_seconds: float = 300, run_seconds: float = 300) -> int:
    """Runs every block in ``folder`` and returns how many ran. Raises ``ReadmeError`` at the first that fails."""
    port, server, count = free_port(), None, 0
    try:
        for block in blocks(readme):
            if block.kind == "elsewhere":
                continue
            print(f"== README.md:{block.line} ({block.kind})\n{block.text}", flush=True)
            text = re.sub(rf"\b{README_PORT}\b", str(port), block.text)
            if block.kind == "server":
                if server is not None:
                    server.stop()
                if text.startswith("make "):
                    text = text.rstrip("\n") + f' ARGS="--port {port}"\n'
                server = Server(text, port, folder)
                server.wait(start_seconds)
            else:
                run_block(block, text, folder, run_seconds)
            count += 1
    finally:
        if server is not None:
            server.stop()
    return count


def run_block(block: Block, text: str, folder: Path, seconds: float) -> None:
    try:
        status = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], cwd=folder, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        raise ReadmeError(f"README.md:{block.line}: not done after {seconds:.0f} s") from None
    if status != 0:
        raise ReadmeError(f"README.md:{block.line}: exit status {status}")


def main() -> int:
    folder = Path(__file__).resolve().parent.parent
    try:
        count = run((folder / "README.md").read_text(encoding="utf-8"), folder)
    except ReadmeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"README.md: {count} blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
