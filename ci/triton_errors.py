"""How far the Triton kernels are from fp64, by head size and type: on a GPU where there is one, else in Triton's interpreter.

    python ci/triton_errors.py [--dims 64,80] [--types float32,bfloat16] [--json]

Inputs are rounded to the type first, so that an error is the kernel's and not the input's. The cache is full of NaN wherever
nobody wrote, blocks lie in random order, and the rows are one, two and five splits long. Errors are the largest absolute
difference, of outputs of the order of 1. Exit status 1 when one is above its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from engine.compute.tiles import TILE
from engine.cuda.kernels import Kernels, Layout

DIMS = (64, 80, 96, 128, 256)
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BOUNDS = {"float32": 4e-6, "float16": 2**-8, "bfloat16": 2**-5}  # narrow types: two units in the last place of 2
SPLIT = TILE
LENGTHS = (TILE - 24, 2 * TILE - 28, 5 * TILE - 20)  # positions in the cache: one, two and five splits
CHUNK = 11  # queries of the prefill chunk, at the end of the longest row
NOBODY = float("nan")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@attrs.frozen(eq=False)
class Case:
    """One layer's cache with rows of ``lengths`` positions in it, and the keys and values by row, fp64 [length, heads, dim]."""

    layout: Layout
    cache: Tensor
    tables: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def attention(self, row: int, position: int, q: Tensor, window: int | None = None) -> Tensor:
        """fp64 [heads, dim], for ``q`` [heads, dim] that asks at ``position`` of a row."""
        first = 0 if window is None else max(0, position - window + 1)
        group = self.layout.heads // self.layout.kv_heads
        k, v = (part[row][first : position + 1].repeat_interleave(group, 1) for part in (self.keys, self.values))
        scores = torch.einsum("hd,jhd->hj", q.double(), k) * self.layout.dim**-0.5
        return torch.einsum("hj,jhd->hd", scores.softmax(-1), v)


def make_case(layout: Layout, dtype: torch.dtype, lengths: tuple[int, ...], seed: int = 0, spare: int = 2) -> Case:
    """Blocks in random order, ``spare`` more columns than the longest table has, all of them on the last block."""
    generator = torch.Generator().manual_seed(seed)
    size = layout.block_size
    counts = [-(-length // size) for length in lengths]
    trash = sum(counts) + 3
    order = torch.randperm(trash, generator=generator).tolist()
    cache = torch.full((2, trash + 1, layout.kv_heads, size, layout.dim), NOBODY, dtype=dtype)
    tables = torch.full((len(lengths), max(counts) + spare), trash, dtype=torch.int64)
    rows: tuple[list[Tensor], list[Tensor]] = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        for part in (0, 1):
            content = torch.randn(length, layout.kv_heads, layout.dim, generator=generator).to(dtype)
            rows[part].append(content.double())
            for position in range(length):
                cache[part, blocks[position // size], :, position % size] = content[position]
    return Case(layout, cache.to(device()), tables.to(device()), tuple(rows[0]), tuple(rows[1]))


def queries(layout: Layout, dtype: torch.dtype, count: int, seed: int = 1) -> Tensor:
    """qkv [count, width], sharp enough that attention is far from a mean."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, layout.width, generator=generator) * 2).to(dtype).to(device())


def decode(kernels: Kernels, case: Case, qkv: Tensor, positions: Tensor, window: int | None = None) -> Tensor:
    """Attention of one query a row: [rows, heads, dim]."""
    layout = kernels.layout
    rows, splits = len(qkv), kernels.splits(case.tables.shape[1] * layout.block_size)
    scratch = (
        torch.full((rows, layout.heads, splits, layout.dim), NOBODY, device=qkv.device),
        torch.full((rows, layout.heads, splits, 2), NOBODY, device=qkv.device),
    )
    out = torch.full((rows, layout.heads * layout.dim), NOBODY, dtype=qkv.dtype, device=qkv.device)
    kernels.attend_decode(qkv, case.cache, case.tables, positions, window, scratch, out)
    return out.view(rows, layout.heads, layout.dim)


def prefill(kernels: Kernels, case: Case, row: int, qkv: Tensor, start: int, window: int | None = None) -> Tensor:
    """Attention of a run of queries at ``start ..`` of one row: [count, heads, dim]."""
    layout = kernels.layout
    out = torch.full((len(qkv), layout.heads * layout.dim), NOBODY, dtype=qkv.dtype, device=qkv.device)
    table = case.tables[row : row + 1]
    kernels.attend_prefill(qkv, case.cache, table, (0, len(qkv), start), window, out)
    return out.view(len(qkv), layout.heads, layout.dim)


def asked(layout: Layout, qkv: Tensor) -> Tensor:
    """The queries [n, heads, dim] in qkv, on the CPU."""
    return qkv[:, : layout.heads * layout.dim].view(-1, layout.heads, layout.dim).cpu()


def error(out: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference; infinite where ``out`` holds NaN."""
    difference = (out.cpu().double() - wanted).abs().max()
    return float("inf") if difference.isnan() else float(difference)


def attention_errors(dim: int, dtype: torch.dtype) -> tuple[float, float]:
    """Of the decode kernel with its merge, and of the prefill kernel."""
    layout = Layout(heads=4, kv_heads=2, dim=dim, block_size=16)
    kernels = Kernels(layout, device(), split=SPLIT)
    case = make_case(layout, dtype, LENGTHS)
    qkv = queries(layout, dtype, len(LENGTHS))
    positions = torch.tensor([length - 1 for length in LENGTHS], device=device())
    wanted = [case.attention(row, length - 1, asked(layout, qkv)[row]) for row, length in enumerate(LENGTHS)]
    decoded = error(decode(kernels, case, qkv, positions), torch.stack(wanted))
    longest = len(LENGTHS) - 1
    start = LENGTHS[longest] - CHUNK
    chunk = queries(layout, dtype, CHUNK, seed=2)
    answers = [case.attention(longest, start + i, asked(layout, chunk)[i]) for i in range(CHUNK)]
    return decoded, error(prefill(kernels, case, longest, chunk, start), torch.stack(answers))


def product_error(dim: int, dtype: torch.dtype) -> float:
    """Of the fixed-tile product: 3 rows, ``dim`` inputs, 70 outputs with a bias; relative to outputs of the order of 1."""
    kernels = Kernels(Layout(1, 1, dim, 16), device())
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, dim, generator=generator).to(dtype)
    weight = (torch.randn(70, dim, generator=generator) * dim**-0.5).to(dtype)
    bias = torch.randn(70, generator=generator).to(dtype)
    out = torch.empty(3, 70, device=device())
    kernels.linear(x.to(device()), weight.to(device()), bias.to(device()), out)
    return error(out, x.double() @ weight.double().T + bias.double())


@attrs.frozen
class Line:
    dim: int
    type: str
    decode: float
    prefill: float
    product: float

    @property
    def holds(self) -> bool:
        # The product leaves its sums in fp32, whatever it multiplied.
        return max(self.decode, self.prefill) <= BOUNDS[self.type] and self.product <= BOUNDS["float32"]


def lines(dims: tuple[int, ...] = DIMS, types: tuple[str, ...] = tuple(TYPES)) -> Iterator[Line]:
    for dim in dims:
        for name in types:
            yield Line(dim, name, *attention_errors(dim, TYPES[name]), product_error(dim, TYPES[name]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    where = torch.cuda.get_device_name() if device().type == "cuda" else "Triton's interpreter on the CPU"
    if not options.json:
        print(f"largest error against fp64, {where}\nhead  type      decode    prefill   product")
    for line in lines(tuple(map(int, options.dims.split(","))), tuple(options.types.split(","))):
        found.append(line)
        if not options.json:
            mark = "" if line.holds else f"  above {BOUNDS[line.type]:.1e}"
            errors = f"{line.decode:.1e}   {line.prefill:.1e}   {line.product:.1e}"
            print(f"{line.dim:4}  {line.type:8}  {errors}{mark}", flush=True)
    if options.json:
        print(json.dumps({"where": where, "lines": [attrs.asdict(line) for line in found]}))
    return 0 if all(line.holds for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
