"""The safetensors of a model folder: one file, or shards under an index, checked whole before a tensor is read."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from engine.loading.hf_config import read_json
from engine.loading.model import LoadError, ModelConfig, StoredTensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = ("F32", "F16", "BF16", "F64")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # old checkpoints stored this constant


@attrs.frozen
class TensorPlace:
    file: Path
    dtype: str
    shape: tuple[int, ...]


@attrs.frozen
class FolderSource:
    """Tensors on demand from files that were checked; a file is open only while one tensor is read."""

    places: Mapping[str, TensorPlace]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({place.file for place in self.places.values()}))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.places[name].shape

    def load(self, name: str) -> torch.Tensor:
        tensor = self._read(name)
        return tensor.to(torch.float32, copy=True).contiguous()

    def stored(self, name: str) -> StoredTensor:
        place = self.places[name]
        if place.dtype not in ("F32", "F16", "BF16"):
            tensor = self.load(name)
            return StoredTensor("F32", tensor.reshape(-1, tensor.shape[-1]).view(torch.uint8))
        tensor = self._read(name).clone()
        return StoredTensor(place.dtype, tensor.reshape(-1, tensor.shape[-1]).view(torch.uint8))

    def weight_types(self) -> str:
        counts = Counter(place.dtype for place in self.places.values())
        return ", ".join(f"{kind} ({count})" for kind, count in counts.most_common())

    def _read(self, name: str) -> torch.Tensor:
        place = self.places[name]
        try:
            with safe_open(place.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{place.file}: tensor {name!r} cannot be read: {error}") from None
        if tuple(tensor.shape) != place.shape:
            raise LoadError(f"{place.file}: tensor {name!r} changed its shape after the file was opened")
        return tensor


def open_weights(folder: Path, config: ModelConfig) -> FolderSource:
    """Finds every tensor of ``config`` in ``folder`` and checks name, shape and type. Raises ``LoadError``."""
    found: dict[str, TensorPlace] = {}
    for path, indexed in _files(folder).items():
        present = _inspect(path)
        if indexed is not None:
            _compare(path, indexed, present)
        found |= present
    places: dict[str, TensorPlace] = {}
    for name, shape in config.tensors().items():
        place = found.pop(name, None)
        if place is None:
            hint = "; tie_word_embeddings is false, so the file must hold it" if name == _HEAD else ""
            raise LoadError(f"{folder}: tensor {name!r} is in none of the safetensors files{hint}")
        if place.shape != shape:
            raise LoadError(f"{place.file}: tensor {name!r} has shape {place.shape}, but the model needs {shape}")
        if place.dtype not in _FLOATS:
            allowed = ", ".join(_FLOATS)
            raise LoadError(f"{place.file}: tensor {name!r} is of type {place.dtype}, but must be one of {allowed}")
        places[name] = place
    source = FolderSource(places)
    _check_rest(source, found)
    return source


def _check_rest(source: FolderSource, rest: Mapping[str, TensorPlace]) -> None:
    extra = [name for name in rest if not name.endswith(_UNUSED_SUFFIX)]
    if _HEAD in extra:
        # Tied models are often saved with the head as well. A copy is harmless; another matrix is another model.
        place, twin = rest[_HEAD], source.places[_EMBEDDING]
        both = FolderSource({_HEAD: place, _EMBEDDING: twin})
        if place.shape != twin.shape or not torch.equal(both.load(_HEAD), both.load(_EMBEDDING)):
            raise LoadError(
                f"{place.file}: tie_word_embeddings is true, but {_HEAD!r} is there and differs from {_EMBEDDING!r}"
            )
        extra.remove(_HEAD)
    if extra:
        place = rest[extra[0]]
        raise LoadError(f"{place.file}: {len(extra)} tensors that the model does not have, such as {extra[0]!r}")


def _files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The files to read, each with the names that the index promises (None without an index)."""
    index = folder / _INDEX
    if not index.is_file():
        if (folder / _SINGLE).is_file():
            return {folder / _SINGLE: None}
        raise LoadError(_nothing_to_load(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index}: weight_map is missing or empty")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise LoadError(f"{index}: tensor {name!r} is in {file!r}, which is not the name of a safetensors file")
        shards.setdefault(file, set()).add(name)
    for file, names in shards.items():
        if not (folder / file).is_file():
            raise LoadError(f"{folder / file}: this shard is missing; the index puts {min(names)!r} in it")
    stray = sorted(path.name for path in folder.glob("model*.safetensors") if path.name not in shards)
    if stray:
        raise LoadError(f"{folder / stray[0]}: this file is not in {_INDEX}")
    return {folder / file: frozenset(names) for file, names in shards.items()}


def _nothing_to_load(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: only pickled weights ({pickles[0]}), which can run code when they are opened; convert them to"
            " safetensors"
        )
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{folder}: holds {shards[0]}, but neither {_SINGLE} nor {_INDEX}"
    return f"{folder}: no {_SINGLE} and no {_INDEX}"


def _compare(path: Path, indexed: frozenset[str], present: Mapping[str, Any]) -> None:
    missing, extra = indexed - set(present), set(present) - indexed
    if missing:
        raise LoadError(f"{path}: the index puts tensor {min(missing)!r} in this file, but it is not there")
    if extra:
        raise LoadError(f"{path}: holds tensor {min(extra)!r}, which the index does not put in this file")


def _inspect(path: Path) -> dict[str, TensorPlace]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {name: TensorPlace(path, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: {_truncated_at(path) or error}") from None


def _truncated_at(path: Path) -> str | None:
    """Why the library refused the file, where the reason is that it is too short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > size - 8:
                return f"the header needs {length} bytes, but the file has {size}; is it truncated?"
            header = json.loads(file.read(length))
        ends = {name: item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"}
        name = max(ends, key=ends.__getitem__)
        if ends[name] > size - 8 - length:
            return f"tensor {name!r} ends at byte {8 + length + ends[name]}, but the file has {size}; is it truncated?"
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, RecursionError):
        pass
    return None
