"""Packed weights on disk: the second start maps what the first packed; whatever is wrong with a file, the start succeeds."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.build import assemble, resolve_weights_cache
from engine.config import EngineConfig
from engine.loading import load_model
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from engine.native import weights_cache
from engine.native.packed_file import Damaged, FileTensors
from engine.native.runner import library
from engine.native.tensors import SourceTensors
from engine.native.weights import NativeWeights, load_native
from engine.native.weights_cache import WeightsCache
from tests.compute.driver import Driver, text
from tests.models import write_folder, write_gguf


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return load_model(write_gguf(tmp_path / "model.gguf", "qwen2", "Q8_0"))


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "cache", min_bytes=0)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A test that expects one says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def logits(weights: NativeWeights) -> bytes:
    driver = Driver(weights, rows=1)
    driver.start({0: text(0, 9)})
    return driver.spy.logits[0, 9]


def packed(cache: WeightsCache) -> list[Path]:
    return sorted(path for path in cache.folder.iterdir())


def stages(model: LoadedModel, cache: WeightsCache) -> tuple[NativeWeights, set[str]]:
    seen = set()
    loaded = load_native(model, library(), lambda stage, done, total: seen.add(stage), cache)
    return loaded, seen


def test_the_second_start_maps_what_the_first_packed(
    model: LoadedModel, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_native(model, library())
    first, seen = stages(model, cache)
    assert seen == {"packing weights, once", "loading weights"}
    (path,) = packed(cache)
    assert first.origin == path
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(SourceTensors, "__init__", None)  # nothing is read from the checkpoint any more
    second, seen = stages(model, cache)
    assert seen == {"loading weights"}
    assert second.origin == path
    assert packed(cache) == [path]
    assert plain.types == first.types == second.types
    assert logits(plain) == logits(first) == logits(second)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_folders_of_any_family(family: str, tied: bool, cache: WeightsCache, tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path / "folder", family, tie_word_embeddings=tied))
    assert logits(load_native(model, library())) == logits(load_native(model, library(), None, cache))
    assert len(packed(cache)) == 1


def test_anything_else_is_another_key(model: LoadedModel, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = model.source.files  # type: ignore[attr-defined]
    keys = {cache.key(model.source), cache.key(model.source, "another layout")}
    content = path.read_bytes()
    os.utime(path, ns=(0, 10**18))
    keys.add(cache.key(model.source))
    path.write_bytes(content + b"\0")
    os.utime(path, ns=(0, 10**18))
    keys.add(cache.key(model.source))
    path.write_bytes(b"\1" + content[1:] + b"\0")
    os.utime(path, ns=(0, 10**18))
    keys.add(cache.key(model.source))
    monkeypatch.setattr(weights_cache, "_PACKING", ("product.h",))
    keys.add(cache.key(model.source))
    assert len(keys) == 6
    assert None not in keys


def test_a_change_far_from_the_beginning_is_another_key(tmp_path: Path, cache: WeightsCache) -> None:
    class Big:
        files = (tmp_path / "big",)

    content = bytearray(os.urandom(2**20) * 3)
    keys = set()
    for change in (0, 1):
        content[2**20 :] = bytes([byte ^ change for byte in content[2**20 : 2**20 + 256]]) * 2**13
        Big.files[0].write_bytes(content)
        os.utime(Big.files[0], ns=(0, 10**18))
        keys.add(cache.key(Big()))  # type: ignore[arg-type]
    assert len(keys) == 2


def test_no_file_no_key(model: LoadedModel, tmp_path: Path) -> None:
    assert WeightsCache(tmp_path, min_bytes=0).key(synthetic_model().source) is None
    assert WeightsCache(tmp_path).key(model.source) is None  # too small to be worth it


DAMAGE = {
    "a byte of a tensor": lambda data: _flipped(data, len(data) // 2),
    "a byte of the index": lambda data: _flipped(data, len(data) - 40),
    "the place of the index": lambda data: _flipped(data, 17),
    "another version": lambda data: _flipped(data, 8),
    "another magic": lambda data: _flipped(data, 0),
    "a piece is missing": lambda data: data[: len(data) // 2],
    "the last byte is missing": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "shorter than a head": lambda data: data[:20],
    "empty": lambda data: b"",
}


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_anew(damage: str, model: LoadedModel, cache: WeightsCache) -> None:
    wanted = logits(load_native(model, library(), None, cache))
    (path,) = packed(cache)
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    with pytest.warns(UserWarning, match="is made anew"):
        loaded = load_native(model, library(), None, cache)
    assert loaded.origin == path
    assert path.read_bytes() == whole
    assert logits(loaded) == wanted


def _indexed(whole: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The file with another index, whose digest is right all the same."""
    at, size = struct.unpack_from("<QQ", whole, 16)
    index = change(whole[at : at + size])
    sizes = struct.pack("<QQ", at, len(index)) + hashlib.sha256(index).digest()
    return whole[:16] + sizes + whole[16 + len(sizes) : at] + index


INDEXES: list[tuple[bytes, str]] = [
    (b"", "the index is no JSON"),
    (b"{", "the index is no JSON"),
    (b"\xff", "the index is no JSON"),
    (b"[" * 10**5, "the index is no JSON"),
    (b'{"key":%s}' % (b"9" * 5000), "the index is no JSON"),
    (b"[]", "names no tensors"),
    (b"{}", "names no tensors"),
    (b'{"key":"KEY"}', "names no tensors"),
    (b'{"key":"KEY","tensors":[]}', "names no tensors"),
    (b'{"key":7,"tensors":{}}', "another key"),
    (b'{"key":"KEY","tensors":{"a":7}}', "says of 'a': 7"),
    (b'{"key":"KEY","tensors":{"a":["F32",1]}}', "says of 'a'"),
    (b'{"key":"KEY","tensors":{"a":["F32",1,1,64,64,0]}}', "says of 'a'"),
    (b'{"key":"KEY","tensors":{"a":["F32","",1,1.5,64,64,0]}}', "says of 'a'"),
    (b'{"key":"KEY","tensors":{"a":["F32","",1,true,64,64,0]}}', "says of 'a'"),
    (b'{"key":"KEY","tensors":{"a":["F32","panels",1,1,64,64,0]}}', "a has 1 rows of 1, unlike the model's"),
]
# Rows, numbers in each, place and bytes of the last norm: 64 numbers of 4 bytes.
LIES: list[tuple[tuple[int, int, int, int], str]] = [
    ((-64, 1, 64, 256), "has -64 rows of 1, unlike"),
    ((2**70, 1, 64, 256), f"has {2**70} rows of 1, unlike"),
    ((64, 2, 64, 512), "has 64 rows of 2, unlike"),
    ((64, 1, 64, 2**70), f"has {2**70} bytes at 64"),
    ((64, 1, 64, -256), "has -256 bytes at 64"),
    ((64, 1, -64, 256), "has 256 bytes at -64"),
    ((64, 1, 2**70, 256), f"has 256 bytes at {2**70}"),
    ((64, 1, 68, 256), "has 256 bytes at 68"),
    ((64, 1, 0, 256), "has 256 bytes at 0"),
]


@pytest.mark.parametrize(("index", "told"), INDEXES, ids=range(len(INDEXES)))
def test_an_index_that_makes_no_sense(index: bytes, told: str, model: LoadedModel, cache: WeightsCache) -> None:
    load_native(model, library(), None, cache)
    (path,) = packed(cache)
    whole = path.read_bytes()
    path.write_bytes(_indexed(whole, lambda old: index.replace(b"KEY", path.stem.encode())))
    with pytest.warns(UserWarning, match="is made anew: .*" + re.escape(told)):
        assert load_native(model, library(), None, cache).origin == path
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("sizes", "told"), LIES)
def test_an_index_that_lies(sizes: tuple[int, ...], told: str, model: LoadedModel, cache: WeightsCache) -> None:
    load_native(model, library(), None, cache)
    (path,) = packed(cache)
    whole = path.read_bytes()
    norm = rb'("model\.norm\.weight":\["vector",""),64,1,\d+,256,'
    assert re.search(norm, whole)
    path.write_bytes(_indexed(whole, lambda old: re.sub(norm, rb"\1,%d,%d,%d,%d," % sizes, old)))
    with pytest.warns(UserWarning, match="is made anew: model.norm.weight " + re.escape(told)):
        assert load_native(model, library(), None, cache).origin == path
    assert path.read_bytes() == whole


def test_an_index_that_lies_about_types_is_not_used(model: LoadedModel, cache: WeightsCache) -> None:
    """As many bytes, another order: a table of 8-bit activations, from which no row can be read."""
    wanted = logits(load_native(model, library(), None, cache))
    (path,) = packed(cache)
    table = rb'("model\.embed_tokens\.weight":\["Q8_0)","[^"]+"'
    told = b'\\1 x int8","%s"' % library().layouts["Q8_0 x int8"].encode()
    path.write_bytes(_indexed(path.read_bytes(), lambda old: re.sub(table, told, old)))
    with pytest.warns(UserWarning, match="is not used: .*embed_tokens.weight is of type Q8_0 x int8"):
        loaded = load_native(model, library(), None, cache)
    assert loaded.origin is None
    assert logits(loaded) == wanted


def test_another_layout_is_made_anew(model: LoadedModel, cache: WeightsCache) -> None:
    """A file of this very key whose weights lie as those of another build, in as many bytes."""
    load_native(model, library(), None, cache)
    (path,) = packed(cache)
    whole, mine = path.read_bytes(), library().layouts["Q8_0"].encode()
    path.write_bytes(_indexed(whole, lambda old: old.replace(b'["Q8_0","%s"' % mine, b'["Q8_0","another"')))
    with pytest.warns(UserWarning, match="is made anew: .*is packed as 'another', but the kernels read"):
        assert load_native(model, library(), None, cache).origin == path
    assert path.read_bytes() == whole


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(model: LoadedModel, cache: WeightsCache) -> None:
    load_native(model, library(), None, cache)
    (path,) = packed(cache)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.warns(UserWarning, match="no regular file"):
        assert load_native(model, library(), None, cache).origin == path
    assert path.is_file()


def test_a_folder_in_the_place_of_the_file(model: LoadedModel, cache: WeightsCache) -> None:
    load_native(model, library(), None, cache)
    (path,) = packed(cache)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.warns(UserWarning, match="packed weights are not kept"), pytest.warns(UserWarning, match="made anew"):
        assert load_native(model, library(), None, cache).origin is None
    assert packed(cache) == [path]


def test_every_byte_of_the_tensors_counts(cache: WeightsCache, model: LoadedModel) -> None:
    load_native(model, library(), None, cache)
    (path,) = packed(cache)
    whole, key = path.read_bytes(), path.stem
    shapes = model.config.tensors()
    assert len(FileTensors(path, key, library(), shapes)) > 10
    with pytest.raises(Damaged, match="another key"):
        FileTensors(path, "0" * 32, library(), shapes)
    for at in torch.linspace(64, len(whole) // 2, 40).long().tolist():
        path.write_bytes(_flipped(whole, at))
        if any(whole[at : at + 64]):  # padding between tensors is nobody's
            with pytest.raises(Damaged):
                FileTensors(path, key, library(), shapes)


def test_checksum() -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(5)
    sums = {library().checksum(data[:size].clone()) for size in range(0, 1280, 7)}
    assert len(sums) == 183
    swapped = torch.cat([data[64:128], data[:64], data[128:]])
    assert library().checksum(swapped) != library().checksum(data) == library().checksum(data.clone())


def test_a_folder_that_cannot_be_written(model: LoadedModel, cache: WeightsCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match="not kept"):
        loaded = load_native(model, library(), None, WeightsCache(tmp_path / "file" / "cache", min_bytes=0))
    assert loaded.origin is None
    cache.folder.mkdir(mode=0o500)
    if os.geteuid() != 0:  # nothing is unwritable for root
        with pytest.warns(UserWarning, match="not kept"):
            assert load_native(model, library(), None, cache).origin is None
    cache.folder.chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by others"):
        assert load_native(model, library(), None, cache).origin is None


def test_a_disk_that_fills_up(model: LoadedModel, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, name: str, made: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.native.packed_file.Writer.add", full)
    with pytest.warns(UserWarning, match="No space left"):
        loaded = load_native(model, library(), None, cache)
    assert logits(loaded) == logits(load_native(model, library()))
    assert packed(cache) == []
    monkeypatch.setattr(weights_cache, "SPARE_BYTES", 2**62)
    with pytest.warns(UserWarning, match="too little room"):
        assert load_native(model, library(), None, cache).origin is None


def test_a_file_that_others_can_write_is_made_anew(model: LoadedModel, cache: WeightsCache) -> None:
    load_native(model, library(), None, cache)
    (path,) = packed(cache)
    path.chmod(0o666)
    assert load_native(model, library(), None, cache).origin == path
    assert path.stat().st_mode & 0o077 == 0


def test_what_is_not_used_any_more_is_removed(model: LoadedModel, cache: WeightsCache) -> None:
    cache.folder.mkdir(mode=0o700)
    ages = {
        f"{'a' * 32}.packed": 40,
        f"{'b' * 32}.packed": 5,
        f"{'c' * 32}12345678.tmp": 2,
        f"{'d' * 32}12345678.tmp": 0,
    }
    ages |= {"mine.packed": 400, "mine.tmp": 400}  # whoever names a folder may have other files there
    for name, days in ages.items():
        (cache.folder / name).touch()
        os.utime(cache.folder / name, times=(0, time.time() - days * 86400))
    load_native(model, library(), None, cache)
    (path,) = set(packed(cache)) - {cache.folder / name for name in ages}
    assert {path.name[0] for path in packed(cache) if path.name in ages} == {"b", "d", "m"}
    assert {cache.folder / "mine.packed", cache.folder / "mine.tmp"} < set(packed(cache))
    os.utime(path, (0, 0))
    load_native(model, library(), None, cache)
    assert path.stat().st_mtime > time.time() - 3600  # a use is noted


def test_a_new_file_takes_the_place_of_the_one_used_longest_ago(model: LoadedModel, cache: WeightsCache) -> None:
    """Eight stay, the new one among them; what another process has mapped stays whole for it."""
    cache.folder.mkdir(mode=0o700)
    others = [cache.folder / f"{number:032x}.packed" for number in range(10)]
    for age, path in enumerate(others):
        path.write_bytes(b"mapped" * 1000)
        os.utime(path, times=(0, time.time() - 3600 * (age + 1)))
    with others[-1].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as held:
        loaded = load_native(model, library(), None, cache)
        assert set(packed(cache)) == {loaded.origin, *others[: weights_cache.KEPT.files - 1]}
        assert held[:] == b"mapped" * 1000


TWO = """
import sys, time
from pathlib import Path
from engine.loading import load_model
from engine.native.runner import library
from engine.native.weights import load_native
from engine.native.weights_cache import WeightsCache
model, kernels = load_model(sys.argv[1]), library()
print("ready", flush=True)
sys.stdin.readline()
loaded = load_native(model, kernels, None, WeightsCache(Path(sys.argv[2]), min_bytes=0))
print(loaded.origin, loaded.types)
"""


@pytest.mark.timeout(300)
def test_two_processes_at_once(model: LoadedModel, cache: WeightsCache, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", TWO, str(tmp_path / "model.gguf"), str(cache.folder)]
    both = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = {process.communicate(timeout=250)[0].strip() for process in both}
    (path,) = packed(cache)
    assert len(told) == 1
    assert told.pop().startswith(str(path))
    assert logits(load_native(model, library(), None, cache)) == logits(load_native(model, library()))


def test_setting(model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:  # and not for what follows: kernels would be compiled into it
        elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        assert resolve_weights_cache("off") is None
        assert resolve_weights_cache("auto") == WeightsCache(tmp_path / "home" / "lockstep" / "weights")
    monkeypatch.setattr(weights_cache.WeightsCache, "key", lambda self, source, layout="": "f" * 32)
    for name, told in (("off", "in memory"), (str(tmp_path / "here"), f"mapped from {tmp_path / 'here'}")):
        config = EngineConfig(compute="native", num_kv_blocks=8, weights_cache=name, enforce_eager=True)
        assert told in dict(assemble(config, model).capacity())["weights"]
