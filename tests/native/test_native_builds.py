"""The same sources built otherwise: for other vectors, without any, and with sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import engine.native
from engine.native.build import FLAGS, NO_TILES, SOURCES, TARGET, built, find_compiler, native_target, tiles_granted
from engine.native.kernels import HeadLayout
from engine.native.library import TYPES, Library
from engine.native.runner import library
from tests.native.kit import changed_source, kernels, kernels_of, numbers, same_bytes, weight

ROOT = Path(__file__).parents[2]
AVX2 = ("-mavx2", "-mfma", "-mf16c")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
KERNEL_TESTS = (
    "linear",
    "tiles",
    "attention",
    "rows",
    "refused",
    "tape",
    "sampling",
    "broken_rows",
    "integer",
    "kv",
    "small",
)
BREAKS = (
    "linear.py::test_broken_order_is_noticed",
    "integer.py::test_a_broken_order_is_noticed",
)  # with builds of their own


PROCESSORS = {
    "portable": (),
    "AVX2": AVX2,
    "AVX-512": ("-march=skylake-avx512", "-DLOCKSTEP_NO_TILES"),
    "matrix tiles": ("-march=skylake-avx512", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


def complaints(folder: Path, flags: Sequence[str]) -> str:
    command = [
        find_compiler(),
        *FLAGS,
        *flags,
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        str(folder / SOURCES[0]),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="missing optional system tool: an x86-64 processor")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_sources_compile_for_processors_that_this_one_is_not(processor: str) -> None:
    """A name that two files give to different things is seen where only one of them is compiled, too."""
    assert complaints(Path(engine.native.__file__).parent, PROCESSORS[processor]) == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="missing optional system tool: an x86-64 processor")
def test_a_clash_of_names_is_seen(tmp_path: Path) -> None:
    source = changed_source(tmp_path, "product.h", ("BYTES_AHEAD = 1536;", "BYTES_AHEAD = 1536, AHEAD = 1;"))
    seen = {name: "redefinition" in complaints(source, flags) for name, flags in PROCESSORS.items()}
    assert seen == {"portable": False, "AVX2": False, "AVX-512": False, "matrix tiles": True}


def outputs(of: Library, kind: str) -> list[torch.Tensor]:
    packed, _ = weight(kind, 50, 160, 0, of)
    kernel = kernels_of(of, 2)
    x = numbers(1, 9, 160)
    found = [torch.empty(9, 50), torch.empty(1, 50), torch.empty(9, 80), torch.empty(9, 160)]
    kernel.linear(packed, None, x, found[0])
    kernel.linear(packed, None, x[:1], found[1])
    kernel.silu_mul(x * 20, found[2])
    kernel.norm(torch.ones(160), 1e-5, x, None, None, found[3])
    return found


def attended(of: Library, dtype: torch.dtype, dim: int) -> list[torch.Tensor]:
    """Keys and values written through ``rotate``, then decode of some rows and a chunk, across the border of a tile."""
    layout, length, kernel = HeadLayout(6, 2, dim, 4, 60), 90, kernels_of(of, 2)
    pool = torch.full((2, 60, 2, 4 * dim), float("nan"), dtype=dtype)
    blocks = torch.randperm(60, generator=torch.Generator().manual_seed(1))[: -(-length // 4)]
    at, qkv = torch.arange(length), numbers(dim, length, layout.width)
    cos, sin = numbers(3, length, dim), numbers(4, length, dim)
    slots = blocks[at // 4] * 8 + at % 4  # a block holds two heads of four positions
    kernel.rotate(layout, qkv, (at, slots), (cos, sin), None, pool)
    rows = torch.tensor([3, 63, 64, 89])
    found = [qkv, torch.empty(4, 6 * dim), torch.empty(20, 6 * dim)]
    kernel.attend(layout, qkv[rows].contiguous(), rows, blocks.repeat(4, 1), pool, None, found[1])
    kernel.attend(layout, qkv[60:80].contiguous(), at[60:80], blocks[None], pool, 33, found[2])
    assert not any(out.isnan().any() for out in found)
    return [*found, pool.float()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_avx2_and_avx512_give_the_same_bytes(tmp_path: Path) -> None:
    """Sixteen lanes are the unit of every order, not the register."""
    if library().vector_bits == 0:
        pytest.skip("missing optional system tool: a processor with AVX2")
    narrow = Library(built(target=AVX2, cache=tmp_path))
    wide = Library(built(target=(*TARGET, *NO_TILES), cache=tmp_path))
    assert narrow.vector_bits == 256
    assert not wide.tiles
    for kind in TYPES:
        assert all(map(same_bytes, outputs(narrow, kind), outputs(wide, kind)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dim in (16, 18, 64, 96):  # keys are turned around in whole vectors, and what is left one by one
            assert all(map(same_bytes, attended(narrow, dtype, dim), attended(wide, dtype, dim))), (dtype, dim)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_portable_path(tmp_path: Path) -> None:
    """Close to the others, with the same promise: a row's bytes are its own."""
    portable = Library(built(target=(), cache=tmp_path))
    assert portable.vector_bits == 0
    for kind in TYPES:
        found = outputs(portable, kind)
        for mine, other in zip(found, outputs(library(), kind), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert same_bytes(found[0][:1], found[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for mine, other in zip(attended(portable, dtype, 40), attended(library(), dtype, 40), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)  # what no token wrote


def run_under_sanitizers(shared_object: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Runs kernel tests in a process of its own, with the library given and every allocation fenced."""
    runtime = subprocess.run(
        [find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    script = (
        "import sys, pytest, engine.native.runner as runner\n"
        "from pathlib import Path\n"
        "from engine.native.library import Library\n"
        "sanitized = Library(Path(sys.argv[1]))\n"
        "runner.library = lambda: sanitized\n"
        "sys.exit(pytest.main(['-q', '-x', '-s', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-m', 'not slow', *sys.argv[2:]]))\n"
    )
    environment = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script, str(shared_object), *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700, check=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernel_tests_pass_under_sanitizers(tmp_path: Path) -> None:
    shared_object = built(extra=SANITIZED, cache=tmp_path)
    files = [f"tests/native/test_native_{name}.py" for name in KERNEL_TESTS]
    deselected = [f"--deselect=tests/native/test_native_{name}" for name in BREAKS]
    result = run_under_sanitizers(shared_object, *files, *deselected)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout


# Each reads what lies behind the last number: of a row, and of a pool whose last cell is a position's.
READS_PAST_THE_END = {
    "a row": (
        "simd.h",
        "INLINE V16 load16(const float* p, int64_t n) {\n    if (n >= LANES) return load16(p);",
        "INLINE V16 load16(const float* p, int64_t n) {\n    if (n >= LANES - 1) return load16(p);",
        "rows.py",
    ),
    "a pool": (
        "attention.h",
        "place[d] = d < a.dim ? element(row + d * kv_bytes(a.kind), a.kind) : 0.0f;",
        "place[d] = element(row + d * kv_bytes(a.kind), a.kind);",
        "attention.py::test_the_last_cell_of_a_pool",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("of", READS_PAST_THE_END)
def test_sanitizers_see_a_read_past_the_end(tmp_path: Path, of: str) -> None:
    file, old, new, test = READS_PAST_THE_END[of]
    source = changed_source(tmp_path, file, (old, new))
    broken = built(folder=source, cache=tmp_path / "cache", extra=SANITIZED)
    result = run_under_sanitizers(broken, f"tests/native/test_native_{test}")
    assert result.returncode != 0
    assert "ERROR: AddressSanitizer" in result.stdout + result.stderr


def test_kernels_use_what_the_processor_has() -> None:
    """A build for this machine must not fall back to the portable path where /proc/cpuinfo lists vectors."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8") if info.exists() else ""
    wanted = 512 if "avx512dq" in flags and "avx512bw" in flags else 256 if "avx2" in flags and "fma" in flags else 0
    assert library().vector_bits == wanted
    assert library().tiles == (native_target() == TARGET and tiles_granted() and wanted == 512)
    assert kernels().pool.threads == 1
