"""``python -m engine "prompt"``: one answer, streamed to the terminal. Imports torch only when it is about to answer.

Exit status: 0 an answer, 2 a wrong option, setting or model, told in one sentence; 130 Ctrl-C, 141 the reader has left.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated

import cyclopts
from cyclopts import App, Parameter

from engine import __version__

app = App(
    name="python -m engine",
    help="Answers one prompt and streams the answer to the terminal. Without --model, the small model that is installed "
    "beside the engine answers, offline.",
    version=__version__,
    usage='Usage: python -m engine [OPTIONS] "PROMPT"',
    result_action="return_value",
)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = app(given, print_error=False, exit_on_error=False)
    except cyclopts.UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or [])
        return _refuse(f"{words[:64]!r} is left over: one prompt is answered, so quote it if it has spaces")
    except cyclopts.ValidationError as error:
        return _refuse(error.exception_message)
    except cyclopts.MissingArgumentError as error:
        if error.argument is not None and error.argument.name == "PROMPT":
            return _refuse('there is no prompt: give one, as in python -m engine "Hello", or - for standard input')
        return _refuse(str(error))
    except cyclopts.CycloptsError as error:
        return _refuse(str(error))
    return status if isinstance(status, int) else 0  # --help and --version return nothing


def _refuse(sentence: str) -> int:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


def _not_an_option(_: object, prompt: str) -> None:
    """A lone hyphen may stand for standard input; anything longer with one in front is a misspelt option."""
    if prompt.startswith("-") and prompt != "-":
        options = [f"--{name.replace('_', '-')}" for name in inspect.signature(answer).parameters if name != "prompt"]
        near = get_close_matches(prompt.partition("=")[0], options, 1)
        raise ValueError(
            f"unknown option {prompt[:64]}{f'; did you mean {near[0]}?' if near else ';'} a prompt that begins with a hyphen is "
            "read with - from standard input"
        )


@app.default
def answer(
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True, validator=_not_an_option)],
    /,
    *,
    model: str | None = None,
    system: str | None = None,
    raw: bool = False,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    device: str = "auto",
    compute: str = "auto",
    threads: int | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Answer one prompt.

    Parameters
    ----------
    prompt
        The user's message; "-" reads it from standard input.
    model
        A model folder, a .gguf file or a hub id.
    system
        A system message to go before it.
    raw
        Continue the prompt as plain text instead of answering it as a chat message.
    max_tokens
        The longest answer; by default all that the context holds.
    temperature
        0 is greedy and always gives the same answer.
    top_p
        Sample from the smallest set of tokens that has this probability.
    seed
        Makes a sampled answer repeatable. Without it one is drawn, and shown at the end.
    device
        auto, cpu or cuda.
    compute
        auto, native, int8, triton or torch kernels.
    threads
        CPU threads for the kernels.
    quiet
        Print the answer only.
    """
    from engine.config import ConfigError
    from engine.loading.model import LoadError
    from engine.request import InvalidRequest

    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        return _answer(
            text, model, system, raw, (max_tokens, temperature, top_p, seed), (device, compute, threads), quiet
        )
    except (ConfigError, LoadError, InvalidRequest) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has left; nothing of what is still buffered may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _answer(
    text: str,
    model: str | None,
    system: str | None,
    raw: bool,
    sampling: tuple[int | None, float, float, int | None],
    machine: tuple[str, str, int | None],
    quiet: bool,
) -> int:
    import secrets

    from engine.llm import LLM
    from engine.request import SamplingParams

    max_tokens, temperature, top_p, seed = sampling
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=secrets.randbits(32) if seed is None and temperature else seed,
    )
    llm = LLM(model, device=machine[0], compute=machine[1], threads=machine[2], max_num_seqs=1)
    chat = not raw and llm.engine.model.template is not None
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    for piece in llm.stream(llm.render(messages) if chat else text, params):
        print(piece, end="", flush=True)
    print()
    if not quiet and temperature:
        print(f"(seed {params.seed})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
