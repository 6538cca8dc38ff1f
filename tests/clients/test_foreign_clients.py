"""openai for Node, langchain-openai, llm and llm-comply as programs of their own against a real socket.

What they sent is counted by the server; beside each stands a planted fault that it has to notice.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.loading.synthetic import synthetic_model
from tests.clients.checks import Checks
from tests.clients.installed import CLIENTS, PYTHON, ROOT, held, needs_clients, node, run
from tests.clients.planted import CHAT_KIND, NO_DATA, NO_TEXT, NO_USAGE, SERVER_ERROR, Plant
from tests.clients.served import MODEL, Served, serve
from tests.server.stub import StubRunner, stub_engine

pytestmark = [needs_clients, pytest.mark.timeout(600)]
Tell = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as served:
        yield served


def drive_node(served: Served, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script has to lie beside node_modules."""
    script = CLIENTS / "node" / "drive.mjs"
    shutil.copy(ROOT / "tests/clients/node/drive.mjs", script)
    return run([node(), script, served.url, MODEL], folder)


def drive_langchain(served: Served, folder: Path) -> subprocess.CompletedProcess[str]:
    return run([PYTHON, "tests/clients/drive_langchain.py", served.url, MODEL], folder)


def test_openai_for_node(served: Served, tmp_path: Path, record_property: Tell) -> None:
    before = served.engine.counters.finished["abort"]
    with served.counted() as calls:
        checks = held(drive_node(served, tmp_path))
    assert checks == 29
    assert calls["/v1/chat/completions", 200] == 4
    assert calls["/v1/completions", 200] >= 5
    assert served.engine.counters.finished["abort"] >= before + 1, "leaving early aborts"
    version = json.loads((CLIENTS / "node/node_modules/openai/package.json").read_text())["version"]
    record_property("told", f"openai {version} (Node): {calls.total()} calls, {checks} checks held")


def test_langchain_openai(served: Served, tmp_path: Path, record_property: Tell) -> None:
    with served.counted() as calls:
        checks = held(drive_langchain(served, tmp_path))
    assert checks == 21
    assert calls["/v1/chat/completions", 200] >= 20
    assert calls["/v1/completions", 200] >= 4
    record_property("told", f"langchain-openai: {calls.total()} calls, {checks} checks held")


@pytest.mark.parametrize(
    ("drive", "plant"),
    [(drive_node, CHAT_KIND), (drive_node, SERVER_ERROR), (drive_langchain, NO_USAGE)],
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
def test_a_wrong_shape_is_seen(drive: Any, plant: Plant, tmp_path: Path) -> None:
    with serve(between=plant) as served:
        done = drive(served, tmp_path)
    assert done.returncode != 0
    assert "Error" in done.stderr
    assert served.calls


def models_file(folder: Path, served: Served) -> None:
    """llm's list of models behind OpenAI's API."""
    entry = "- model_id: {0}\n  model_name: {1}\n  api_base: {2}/v1\n"
    chat, text = (entry.format(name, MODEL, served.url) for name in ("our-chat", "our-text"))
    (folder / "extra-openai-models.yaml").write_text(f"{chat}{text}  completion: true\n")


def llm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([PYTHON, "-m", "llm", *arguments], folder)


def wanted_texts(served: Served) -> tuple[str, str]:
    """What the server answers to the same questions through another client."""
    asked: Any = {"model": MODEL, "seed": 4, "max_tokens": 8}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "system", "content": "a model"}, {"role": "user", "content": "hello world"}]
        chat = client.chat.completions.create(messages=messages, **asked).choices[0].message.content
        return chat or "", client.completions.create(prompt="hello world", **asked).choices[0].text


def test_llm(served: Served, tmp_path: Path, record_property: Tell) -> None:
    """The command line: streamed, whole, completions, the log with its usage, a second turn, a refusal."""
    models_file(tmp_path, served)
    chat, text = wanted_texts(served)
    checks = Checks()
    with served.counted() as calls:
        seeded = ("-o", "seed", "4", "-o", "max_tokens", "8", "hello world")
        for more in ((), ("--no-stream",)):
            done = llm(tmp_path, "-m", "our-chat", "-s", "a model", *more, *seeded)
            checks.equal("chat", (done.returncode, done.stdout.rstrip("\n")), (0, chat.rstrip("\n")))
        logged = json.loads(llm(tmp_path, "logs", "--json", "-n", "1").stdout)[0]
        checks.equal("logged", (logged["response"], logged["output_tokens"]), (chat, 8))
        checks.equal("second turn", llm(tmp_path, "-c", "-o", "max_tokens", "4", "water").returncode, 0)
        done = llm(tmp_path, "-m", "our-text", *seeded)
        checks.equal("text", (done.returncode, done.stdout.rstrip("\n")), (0, text.rstrip("\n")))
        refused = llm(tmp_path, "-m", "our-chat", "-o", "max_tokens", "9999", "hello")
        checks.equal("refused", (refused.returncode, "context" in refused.stderr), (1, True))
    assert calls == {("/v1/chat/completions", 200): 3, ("/v1/completions", 200): 1, ("/v1/chat/completions", 400): 1}
    record_property("told", f"llm: {calls.total()} calls, {checks.held} checks held")


def test_llm_notices_an_empty_answer(tmp_path: Path) -> None:
    with serve(between=NO_TEXT) as served:
        models_file(tmp_path, served)
        done = llm(tmp_path, "-m", "our-chat", "-o", "max_tokens", "8", "-o", "seed", "4", "hello world")
    assert done.stdout.strip() == ""


# llm-comply's tests of a chat API. Those that a text-only server without tools has to fail, and why.
COMPLY_PASSES = {
    "chat-basic-response",
    "chat-system-prompt",
    "chat-multi-turn",
    "chat-streaming-response",
    "chat-streaming-usage",
}
COMPLY_FAILS = {
    "chat-tool-calling": "HTTP 400 (expected [200])",  # tools come later, and until then are refused in words
    "chat-image-input": "HTTP 400 (expected [200])",  # as images are
    "chat-error-handling": "HTTP 200 (expected [400, 422])",  # no model named: the one there is, as vLLM and SGLang do
}


def comply(folder: Path, between: Callable[[Any], Any] = lambda app: app) -> tuple[dict[str, Any], Served]:
    """llm-comply's report. It wants short answers that end by themselves: a stub says AB and end-of-sequence."""
    tokenizer = synthetic_model().tokenizer
    assert tokenizer is not None
    answer = (*tokenizer.encode("AB", add_special_tokens=False), 2)
    engine = stub_engine(StubRunner(lambda prompt: answer), num_blocks=256, max_model_len=512, captures=((4, 128),))
    with serve(engine, between=between) as served:
        command = "from llm_comply.cli import main; main()"
        arguments = ["run", "--format", "openai-chat", "-u", f"{served.url}/v1", "-k", "none", "-m", MODEL, "--json"]
        done = run([PYTHON, "-c", command, *arguments], folder)
    report: dict[str, Any] = json.loads(done.stdout)
    return report, served


def test_llm_comply(tmp_path: Path, record_property: Tell) -> None:
    report, served = comply(tmp_path)
    results = {result["id"]: result for result in report["results"]}
    passed = {name for name, result in results.items() if result["status"] == "passed"}
    failed = {name: result["errors"][0] for name, result in results.items() if result["status"] == "failed"}
    assert passed == COMPLY_PASSES, failed
    assert failed == COMPLY_FAILS
    assert not [result["warnings"] for result in results.values() if result.get("warnings")]
    assert len(served.calls) == len(passed) + len(failed)
    record_property(
        "told", f"llm-comply: {len(served.calls)} calls, {len(passed)} of its tests pass, {len(failed)} fail as stated"
    )


@pytest.mark.parametrize(
    ("plant", "name"), [(NO_DATA, "chat-streaming-response"), (NO_TEXT, "chat-basic-response")], ids=["framing", "text"]
)
def test_llm_comply_notices_a_wrong_shape(plant: Plant, name: str, tmp_path: Path) -> None:
    report, _ = comply(tmp_path, plant)
    assert {result["id"]: result["status"] for result in report["results"]}[name] == "failed"
