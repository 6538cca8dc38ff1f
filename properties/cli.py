"""The command line of the harness: ``python -m properties COMMAND``.

Exit status: 0 what was asked holds, 1 it is violated (the report ends with the command that replays it), 2 a usage error,
told in one sentence. 130 or 143: ended by Ctrl-C or SIGTERM, and so are its worker processes; a hunt that has found something
by then tells it and ends with 1.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from engine.trace import FormatError
from properties import commands, fault_commands, graph_faults, law_commands, scope_command
from properties.experiments import UNLIMITED
from properties.faults import Faded
from properties.options import Misuse, Names, at_least, fault, minutes
from properties.rungs import RUNGS, Unavailable
from properties.subject import NoSubject, find
from properties.workers import Terminated

USAGE = 2

_ABOUT = """\
One workload, run by the engine and by its specification (model_sim) side by side, compared after every iteration.

  pytest properties -n auto          search with Hypothesis: shrinks what it finds and writes it to found/
  python -m properties hunt          search with plain random numbers, as long as you like
  python -m properties replay FILE   run a saved workload again, and see the first difference in context
"""
_EXITS = "Exit status: 0 holds, 1 violated, 2 usage error, 130 interrupted. Iterations count from 1 everywhere."


class Parser(argparse.ArgumentParser):
    commands: Mapping[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(USAGE)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    top = parser()
    if not given:
        print(_listed(top.commands), file=sys.stderr)
        return USAGE
    if given[0] not in (*top.commands, "-h", "--help"):
        return _refuse(_no_command(given[0], top.commands))
    options = top.parse_args(given)
    try:
        return int(options.run(options))
    except (FormatError, Faded, Misuse, NoSubject, Unavailable) as error:
        return _refuse(str(error))
    except BrokenPipeError:  # the reader has left; nothing of what is still buffered may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Terminated as ended:
        print("properties: terminated", file=sys.stderr)
        return int(ended.code or 0)
    except OSError as error:
        return _refuse(f"{error.filename or 'file'}: {error.strerror}")


def _refuse(message: str) -> int:
    print(f"properties: {message}", file=sys.stderr)
    return USAGE


def _listed(commands: Mapping[str, Parser]) -> str:
    """One line for each command: what it does, as far as its first clause."""
    lines = [f"  {name:13} {re.split('[;:.]', command.description or '')[0]}" for name, command in commands.items()]
    return "\n".join(
        ["python -m properties needs a command; each has a --help of its own, with an example:", "", *lines, "", _EXITS]
    )


def _no_command(word: str, commands: Mapping[str, Parser]) -> str:
    near = difflib.get_close_matches(word.lower(), commands, 1)
    perhaps = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{word[:40]!r} is no command; the commands are {', '.join(commands)}{perhaps}"


def parser() -> Parser:
    top = Parser(
        prog="python -m properties",
        description=_ABOUT,
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _files(names)
    _searches(names)
    _experiments(names)
    top.commands = names.choices
    return top


def _command(
    names: argparse._SubParsersAction[Parser], name: str, run: Callable[..., int], text: str, example: str
) -> Parser:
    command = names.add_parser(name, help=text, description=text, epilog=f"Example: python -m properties {example}")
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return command


def _rung(command: Parser) -> None:
    command.add_argument(
        "--rung",
        choices=sorted(RUNGS),
        help="how much of the engine is real (default: where --arm's fault shows, else ledger: all of control)",
    )


def _arm(command: Parser) -> None:
    command.add_argument(
        "--arm",
        metavar="FAULT",
        type=fault,
        help="run with this fault of the catalogue; 'faults --list' lists them",
    )


def _subject(command: Parser) -> None:
    command.add_argument(
        "--subject",
        metavar="MODULE:FUNCTION",
        type=_foreign,
        help="somebody else's scheduler instead of our engine: see properties/examples/README.md",
    )


def _foreign(name: str) -> str:
    try:
        find(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _found(command: Parser) -> None:
    command.add_argument("--found", metavar="DIR", type=Path, default=Path("found"), help="where failures are written")


def _files(names: argparse._SubParsersAction[Parser]) -> None:
    replay = _command(
        names,
        "replay",
        commands.replay,
        "Run a saved workload on engine and specification; report the first difference.",
        "replay properties/regress/A05-the-published-leak.json --arm A05",
    )
    show = _command(
        names,
        "show",
        commands.show,
        "Print a workload's timeline by the specification alone, one line an iteration.",
        "show properties/regress/A05-the-published-leak.json",
    )
    shrink = _command(
        names,
        "shrink",
        commands.shrink_file,
        "Make a failing workload smaller while the same check still fails, and write the result.",
        "shrink properties/regress/A05-the-published-leak.json --arm A05",
    )
    for command in (replay, show, shrink):
        command.add_argument("file", metavar="FILE", type=Path, help="a workload/1 file")
    for command in (replay, show):
        command.add_argument(
            "--until", metavar="N", type=at_least(1), help="stop after iteration N; the end is not judged"
        )
        command.add_argument(
            "--html", metavar="OUT", type=Path, help="also write one page to look at, without outside parts"
        )
        command.add_argument("--perfetto", metavar="OUT", type=Path, help="also write a trace for ui.perfetto.dev")
    for command in (replay, shrink):
        _rung(command)
        _arm(command)
        _subject(command)
    shrink.add_argument(
        "--output", metavar="FILE", type=Path, help="where the result goes (default: DIR/NAME-shrunk.json)"
    )
    _found(shrink)


def _searches(names: argparse._SubParsersAction[Parser]) -> None:
    hunt = _command(
        names,
        "hunt",
        commands.hunt_command,
        "Run generated workloads on every core until the time is up; shrink and save what fails.",
        "hunt --minutes 10 --seed 1",
    )
    hunt.add_argument("--minutes", metavar="M", type=minutes, default=10.0, help="how long (default 10)")
    hunt.add_argument(
        "--seed", metavar="S", type=at_least(0), help="the same seed runs the same workloads (default: drawn)"
    )
    hunt.add_argument("--jobs", metavar="J", type=at_least(1), help="processes (default: one a core)")
    _rung(hunt)
    _arm(hunt)
    _subject(hunt)
    _found(hunt)
    fault_commands.add_commands(lambda *told: _command(names, *told), at_least)
    graphs = _command(
        names,
        "graph-faults",
        commands.graph_faults_command,
        "Hunt the faults of recorded graphs, padding and rows on the rungs that compute; print which check sees each.",
        "graph-faults --only G02 N01",
    )
    graphs.add_argument("--only", metavar="FAULT", action=Names, known=_of_graphs, help="these faults of the table")
    graphs.add_argument("--output", metavar="FILE", type=Path, help="write the table there, too")
    law_commands.add_commands(lambda *told: _command(names, *told), at_least)
    scope_command.add_commands(lambda *told: _command(names, *told), at_least)


def _experiments(names: argparse._SubParsersAction[Parser]) -> None:
    coverage = _command(
        names,
        "coverage",
        commands.coverage,
        "Count how many decode steps replay a recorded graph, with all requests arriving at once in an ample pool.",
        "coverage --rows 8 --requests 16 --lengths 4,8,16,32 --no-persistent-batch",
    )
    coverage.add_argument("--requests", metavar="N", type=at_least(1), help="how many arrive")
    coverage.add_argument("--lengths", metavar="L,L", type=_numbers, help="max_tokens, cycled over the requests")
    coverage.add_argument(
        "--prompt", metavar="N", type=at_least(1), default=4, help="prompt length (default 4; changes nothing)"
    )
    coverage.add_argument(
        "--table",
        action="store_true",
        help="8 to 256 rows, four mixes of lengths, both batch modes, instead of one run",
    )
    coverage.add_argument("--output", metavar="FILE", type=Path, help="with --table: write the table there, too")
    soak = _command(
        names,
        "soak",
        commands.soak,
        "Run requests through a small pool and count preemptions, recomputed tokens and blocks left at the end.",
        "soak --prompts 4,4,4,4,4,4,4,4,4,4,4,4 --max-tokens 8 --rows 3 --blocks 10 --block-size 4 --arm A05",
    )
    soak.add_argument("--prompts", metavar="L,L", type=_numbers, required=True, help="prompt lengths, one a request")
    soak.add_argument(
        "--max-tokens", metavar="N", type=at_least(1), required=True, help="tokens that each request generates"
    )
    soak.add_argument("--blocks", metavar="N", type=at_least(1), required=True, help="size of the pool")
    soak.add_argument("--block-size", metavar="N", type=at_least(1), required=True, help="token positions in a block")
    soak.add_argument("--watermark", metavar="N", type=at_least(0), default=0, help="blocks that admission leaves free")
    soak.add_argument(
        "--no-audit",
        dest="audit",
        action="store_false",
        help="switch off audit and diff: what a fault does when nobody looks",
    )
    _arm(soak)
    for command in (coverage, soak):
        command.add_argument("--rows", metavar="N", type=at_least(1), required=command is soak, help="cache rows")
        command.add_argument(
            "--budget",
            metavar="N",
            type=at_least(1),
            default=UNLIMITED,
            help="tokens an iteration (default: no limit)",
        )
        command.add_argument(
            "--no-persistent-batch", dest="persistent_batch", action="store_false", help="do not move running requests"
        )
        _rung(command)
        _found(command)


def _of_graphs(text: str) -> str:
    if fault(text) not in graph_faults.chosen():
        raise argparse.ArgumentTypeError(f"{text} is no fault of graphs, padding or rows")
    return text


def _numbers(text: str) -> list[int]:
    return [at_least(1)(part) for part in text.split(",")]
