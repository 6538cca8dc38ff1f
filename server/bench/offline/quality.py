"""Quality beside speed: is what this engine computes what the dequantised weights say?

A fixed text, in windows, is scored by this engine on each weight type and by ``transformers`` in fp32 on the same weights
dequantised: perplexities, and how often the most likely next token is the same one. Then both continue the prompts of a
list greedily, one at a time, and the tokens are compared.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from engine.loading import load_model
from server.bench.offline.contestants import PACKAGE, Contestant, python_of
from server.bench.offline.models import KINDS, Files, write_folder
from server.bench.offline.worker import Worker
from server.bench.requests import Ask

WINDOW = 256
PATIENCE = 600.0
GREEDY = 32  # tokens
PROMPTS = 6
ALLOWED = 1e-3  # relative difference of perplexity


@attrs.frozen
class Scored:
    """Natural-log probabilities of the text's tokens, and the most likely token in the place of each."""

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


@attrs.frozen
class Quality:
    """``agreement``: share of positions with the same most likely token. ``greedy``: for each prompt, how many tokens
    agree before the first that differs, of GREEDY; empty where it was not asked."""

    kind: str
    tokens: int
    ours: float
    reference: float
    agreement: float
    greedy: tuple[int, ...] = ()

    @property
    def difference(self) -> float:
        """Relative difference of the perplexities."""
        return self.ours / self.reference - 1

    def plain(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "difference": self.difference}


def text() -> str:
    return resources.files(PACKAGE).joinpath("text.txt").read_text(encoding="utf-8")


def compare(kind: str, ours: Scored, reference: Scored, greedy: Sequence[int] = ()) -> Quality:
    same = sum(a == b for a, b in zip(ours.best, reference.best, strict=True))
    size = len(ours.best)
    return Quality(kind, size, ours.perplexity, reference.perplexity, same / size, tuple(greedy))


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are the same before the first that differs."""
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            return at
    return len(ours)


def qualities(
    files: Files,
    peers: Path,
    threads: int,
    prompts: Sequence[Ask],
    say: Callable[[str], None],
    *,
    kinds: Sequence[str] = ("as shipped", *KINDS),
    engine: Mapping[str, Any] | None = None,
    windows: int | None = None,
) -> list[Quality]:
    """Compares every kind. ``engine``: further ``EngineConfig`` fields, such as another compute path; the reference stays
    the same. ``windows``: only the text's first ones. Raises ``WorkerFailed`` and ``ValueError``."""
    known = ("as shipped", *KINDS)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"weight type is {unknown[0]!r}, but must be one of {', '.join(known)}")
    tokenizer = load_model(files.shipped).tokenizer
    if tokenizer is None:
        raise ValueError(f"{files.shipped} has no tokenizer, so a text cannot be scored")
    ids = tokenizer.encode(text())
    chunks = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)][:windows]
    references: dict[str, tuple[Scored, list[list[int]]]] = {}
    found = []
    for kind in kinds:
        same = "F32" if kind == "as shipped" else kind  # fp32 is what the shipped weights are, dequantised
        if same not in references:
            say(f"scoring the text with transformers, {same} weights dequantised")
            with ExitStack() as stack:
                folder = _folder(files, same, stack)
                command = (str(python_of(peers, "transformers")), "-m", f"{PACKAGE}.drive_transformers")
                reference = Contestant("transformers", (*command, str(folder), str(threads)))
                references[same] = _ask(reference, chunks, prompts if same == "F32" else (), threads)
        say(f"scoring the text with this engine, {kind}")
        path = files.shipped if kind == "as shipped" else files.gguf(kind)
        settings = {"model": str(path), "threads": threads, **(engine or {})}
        ours = Contestant("lockstep", (sys.executable, "-m", f"{PACKAGE}.drive_own", json.dumps(settings)))
        scored, made = _ask(ours, chunks, prompts if same == "F32" else (), threads)
        theirs, expected = references[same]
        greedy = [agreeing(a, b) for a, b in zip(made, expected, strict=True)]
        found.append(compare(kind, scored, theirs, greedy))
    return found


def _folder(files: Files, kind: str, stack: ExitStack) -> Path:
    """The weights of ``kind``, dequantised, as a Hugging Face folder; only that of F32 is kept."""
    if kind == "F32":
        return files.hf
    place = Path(tempfile.mkdtemp(dir=files.folder, prefix="quality-"))
    stack.callback(shutil.rmtree, place)
    write_folder(load_model(files.gguf(kind)), place / "hf")
    return place / "hf"


def _ask(
    one: Contestant, chunks: Sequence[list[int]], prompts: Sequence[Ask], threads: int
) -> tuple[Scored, list[list[int]]]:
    with closing(Worker(one, threads)) as worker:
        worker.start()
        told = [worker.ask({"score": chunk}, PATIENCE) for chunk in chunks]
        made = [worker.run([Ask(ask.prompt, GREEDY)], PATIENCE).tokens[0] for ask in prompts[:PROMPTS]]
    logprobs = [value for answer in told for value in answer["logprobs"]]
    return Scored(logprobs, [token for answer in told for token in answer["best"]]), made
