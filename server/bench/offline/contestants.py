"""Who is measured: this engine in its variants, and every peer whose environment `make peers` made."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

from server.bench.offline.models import Files

NEEDED = ("transformers", "openvino", "ctranslate2")  # without one of them the table fails
OPTIONAL = ("llamacpp",)
PACKAGE = "server.bench.offline"


@attrs.frozen
class Contestant:
    """``fp32``: weights and arithmetic are fp32, so it counts for the best fp32 peer. ``int8``: activations are rounded to
    8 bits before they are multiplied. ``peer``: whose environment runs it; None is this engine. ``command`` starts a worker
    (drive.py); an empty one is the HTTP server, with ``model``."""

    name: str
    command: tuple[str, ...]
    peer: str | None = None
    fp32: bool = False
    int8: bool = False
    cold: bool = False  # measured without the prefix cache, too
    model: str | None = None


class Missing(Exception):
    """Peers that are not installed; the message names them and the command that installs them."""


def python_of(peers: Path, name: str) -> Path:
    return peers / name / "bin" / "python"


def missing(peers: Path, files: Files) -> list[str]:
    """Peers without a finished environment or without their model files, in NEEDED's order."""
    places = {"transformers": files.hf, "openvino": files.openvino, "ctranslate2": files.ct2}
    return [name for name in NEEDED if not ready(peers, name) or not places[name].exists()]


def ready(peers: Path, name: str) -> bool:
    """Whether ``make peers`` finished this environment: its stamp is written last."""
    return (peers / name / ".ready").exists() and python_of(peers, name).exists()


def own(files: Files, threads: int, *, http: bool = False, int8: bool = True) -> list[Contestant]:
    """This engine: the shipped file, with activations in fp32 and, where it is quantised (``int8``), in 8 bits, and F32
    weights on native kernels, and the torch fallback."""

    def settings(model: Path, **more: str) -> tuple[str, ...]:
        config = {"model": str(model), "threads": threads, **more}
        return (sys.executable, "-m", f"{PACKAGE}.drive_own", json.dumps(config))

    found = [
        Contestant("lockstep, as shipped", settings(files.shipped), cold=True),
        Contestant("lockstep, F32", settings(files.gguf("F32")), fp32=True, cold=True),
        Contestant("lockstep, torch fallback", settings(files.shipped, compute="torch"), fp32=True),
    ]
    if int8:
        found.insert(1, Contestant("lockstep, int8 activations", settings(files.shipped, compute="int8"), int8=True))
    if http:
        found.insert(1, Contestant("lockstep, as shipped, HTTP", (), model=str(files.shipped)))
    return found


def installed(files: Files, peers: Path, threads: int) -> list[Contestant]:
    """Every variant of every peer that is installed."""
    found: list[Contestant] = []

    def add(peer: str, label: str, *arguments: str, fp32: bool = False, int8: bool = False) -> None:
        if ready(peers, peer):
            command = (str(python_of(peers, peer)), "-m", f"{PACKAGE}.drive_{peer}", *arguments)
            found.append(Contestant(label, command, peer, fp32, int8))

    count = str(threads)
    add("transformers", "transformers, fp32", str(files.hf), count, fp32=True)
    add("openvino", "OpenVINO GenAI, f32", str(files.openvino), count, "f32", "default", fp32=True)
    add("openvino", "OpenVINO GenAI, Q8_0", str(files.gguf("Q8_0")), count, "f32", "default", int8=True)
    add("ctranslate2", "CTranslate2, fp32", "serve", str(files.ct2), count, "float32", fp32=True)
    add("ctranslate2", "CTranslate2, int8", "serve", str(files.ct2), count, "int8", int8=True)
    add("llamacpp", "llama.cpp, F32", str(files.gguf("F32")), count, fp32=True)
    add("llamacpp", "llama.cpp, as shipped", str(files.shipped), count, int8=True)
    return found


def contestants(
    files: Files,
    peers: Path,
    threads: int,
    *,
    with_peers: bool,
    http: bool,
    int8: bool = True,
    only: Sequence[str] = (),
) -> list[Contestant]:
    """Everybody, or those whose name holds one of ``only``. Raises ``Missing`` unless peers are not wanted."""
    everybody = own(files, threads, http=http, int8=int8)
    if with_peers:
        if absent := missing(peers, files):
            raise Missing(
                f"not installed: {', '.join(absent)}; `make peers` installs them, --no-peers measures without any"
            )
        everybody += installed(files, peers, threads)
    chosen = [one for one in everybody if not only or any(part in one.name for part in only)]
    if not chosen:
        raise ValueError(f"--only {', '.join(only)} names nobody of {', '.join(one.name for one in everybody)}")
    return chosen
