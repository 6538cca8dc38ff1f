"""``python -m engine``: one answer on stdout, one sentence on stderr when it cannot be, and the exit status to match."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.llm import LLM
from engine.request import SamplingParams
from tests.models import write_folder

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--max-tokens", "8", "--threads", "1")


def run(*arguments: str, program: Sequence[str] = ("-m", "engine"), stdin: bytes = b"") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        input=stdin,
        capture_output=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, device="cpu", max_num_seqs=1)


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["--version"], 0), (["hello", "--nope"], 2), (["x", "--seed", "y"], 2)]
)
def test_torch_is_not_imported_to_say_this(arguments: list[str], status: int) -> None:
    """Run as ``python -m engine`` is; then nobody but the answer itself has loaded torch."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['engine', *{arguments!r}]\n"
        "try:\n    runpy.run_module('engine', run_name='__main__')\n"
        "finally:\n    slow = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n    assert not slow, slow\n"
    )
    assert run(program=("-c", code))[0] == status


def test_help_and_version() -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    for flag in ("--model", "--system", "--raw", "--max-tokens", "--temperature", "--top-p", "--seed", "--device"):
        assert flag in out
    status, out, err = run("--version")
    assert (status, err) == (0, "")
    assert out.strip().count(".") == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["hello", "--nope"], "Unknown option: --nope."),
        (["hello", "--max-tokns", "3"], "Did you mean --max-tokens?"),
        (["--nope"], "unknown option --nope;"),
        (["--max-tokns=3"], "unknown option --max-tokns=3; did you mean --max-tokens? a prompt that begins"),
        (["hello", "--max-tokens", "many"], "--max-tokens"),
        (["hello", "--seed"], "--seed"),
        (["hello", "there", "all"], "'there all' is left over: one prompt is answered, so quote it"),
        ([], "there is no prompt: give one"),
    ],
)
def test_a_wrong_command_line_is_exit_2(arguments: list[str], word: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nope"], "/nope"),
        (["--model", "nope.gguf"], "nope.gguf"),
        (["--device", "tpu"], "tpu"),
        (["--threads", "0"], "threads is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--top-p", "0"], "top_p is 0"),
    ],
)
def test_one_sentence_and_exit_2(arguments: list[str], words: str) -> None:
    status, out, err = run("hello", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_what_the_model_cannot_serve_is_exit_2(folder: str) -> None:
    for prompt, tokens, words in (("", "8", "no tokens"), ("hello", "600", "512")):
        status, out, err = run(prompt, "--raw", "--model", folder, "--max-tokens", tokens)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert words in err


def test_the_answer_is_the_chat_answer(folder: str, llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    expected = llm.chat([{"role": "user", "content": "hello"}], params).text
    assert run("hello", "--model", folder, *SHORT) == (0, expected + "\n", "")
    briefed = [{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}]
    expected = llm.chat(briefed, params).text
    assert run("hello", "--system", "world", "--model", folder, *SHORT) == (0, expected + "\n", "")


def test_a_seed_repeats_an_answer(folder: str, llm: LLM) -> None:
    """Without one, the seed that was drawn is shown, and repeats the answer."""
    sampled = ("hello", "--raw", "--model", folder, "--temperature", "1", *SHORT)
    params = SamplingParams(max_tokens=8, temperature=1, seed=5)
    expected = llm.generate("hello", params)[0].text
    assert run(*sampled, "--seed", "5") == (0, expected + "\n", "(seed 5)\n")
    status, out, err = run(*sampled)
    assert status == 0
    assert err.startswith("(seed ")
    drawn = err.removeprefix("(seed ").removesuffix(")\n")
    assert run(*sampled, "--seed", drawn, "--quiet") == (0, out, "")


def test_raw_text_from_standard_input(folder: str, llm: LLM) -> None:
    text = "the water \u00e9 is"
    expected = llm.generate(text, SamplingParams(max_tokens=8, temperature=0))[0].text
    assert run("-", "--raw", "--model", folder, *SHORT, stdin=text.encode()) == (0, expected + "\n", "")
