"""Random weights of Llama's shape, made on the spot: a model folder for a machine to which none was carried.

    python ci/gpu_model.py FOLDER

About 210 million weights in bf16, so that a decode step on a GPU takes long enough for a crowd to gather.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tests.models import write_folder

MIDDLING: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_layers": 16,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def main(argv: list[str] | None = None, shape: dict[str, Any] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    write_folder(options.folder, dtype=torch.bfloat16, **(MIDDLING if shape is None else shape))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
