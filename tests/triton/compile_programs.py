"""Compiles device programs for a GPU that need not be there, and prints what came out as JSON. Run on its own: a process that
has imported Triton interpreted can compile nothing."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.cuda import programs
from engine.cuda.kernels import power_of_two

INT = "i32"


def attention(dim: int) -> dict[str, Any]:
    return {
        "QKV": 8 * dim, "HEADS": 4, "GROUP": 2, "SCALE": dim**-0.5, "DIM": dim, "DIM_PAD": power_of_two(dim),
        "KV_HEADS": 2, "BLOCK_SIZE": 16, "ROWS": 16, "TILE": 64, "SPLIT": 256, "WIDE": False,
    }  # fmt: skip


def calls(kind: str, dim: int) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """The types of a program's arguments, and its constants."""
    x, index, wide = f"*{kind}", "*i64", "*fp32"
    heads = attention(dim)
    few = {name: heads[name] for name in ("HEADS", "DIM", "DIM_PAD", "SPLIT")}
    cache = {"qkv": x, "keys": x, "values": x}
    tile_m = 16 if kind == "fp32" else 64
    return {
        "attend_decode": (
            cache | {"tables": index, "positions": index, "partial": wide, "stats": wide}
            | dict.fromkeys(("table_stride", "splits", "window"), INT),
            heads,
        ),
        "attend_prefill": (
            cache | {"table": index, "out": x} | dict.fromkeys(("first", "count", "start", "window"), INT),
            heads | {"GROUP_PAD": 2},
        ),
        "merge_splits": ({"partial": wide, "stats": wide, "positions": index, "out": x, "splits": INT}, few),
        "linear": (
            {"x": x, "weight": x, "bias": x, "out": x, "rows": INT},
            {"N": 100, "K": dim, "BIASED": True, "TILE_M": tile_m, "TILE_N": 64, "TILE_K": 64, "WIDE": False},
        ),
        "norm": (
            {"x": x, "delta": x, "weight": x, "chosen": index, "out": x},
            {"SIZE": dim, "PAD": power_of_two(dim), "EPS": 1e-5, "ADDS": True, "CHOOSES": True},
        ),
        "rotate": (
            {"qkv": x, "positions": index, "slots": index, "cos": wide, "sin": wide, "norms": x, "keys": x, "values": x},
            {"HEADS": 4, "KV_HEADS": 2, "HEADS_PAD": 8, "DIM": dim, "HALF_PAD": power_of_two(dim // 2),
             "BLOCK_SIZE": 16, "NORMS": True, "EPS": 1e-5},
        ),
        "silu_mul": ({"gate_up": x, "out": x}, {"SIZE": dim, "BLOCK": power_of_two(dim)}),
    }  # fmt: skip


def main() -> None:
    kind, dim = sys.argv[1], int(sys.argv[2])
    found = {}
    for name, (types, constants) in calls(kind, dim).items():
        source = ASTSource(
            fn=getattr(programs, name),
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
        )
        options = {"num_warps": 4, "enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = made.asm["ptx"]
        found[name] = {
            "shared": made.metadata.shared,
            "binary": len(made.asm["cubin"]),
            "tf32": "tf32" in ptx,
            "matrix unit": "mma" in ptx,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
