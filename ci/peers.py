"""Other engines to measure beside this one: each in an environment of its own, with exact versions, and its model files.

    make peers                              transformers, OpenVINO GenAI, CTranslate2 and llama.cpp
    make peers PEERS="openvino"             some of them

An environment is .peers/NAME, made from ci/peers/NAME.txt; its stamp is written last, so that an interrupted set-up is never
taken for a finished one. Model files are made of the default model, once, in .peers/models.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from server.bench.offline.contestants import NEEDED, OPTIONAL, PACKAGE, python_of
from server.bench.offline.models import Files, files_of, once, prepare

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
PINS = ROOT / "ci" / "peers"
IMPORTS = {
    "transformers": "torch, transformers",
    "openvino": "openvino_genai",
    "ctranslate2": "ctranslate2",
    "llamacpp": "xllamacpp",
}


class Failed(Exception):
    """What could not be made; the message says which command failed."""


def say(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


def key(pins: Path) -> str:
    return hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()


def install(name: str, peers: Path = PEERS, pins: Path = PINS) -> bool:
    """Makes the environment ``name``; False if it was ready. Raises ``Failed``."""
    folder, wanted = peers / name, pins / f"{name}.txt"
    stamp = folder / ".ready"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key(wanted):
        return False
    say(f"{name}: making its environment")
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(folder)], name)
    say(f"{name}: installing {len(wanted.read_text(encoding='utf-8').split())} packages")
    pip = [str(python_of(peers, name)), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    run([*pip, "-r", str(wanted)], name)
    run([str(python_of(peers, name)), "-c", f"import {IMPORTS[name]}"], name)
    stamp.write_text(key(wanted), encoding="utf-8")
    return True


def convert(name: str, files: Files, peers: Path = PEERS) -> None:
    """Model files that only the peer's own package can write."""
    python = str(python_of(peers, name))
    if name == "ctranslate2":
        worker = [python, "-m", f"{PACKAGE}.drive_ctranslate2", "convert", str(files.hf)]
        once(files, files.ct2, say, lambda out: run([*worker, str(out)], name))
    if name == "openvino":
        once(files, files.openvino, say, partial(_openvino, python, files))


def _openvino(python: str, files: Files, out: Path) -> None:
    worker = [python, "-m", f"{PACKAGE}.convert_openvino"]
    saved = files.folder / "ov.saved"
    shutil.rmtree(saved, ignore_errors=True)
    saved.mkdir(parents=True)
    try:
        os.link(files.gguf("F16"), saved / "f16.gguf")
        run([*worker, "save", str(saved / "f16.gguf")], "openvino")
        run([*worker, "raise", str(files.hf), str(saved), str(out)], "openvino")
    finally:
        shutil.rmtree(saved)


def run(command: Sequence[str], name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-8:]
        said = "\n  ".join(lines) or "it said nothing"
        raise Failed(f"{name}: {' '.join(command[:6])} ... ended with status {done.returncode}:\n  {said}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*NEEDED, *OPTIONAL)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--model", type=Path, help="a .gguf file; by default the default model")
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in names:
            parser.error(f"NAME is {name!r}, but must be one of {', '.join(names)}")
    began = time.monotonic()
    try:
        files = files_of(given.model, PEERS / "models")
        for name in given.names or names:
            if not install(name):
                say(f"{name}: ready")
        prepare(files, say)
        for name in given.names or names:
            convert(name, files)
    except (Failed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"all there after {time.monotonic() - began:.0f} s, in {PEERS.relative_to(ROOT)}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
