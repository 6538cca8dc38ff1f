"""The runner of README commands: it runs every block, and a command that does not hold fails it.

The real README's commands are run by `make readme`, a stage of CI of its own, since they set up an environment and
serve the real model.
"""

from __future__ import annotations

import re
import signal
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ci import readme_commands as readme

ROOT = Path(__file__).parents[2]
SERVE = f"""{sys.executable} - "$@" <<'PY'
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", 8000), Answer).serve_forever()
PY
"""
ASK = (
    f"""{sys.executable} -c 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:8000/").status)' > asked\n"""
)


def block(marker: str, text: str) -> str:
    return f"{marker}\n```bash\n{textwrap.dedent(text)}```\n\n" if marker else f"```bash\n{text}```\n"


def test_real_readme_is_marked_throughout() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = readme.blocks(text)
    assert len(found) == text.count("```bash")
    assert {"make serve\n"} == {one.text for one in found if one.kind == "server"}
    assert any(one.text == "pytest properties -n auto\n" for one in found)


@pytest.mark.parametrize("marker", ["", "<!-- ci: sometimes -->", "<!-- ci: elsewhere -->", "<!-- ci: run -->\n"])
def test_unmarked_block_is_an_error(marker: str) -> None:
    with pytest.raises(readme.ReadmeError, match=r"README\.md:\d+: needs"):
        readme.blocks("# Title\n\n" + block(marker, "true\n"))


def test_blocks_run_in_order_in_one_folder(tmp_path: Path) -> None:
    text = block("<!-- ci: run -->", "echo one > log\n") + block("<!-- ci: run -->", "echo two >> log\n")
    elsewhere = block("<!-- ci: elsewhere: make test -->", "false\n")
    assert readme.run(text + elsewhere, tmp_path) == 2
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("command", ["false\n", "false | true\n", "false\ntrue\n", "echo $NOT_SET_ANYWHERE\n"])
def test_failing_command_fails(tmp_path: Path, command: str) -> None:
    with pytest.raises(readme.ReadmeError, match=r"README\.md:3: exit status 1"):
        readme.run(block("<!-- ci: run -->", command), tmp_path)


def test_hanging_command_fails(tmp_path: Path) -> None:
    with pytest.raises(readme.ReadmeError, match="not done"):
        readme.run(block("<!-- ci: run -->", "sleep 30\n"), tmp_path, run_seconds=0.2)


def test_server_serves_the_blocks_below_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = readme.free_port()
    monkeypatch.setattr(readme, "free_port", lambda: port)
    assert readme.run(block("<!-- ci: server -->", SERVE) + block("<!-- ci: run -->", ASK), tmp_path) == 2
    assert (tmp_path / "asked").read_text() == "200\n"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1)


def test_server_that_ends_at_once_fails(tmp_path: Path) -> None:
    with pytest.raises(readme.ReadmeError, match="ended with status 3"):
        readme.run(block("<!-- ci: server -->", "exit 3\n"), tmp_path)


def test_server_that_never_answers_fails(tmp_path: Path) -> None:
    with pytest.raises(readme.ReadmeError, match="did not answer"):
        readme.run(block("<!-- ci: server -->", "sleep 60\n"), tmp_path, start_seconds=0.5)


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = readme.Server("trap '' TERM; (trap '' TERM; touch up; sleep 60) & wait; sleep 60", 9, tmp_path)
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    stubborn.stop(seconds=0.2)
    assert stubborn.process.returncode == -signal.SIGKILL


def test_real_readme_is_finished() -> None:
    comments = re.findall(r"<!--(.*?)-->", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert [comment for comment in comments if not comment.startswith(" ci: ")] == []
